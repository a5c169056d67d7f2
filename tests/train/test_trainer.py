"""The loop end to end on a tiny policy: what it writes, learns, passes over and refuses; test_resume has the rest."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_tiny import STEP_FIELDS, events, read

from sagc_fast.config import ControllerOptions
from sagc_fast.errors import ConfigError, DivergenceError, ModelLoadError, RewardError, SagcError
from sagc_fast.train.parts import build_controller
from sagc_fast.train.trainer import Trainer

EVAL_FIELDS = {
    "event", "step", "name", "num_problems", "temperature", "accuracy", "accuracy_stderr", "reward_mean", "length_mean",
    "clipped_ratio", "eval_seconds",
}  # fmt: skip


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


def test_the_best_checkpoint_stays(tiny):
    config = tiny(steps=6, evaluation={"every": 1, "num_problems": 16}, checkpoint={"every": 0, "keep_last": 1})
    trainer = Trainer(config)
    trainer.fit()
    best = max(events(config.run_dir, "eval"), key=lambda r: (r["accuracy"], -r["step"]))
    kept = sorted(p.name for p in (Path(config.run_dir) / "checkpoints").iterdir())
    wanted = {"step-000006"} | ({f"step-{best['step']:06d}"} if best["step"] else set())
    assert set(kept) == wanted
    assert trainer.state.best_accuracy == best["accuracy"]


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
