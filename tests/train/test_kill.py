"""SIGKILL at random moments, some of them in a checkpoint's writing: the resumed run equals the uninterrupted one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from train_tiny import tiny_values

SCRIPT = Path(__file__).parents[2] / "bench" / "kill_test.py"


def test_a_killed_run_equals_the_uninterrupted_one_to_the_bit(policy, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(tiny_values(policy, tmp_path / "unused", steps=8, algo={"name": "dapo"})))
    result = subprocess.run(
        [sys.executable, SCRIPT, "--kills", "3", "--config", config, "--keep", tmp_path / "runs"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["differences"] == []
    assert report["kills"] == 3
