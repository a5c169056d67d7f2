"""The loop end to end on a tiny policy: what it writes, how it stops, and that it continues to the bit."""

from __future__ import annotations

import json
import math
import os
import pkgutil
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_tiny import tiny_values

from sagc_fast.config import ControllerOptions, TrainConfig
from sagc_fast.errors import CheckpointError, ConfigError, DivergenceError, ModelLoadError, RewardError, SagcError
from sagc_fast.train import files
from sagc_fast.train.parts import build_controller
from sagc_fast.train.trainer import Trainer

STEP_FIELDS = {
    "event", "step", "time_seconds", "controller", "group_size", "lambda", "delta", "tau", "num_groups",
    "num_straggler_groups", "straggler_rate", "straggler_ratio_mean", "straggler_ratio_max", "clipped_ratio",
    "reward_mean", "reward_std", "outcome_mean", "num_groups_kept", "num_groups_sampled", "length_mean", "length_max",
    "length_quantiles", "num_output_tokens", "num_prompt_tokens", "num_update_tokens", "rollout_seconds",
    "reward_seconds", "pack_seconds", "gap_seconds",
    "update_seconds", "checkpoint_seconds", "step_seconds", "tokens_per_second", "idle_fraction",
    "tail_fraction", "num_preemptions", "loss", "grad_norm", "clip_low_fraction", "clip_high_fraction", "entropy", "kl",
    "logprob_diff_mean", "logprob_diff_max", "learning_rate", "num_reward_errors", "is_skipped",
}  # fmt: skip
EVAL_FIELDS = {
    "event", "step", "name", "num_problems", "temperature", "accuracy", "accuracy_stderr", "reward_mean", "length_mean",
    "clipped_ratio", "eval_seconds",
}  # fmt: skip


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_seconds(path: Path) -> list[dict]:
    return [{k: v for k, v in r.items() if not k.endswith("_seconds") and "per_second" not in k} for r in read(path)]


def events(run_dir: Path | str, kind: str) -> list[dict]:
    return [r for r in read(Path(run_dir) / "metrics.jsonl") if r["event"] == kind]


def assert_same_run(a: Path, b: Path, step: int) -> None:
    for name in ("metrics.jsonl", "lengths.jsonl", "timeline.jsonl"):
        assert without_seconds(a / name) == without_seconds(b / name), name
    folders = [run / f"checkpoints/step-{step:06d}" for run in (a, b)]
    tensors = [path.name for path in folders[0].glob("*.safetensors")]
    assert len(tensors) == 2
    for name in (*tensors, "length_history.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


@pytest.fixture(scope="module")
def straight(policy, tmp_path_factory) -> Path:
    """The run directory of the four steps of the plain tiny configuration, never interrupted."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    Trainer(TrainConfig.from_dict(tiny_values(policy, run_dir))).fit()
    return run_dir


@pytest.mark.parametrize("kind", ["sagc", "fixed"])
def test_a_run_leaves_what_it_promises(tiny, kind):
    config = tiny(controller={"kind": kind, "group_size": 3})
    summary = Trainer(config).fit()
    run_dir = Path(config.run_dir)
    assert sorted(p.name for p in run_dir.iterdir() if not p.name.startswith(".")) == [
        "checkpoints", "config.yaml", "lengths.jsonl", "log.txt", "metrics.jsonl", "timeline.jsonl", "versions.json",
    ]  # fmt: skip
    steps, evals = events(run_dir, "step"), events(run_dir, "eval")
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    assert all(set(r) >= STEP_FIELDS for r in steps)
    assert [r["step"] for r in evals] == [0, 2, 4]
    assert all(set(r) >= EVAL_FIELDS for r in evals)
    assert all(("arms" in r) == (kind == "sagc") for r in steps)
    if kind == "fixed":
        assert {r["group_size"] for r in steps} == {3}
    else:
        assert set(steps[-1]["arms"]) == {"2", "4"}
        assert set(steps[-1]["arms"]["2"]) == {"mean", "low", "high", "pulls"}
    assert [r["time_seconds"] for r in steps] == sorted(r["time_seconds"] for r in steps)
    assert all(r["logprob_diff_mean"] < 1e-5 for r in steps if r["logprob_diff_mean"] is not None)
    trace = read(run_dir / "lengths.jsonl")
    assert [[len(g) for g in r["lengths"]] for r in trace] == [[r["group_size"]] * 3 for r in trace]
    assert [r["problem_ids"] for r in trace] == [[201] * 3] * 4, "two terms of one digit are of one kind"
    timeline = read(run_dir / "timeline.jsonl")
    assert [r["step"] for r in timeline] == [1, 2, 4]
    for line in timeline:
        spans = [row["last_step"] - row["first_step"] + 1 for row in line["rows"]]
        assert all(span <= row["length"] for span, row in zip(spans, line["rows"], strict=True))  # drafts save steps
        assert sum(spans) == sum(line["active_rows"])
    assert summary["accuracy_before"] == evals[0]["accuracy"]
    assert summary["accuracy_after"] == evals[-1]["accuracy"]
    assert not summary["is_interrupted"]


def test_the_reward_rises(tiny):
    """A few dozen steps of a policy that is paid for digits."""
    config = tiny(
        steps=12,
        rollout={"prompts_per_step": 4},
        controller={"kind": "fixed", "group_size": 8},
        evaluation={"every": 0, "num_problems": 32},
        checkpoint={"every": 0, "keep_best": False},
    )
    summary = Trainer(config).fit()
    first, last = events(config.run_dir, "eval")
    assert last["reward_mean"] > first["reward_mean"] + 0.1
    assert summary["accuracy_after"] > summary["accuracy_before"]


def test_the_policy_version_counts_steps_and_weights_change_in_place(tiny):
    trainer = Trainer(tiny())
    trainer.fit()
    assert trainer.engine.policy_version == 4
    assert trainer.optimizer.num_updates == 4


def test_a_checkpoint_is_a_model_that_transformers_loads(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = tiny(steps=2)
    trainer = Trainer(config)
    trainer.fit()
    folder = Path(config.run_dir) / "checkpoints" / "step-000002"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)("12+34=")["input_ids"])
    ours = trainer.engine.model.forward_dense(ids)
    torch.testing.assert_close(theirs(ids[None]).logits[0], ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"algo": {"name": "dapo"}, "controller": {"hold": "tokens"}},
        {"model": {"dtype": "bf16"}, "algo": {"kl_beta": 0.1}, "update": {"old_logprobs": "recompute"}},
        {"update": {"num_epochs": 2, "num_minibatches": 2}, "controller": {"hold": "completions"}},
        {
            "lora": {"rank": 2, "dropout": 0.2, "target_modules": ["q_proj", "up_proj", "lm_head"]},
            "algo": {"kl_beta": 0.1},
            "update": {"checkpoint_activations": True},
        },
        {"lora": {"rank": 3}, "model": {"dtype": "bf16"}},
        {"rollout": {"kv_budget_gb": 1.2e-5, "block_size": 4}, "evaluation": {"num_problems": 9}},
    ],
    ids=["grpo", "dapo-tokens", "bf16-kl-recompute", "epochs-completions", "lora-kl-dropout", "lora-bf16", "preempted"],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tiny, tmp_path, sections):
    """Stopped after step 3 as by a crash: everything after the checkpoint of step 2 is lost and done again."""
    straight = tiny(steps=5, run_dir=tmp_path / "straight", **sections)
    Trainer(straight).fit()
    broken = tiny(steps=5, run_dir=tmp_path / "broken", **sections)
    trainer = Trainer(broken)
    crash_after(trainer, step=3)
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert len(events(broken.run_dir, "step")) == 3
    Trainer(broken, resume=True).fit()
    assert_same_run(tmp_path / "straight", tmp_path / "broken", step=5)
    if "rollout" in sections:
        assert sum(r["num_preemptions"] for r in events(broken.run_dir, "step")) > 0


def test_a_signal_between_a_steps_checkpoint_and_the_next_step_is_not_lost(tiny, tmp_path):
    """The run used to end there without a checkpoint of what it had done."""
    config = tiny(
        run_dir=tmp_path / "late", evaluation={"num_problems": 0}, checkpoint={"every": 0, "keep_best": False}
    )
    trainer = Trainer(config)
    original = trainer._checkpoint_if_due

    def signalled_after():
        original()
        trainer.stop.is_set = True

    trainer._checkpoint_if_due = signalled_after
    assert trainer.fit()["is_interrupted"]
    assert [p.name for p in (tmp_path / "late" / "checkpoints").iterdir()] == ["step-000001"]


def test_adapters_are_trained_and_the_base_stays(tiny, policy):
    """Only the adapter is saved; with the base it is the policy that was trained, with the rollout's log-probs."""
    from sagc_fast.model.loader import load_model

    config = tiny(
        lora={"rank": 4, "alpha": 8}, optimizer={"learning_rate": 0.05}, algo={"name": "grpo", "kl_beta": 0.01}
    )
    trainer = Trainer(config)
    trainer.fit()
    folder = Path(config.run_dir) / "checkpoints" / "step-000004"
    assert (folder / "adapter_model.safetensors").stat().st_size < (policy / "model.safetensors").stat().st_size
    assert not (folder / "model.safetensors").exists()
    model, base = trainer.engine.model, load_model(policy)
    assert trainer.updater.reference is None, "the reference is the base below the adapters"
    assert not torch.equal(model.layers[0].qkv_weight, base.layers[0].qkv_weight)
    for name, merged in load_model(folder).named_parameters():
        assert torch.equal(merged, model.get_parameter(name))
    with model.adapters.unmerged():
        for name, parameter in base.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter)
    steps = events(config.run_dir, "step")
    assert all(r["logprob_diff_mean"] < 1e-5 for r in steps if r["logprob_diff_mean"] is not None)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert steps[-1]["kl"] > 0
    Trainer(tiny(lora={"rank": 4, "alpha": 8, "init_from": str(folder)}, run_dir=folder.parent.parent / "next")).fit()


def test_problems_that_teach_nothing_are_passed_over_and_a_resumed_run_agrees(tiny, tmp_path):
    lines = [json.dumps({"question": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(5)]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    task = {
        "name": "jsonl",
        "path": str(tmp_path / "problems.jsonl"),
        "check": "exact",
        "reward": "train_scorers:by_id",
    }
    sections = {"algo": {"skip_after": 4, "skip_times": 2}, "evaluation": {"num_problems": 0}}
    values = {**tiny_values(Path("unused"), tmp_path / "straight"), "steps": 7, **sections, "task": task}
    values["model"] = tiny().to_dict()["model"]
    straight = TrainConfig.from_dict(values)
    Trainer(straight).fit()
    passed_over = [r["num_prompts_passed_over"] for r in events(straight.run_dir, "step")]
    assert passed_over[0] == 0
    assert sum(passed_over) > 0
    trainer = Trainer(straight.with_overrides([f"run_dir={tmp_path / 'broken'}"]))
    trainer._stop_if_not_finite = lambda *_: 1 / 0 if trainer.state.step == 5 else None
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    Trainer(straight.with_overrides([f"run_dir={tmp_path / 'broken'}"]), resume=True).fit()
    assert_same_run(tmp_path / "straight", tmp_path / "broken", step=7)


def crash_after(trainer: Trainer, step: int) -> None:
    """A bug in the middle of the run, after the step's lines are written and before its checkpoint."""
    original = trainer._evaluate_if_due

    def crash():
        if trainer.state.step >= step:
            raise ZeroDivisionError
        original()

    trainer._evaluate_if_due = crash


def test_a_run_that_died_before_its_first_checkpoint_starts_again(tiny, tmp_path, straight):
    config = tiny(run_dir=tmp_path / "broken")
    trainer = Trainer(config)
    crash_after(trainer, step=1)
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    Trainer(config, resume=True).fit()
    assert_same_run(straight, tmp_path / "broken", step=4)


def test_a_run_may_grow_and_a_complete_one_says_so(tiny, tmp_path, caplog):
    Trainer(tiny(steps=6, evaluation={"num_problems": 0}, run_dir=tmp_path / "straight")).fit()
    short = tiny(steps=3, evaluation={"num_problems": 0}, run_dir=tmp_path / "grown")
    Trainer(short).fit()
    before = (tmp_path / "grown" / "metrics.jsonl").read_bytes()
    Trainer(short, resume=True).fit()
    assert "the run is complete at step 3" in caplog.text
    assert (tmp_path / "grown" / "metrics.jsonl").read_bytes() == before
    Trainer(tiny(steps=6, evaluation={"num_problems": 0}, run_dir=tmp_path / "grown"), resume=True).fit()
    assert without_seconds(tmp_path / "straight" / "metrics.jsonl") == without_seconds(
        tmp_path / "grown" / "metrics.jsonl"
    )


def test_a_damaged_newest_checkpoint_costs_steps_and_not_bits(tiny, tmp_path, caplog, straight):
    shutil.copytree(straight, tmp_path / "damaged")
    os.truncate(tmp_path / "damaged" / "checkpoints" / "step-000004" / "optimizer.safetensors", 200)
    Trainer(tiny(run_dir=tmp_path / "damaged"), resume=True).fit()
    assert "step-000004 is damaged" in caplog.text
    assert_same_run(straight, tmp_path / "damaged", step=4)


def test_a_fallback_after_a_file_lost_lines_writes_no_step_twice(tiny, tmp_path, straight):
    shutil.copytree(straight, tmp_path / "short")
    lines = (tmp_path / "short" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "short" / "metrics.jsonl").write_text(lines[0])
    Trainer(tiny(steps=6, run_dir=tmp_path / "short"), resume=True).fit()
    for step in (6, 5):
        for checkpoint in (tmp_path / "short" / "checkpoints").glob(f"step-{step:06d}"):
            os.truncate(checkpoint / "optimizer.safetensors", 200)
    Trainer(tiny(steps=6, run_dir=tmp_path / "short"), resume=True).fit()
    steps = [r["step"] for r in events(tmp_path / "short", "step")]
    assert steps == [5, 6]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(tiny, tmp_path, number, straight):
    config = tiny(run_dir=tmp_path / "stopped")
    trainer = Trainer(config)
    handler = signal.getsignal(number)
    original = trainer._train_step

    def step_with_signal():
        if trainer.state.step == 2:
            os.kill(os.getpid(), number)
        original()

    trainer._train_step = step_with_signal
    summary = trainer.fit()
    assert summary["is_interrupted"]
    assert summary["steps"] == 3
    assert summary["resume_command"] == f"sagc-fast train --resume --run-dir {tmp_path / 'stopped'}"
    assert (tmp_path / "stopped" / "checkpoints" / "step-000003").is_dir()
    assert signal.getsignal(number) == handler
    assert "after the current step" in (tmp_path / "stopped" / "log.txt").read_text()
    Trainer(config, resume=True).fit()
    assert_same_run(straight, tmp_path / "stopped", step=4)


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_signal_ends_an_evaluation_which_the_resumed_run_repeats(tiny, tmp_path, step, straight):
    config = tiny(run_dir=tmp_path / "stopped")
    trainer = Trainer(config)

    def progress(phase, done, total):
        if phase == "evaluation" and done == 2 and trainer.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.display.progress = progress
    summary = trainer.fit()
    assert summary["is_interrupted"]
    assert summary["steps"] == step
    assert (tmp_path / "stopped" / "checkpoints" / f"step-{step:06d}").is_dir()
    assert step not in [e["step"] for e in events(config.run_dir, "eval")]
    assert not Trainer(config, resume=True).fit()["is_interrupted"]
    assert_same_run(straight, tmp_path / "stopped", step=4)
    states = [
        json.loads((run / "checkpoints/step-000004/state.json").read_text()) for run in (straight, tmp_path / "stopped")
    ]
    assert states[0]["evaluated_step"] == states[1]["evaluated_step"] == 4
    assert states[0]["last_accuracy"] == states[1]["last_accuracy"]


def test_a_signal_ends_the_draw_of_held_out_problems_and_the_wait_for_their_scores(tiny, monkeypatch):
    for is_asked_after in ("sagc_fast.train.draw.tokenize_prompt", "sagc_fast.train.trainer.ScoringPool.results"):
        trainer = Trainer(tiny(run_dir=f"{tiny().run_dir}-{is_asked_after}"))
        original = pkgutil.resolve_name(is_asked_after)

        def asked(*args, original=original, trainer=trainer):
            assert not trainer.stop.is_set
            trainer.stop.is_set = True
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(is_asked_after, asked)
            assert trainer.fit()["steps"] == 0
        assert events(trainer.config.run_dir, "eval") == []


def test_the_best_checkpoint_stays(tiny):
    config = tiny(steps=6, evaluation={"every": 1, "num_problems": 16}, checkpoint={"every": 0, "keep_last": 1})
    trainer = Trainer(config)
    trainer.fit()
    best = max(events(config.run_dir, "eval"), key=lambda r: (r["accuracy"], -r["step"]))
    kept = sorted(p.name for p in (Path(config.run_dir) / "checkpoints").iterdir())
    wanted = {"step-000006"} | ({f"step-{best['step']:06d}"} if best["step"] else set())
    assert set(kept) == wanted
    assert trainer.state.best_accuracy == best["accuracy"]


def test_a_full_disk_at_a_checkpoint_is_one_sentence_and_costs_nothing_before(tiny, tmp_path, monkeypatch, straight):
    config = tiny(run_dir=tmp_path / "full")
    trainer = Trainer(config)

    def full(path):
        if trainer.state.step == 4:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sagc_fast.train.checkpoint.fsync_file", full)
    with pytest.raises(
        CheckpointError, match=r"step-000004 cannot be written: the disk is full.*step-000002 is intact"
    ):
        trainer.fit()
    monkeypatch.undo()
    Trainer(config, resume=True).fit()
    assert_same_run(straight, tmp_path / "full", step=4)


def test_a_loss_that_is_not_finite_is_skipped_counted_and_dumped(tiny, monkeypatch):
    config = tiny(steps=6, update={"max_bad_steps": 3})
    trainer = Trainer(config)
    poison(monkeypatch, trainer, steps={2, 4, 5})
    trainer.fit()
    records = events(config.run_dir, "step")
    assert [r["is_skipped"] for r in records] == [False, True, False, True, True, False]
    assert records[1]["loss"] is None
    dumps = sorted(p.name for p in (Path(config.run_dir) / "nonfinite").iterdir())
    assert dumps == ["step-000002.json", "step-000004.json", "step-000005.json"]
    dump = json.loads((Path(config.run_dir) / "nonfinite" / dumps[0]).read_text())
    assert dump["groups"][0]["prompt"]
    assert len(dump["groups"][0]["completions"]) == records[1]["group_size"]


def test_weights_that_have_diverged_end_the_run_in_one_sentence(tiny):
    """Finite gradients may lead there as well: the next rollout finds it. It used to be a traceback."""
    config = tiny(steps=9, optimizer={"learning_rate": 1e20, "warmup_steps": 0}, evaluation={"num_problems": 0})
    with pytest.raises(DivergenceError, match=r"(overflow|holds NaN).*has diverged: lower optimizer\.learning_rate"):
        Trainer(config).fit()


def test_a_model_that_is_broken_before_training_is_named_as_such(tiny, policy, tmp_path):
    """Nothing was trained yet: a lower learning rate would not help."""
    folder = tmp_path / "broken"
    shutil.copytree(policy, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(DivergenceError, match=r"weight layers\.0\.down_weight holds NaN or infinity") as caught:
        Trainer(tiny(model={"path": str(folder)}, steps=1)).fit()
    assert "learning_rate" not in str(caught.value)


def test_too_many_of_them_in_a_row_stop_the_run(tiny, monkeypatch):
    config = tiny(steps=6, update={"max_bad_steps": 2})
    trainer = Trainer(config)
    poison(monkeypatch, trainer, steps={3, 4})
    with pytest.raises(SagcError, match="not finite in 2 steps in a row"):
        trainer.fit()
    assert len(events(config.run_dir, "step")) == 4


def poison(monkeypatch, trainer: Trainer, steps: set[int]) -> None:
    import sagc_fast.train.update as update

    original = update.linear_policy_loss

    def poisoned(*args, **kwargs):
        output, logp_N = original(*args, **kwargs)
        if trainer.state.step + 1 in steps:
            output = type(output)(output.loss * math.nan, output.metrics)
        return output, logp_N

    monkeypatch.setattr(update, "linear_policy_loss", poisoned)


@pytest.mark.parametrize(
    ("scorer", "words"),
    [
        ("constant", "no completion is judged correct"),
        ("always_right", "every completion is correct"),
        ("raises", "every completion's scorer failed (raise: ValueError: no reward today"),
    ],
)
def test_no_learning_signal_raises_one_alarm(tiny, scorer, words):
    config = tiny(steps=5, task={"reward": f"train_scorers:{scorer}"}, checkpoint={"every": 0, "keep_best": False})
    Trainer(config).fit()
    alarms = [line for line in (Path(config.run_dir) / "log.txt").read_text().splitlines() if "ALARM" in line]
    assert words in alarms[0]
    assert len(alarms) == (2 if scorer == "raises" else 1)
    assert events(config.run_dir, "step")[0]["num_reward_errors"] == (6 if scorer == "raises" else 0)


def test_dynamic_sampling_without_signal_skips_the_update_and_goes_on(tiny):
    config = tiny(steps=2, algo={"name": "dapo"}, task={"reward": "train_scorers:always_wrong"})
    trainer = Trainer(config)
    trainer.fit()
    for record in events(config.run_dir, "step"):
        assert (record["is_skipped"], record["num_groups_kept"], record["num_groups_sampled"]) == (True, 0, 12)
        assert record["num_groups"] == 3
    assert trainer.state.position == 24


def test_the_controller_sees_the_whole_first_round_whatever_is_dropped(tiny):
    config = tiny(steps=3, algo={"name": "dapo"})
    trainer = Trainer(config)
    seen = []
    build = trainer._build

    def build_and_listen(*args):
        build(*args)
        observe = trainer.controller.observe
        trainer.controller.observe = lambda lengths, **more: (seen.append(lengths), observe(lengths, **more))

    trainer._build = build_and_listen
    trainer.fit()
    records = events(config.run_dir, "step")
    assert any(r["num_groups_kept"] != r["num_groups"] or r["num_groups_sampled"] > r["num_groups"] for r in records)
    assert seen == [r["lengths"] for r in read(Path(config.run_dir) / "lengths.jsonl")]
    assert [len(lengths) for lengths in seen] == [r["num_groups"] for r in records] == [3, 3, 3]


def test_what_a_controllers_options_warn_of_is_said_once():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        build_controller(ControllerOptions(candidates=(2, 4)), seed=0, max_length=8)
    assert [str(w.message).count("G=2 cannot straggle") for w in said] == [1]


def test_mistakes_leave_no_run_directory_behind(tiny, tmp_path):
    for sections, error in (
        ({"model": {"path": str(tmp_path / "nowhere")}}, ModelLoadError),
        ({"task": {"reward": "train_scorers:nothing"}}, RewardError),
        ({"task": {"max_digitz": 2}}, ConfigError),
    ):
        config = tiny(**sections)
        with pytest.raises(error):
            Trainer(config).fit()
        assert not Path(config.run_dir).exists()


def test_a_model_without_tokenizer_is_named(tiny, policy, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(policy / name, bare / name)
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        Trainer(tiny(model={"path": str(bare)})).fit()


def test_torch_and_warnings_are_left_as_they_were(tiny):
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    Trainer(tiny(steps=1)).fit()
    assert (torch.get_num_threads(), torch.get_deterministic_debug_mode()) == before


def test_state_of_another_version_is_refused(tiny, monkeypatch):
    config = tiny(steps=2)
    Trainer(config).fit()
    path = Path(config.run_dir) / "checkpoints" / "step-000002"
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "novelty": 1}))
    manifest = json.loads((path / "manifest.json").read_text())
    entry = {"bytes": (path / "state.json").stat().st_size, "sha256": files.checksum(path / "state.json")}
    manifest["files"]["state.json"] = entry
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="another version"):
        Trainer(config, resume=True).fit()
