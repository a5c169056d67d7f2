"""``sagc-fast train`` from the command line: from YAML to a run directory, and back into it."""

from __future__ import annotations

import json
import os
import signal

import yaml
from train_tiny import tiny_values

from sagc_fast.cli import main
from sagc_fast.train.trainer import Trainer


def config_file(policy, tmp_path):
    values = tiny_values(policy, tmp_path / "unused", metrics={"display": "plain"}, evaluation={"num_problems": 0})
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_train_then_resume_and_grow(policy, tmp_path, capsys):
    run_dir = str(tmp_path / "run")
    assert main(["train", "--config", config_file(policy, tmp_path), "--run-dir", run_dir, "steps=1"]) == 0
    out = capsys.readouterr().out
    assert "step 1/1  G 2" in out
    assert out.endswith(f"sagc-fast report {run_dir}\n")
    assert main(["train", "--config", config_file(policy, tmp_path), "--run-dir", run_dir, "steps=1"]) == 2
    assert "continue it with --resume" in capsys.readouterr().err
    assert main(["train", "--resume", "--run-dir", run_dir, "steps=2", "--json"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["steps"] == 2
    assert "continuing after step 1" in out.err
    assert main(["train", "--resume", "--run-dir", run_dir, "steps=3", "seed=8"]) == 2
    assert "seed (3 -> 8)" in capsys.readouterr().err


def test_two_names_of_the_runs_folder_are_refused(policy, tmp_path, capsys):
    run_dir = str(tmp_path / "run")
    assert main(["train", "--config", config_file(policy, tmp_path), "--run-dir", run_dir, "run_dir=other"]) == 2
    assert f"--run-dir {run_dir} and run_dir=other both name the run's folder" in capsys.readouterr().err


def test_an_interrupted_run_prints_how_to_go_on_and_exits_0(policy, tmp_path, capsys, monkeypatch):
    original = Trainer._train_step

    def step_with_signal(self):
        os.kill(os.getpid(), signal.SIGTERM)
        original(self)

    monkeypatch.setattr(Trainer, "_train_step", step_with_signal)
    run_dir = tmp_path / "my run"
    assert main(["train", "--config", config_file(policy, tmp_path), "--run-dir", str(run_dir)]) == 0
    assert f"to continue: sagc-fast train --resume --run-dir '{run_dir}'" in capsys.readouterr().out
