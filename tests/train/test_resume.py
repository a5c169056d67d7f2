"""A run that ends early, by a signal, a crash or a full disk, continues to the bit."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import signal
from pathlib import Path

import pytest
from train_tiny import assert_same_run, crash_after, events, tiny_values, without_seconds

from sagc_fast.config import TrainConfig
from sagc_fast.errors import CheckpointError
from sagc_fast.train import files
from sagc_fast.train.trainer import Trainer


@pytest.fixture(scope="module")
def straight(policy, tmp_path_factory) -> Path:
    """The run directory of the four steps of the plain tiny configuration, never interrupted."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    Trainer(TrainConfig.from_dict(tiny_values(policy, run_dir))).fit()
    return run_dir


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
