"""Kills a training run with SIGKILL at random moments, resumes it, and compares it with one that was never interrupted.

    python bench/kill_test.py --kills 50
    python bench/kill_test.py --kills 5 --config my.yaml steps=8

Every file of figures (all but seconds), the final weights and the optimizer must agree to the bit. A quarter of the
kills wait for a checkpoint to be in the middle of its writing. Runs are forked from one process that has imported
everything, so that the kills fall into training and not into imports. Ends with one JSON line; exit status 1 when
anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEFAULT = {
    "model": {"path": "addition"},
    "task": {"name": "addition"},
    "rollout": {"prompts_per_step": 4, "max_new_tokens": 48, "kv_budget_gb": 0.05},
    "controller": {"candidates": [2, 4, 8], "tau": 1.5},
    "algo": {"name": "dapo"},
    "update": {"micro_batch_tokens": 512},
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
    "evaluation": {"every": 3, "num_problems": 8},
    "checkpoint": {"every": 2, "keep_last": 2},
    "metrics": {"tensorboard": False, "display": "plain", "timeline_every": 2},
    "steps": 12,
    "threads": 1,
}
FIGURES = ("metrics.jsonl", "lengths.jsonl", "timeline.jsonl")
TENSORS = ("*.safetensors", "length_history*.json")
POLL_SECONDS = 0.002
KILLS_PER_RUN = 5
"""So many a run recovers from before it is let through to its end and compared: 50 kills compare at least ten runs."""


def start(config: Path, run_dir: Path, overrides: list[str]) -> int:
    """Fork a run that resumes ``run_dir`` if it can; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with open(run_dir.parent / f"{run_dir.name}.out", "a") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        from sagc_fast.cli import main

        status = main(["train", "--config", str(config), "--run-dir", str(run_dir), "--resume", *overrides])
    finally:
        os._exit(status)


def wait(pid: int) -> int:
    """Exit status of a process (negative: the signal that killed it)."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_when(pid: int, is_time: Callable[[], bool]) -> bool:
    """SIGKILL the process as soon as ``is_time``; False when it ended by itself before."""
    while not is_time():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if os.waitstatus_to_exitcode(status) != 0:
                raise SystemExit(f"the run failed with status {os.waitstatus_to_exitcode(status)}; see its .out file")
            return False
        time.sleep(POLL_SECONDS)
    os.kill(pid, signal.SIGKILL)
    wait(pid)
    return True


def num_starts(run_dir: Path) -> int:
    try:
        return len(json.loads((run_dir / "versions.json").read_text())["starts"])
    except (OSError, ValueError):
        return 0


def moment(rng: random.Random, run_dir: Path, span: float) -> tuple[str, Callable[[], bool]]:
    """When to kill: at a random time within ``span`` seconds after training began, or in a checkpoint's writing."""
    starts = num_starts(run_dir)
    folder = run_dir / "checkpoints"
    delay, began = rng.uniform(0, span), []

    def in_training() -> bool:
        if not began and num_starts(run_dir) > starts:
            began.append(time.monotonic())
        return bool(began) and time.monotonic() - began[0] >= delay

    def in_checkpoint() -> bool:
        return num_starts(run_dir) > starts and any(folder.glob(".writing-*"))

    return ("checkpoint", in_checkpoint) if rng.random() < 0.25 else ("training", in_training)


def figures(path: Path) -> list[dict[str, Any]]:
    """Lines of a JSONL file without what depends on the clock."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith("_seconds") and "per_second" not in k} for line in lines]


def training_seconds(run_dir: Path) -> float:
    """From the first step to the end of a finished run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return sum(line.get("step_seconds", 0.0) + line.get("eval_seconds", 0.0) for line in lines)


def differences(a: Path, b: Path) -> list[str]:
    """What differs between two finished runs."""
    found = [name for name in FIGURES if figures(a / name) != figures(b / name)]
    last = max(p.name for p in (a / "checkpoints").glob("step-*"))
    folders = [run / "checkpoints" / last for run in (a, b)]
    for path in (path for pattern in TENSORS for path in folders[0].glob(pattern)):
        if path.read_bytes() != (folders[1] / path.name).read_bytes():
            found.append(f"{last}/{path.name}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--config", help="YAML file of the run (default: a small run of the shipped policy)")
    parser.add_argument("--seed", type=int, default=0, help="fixes the moments as far as a clock can")
    parser.add_argument("--keep", metavar="DIR", help="work here and leave the run directories")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()

    preload()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        result = run(args, Path(args.keep or temporary))
    print(json.dumps({"bench": "kill_test", **result, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if result["differences"] else 0


def preload() -> None:
    """Import before forking what a run imports in time, so that children start at once."""
    import transformers.models.llama.configuration_llama  # by AutoTokenizer

    import sagc_fast.controller._jit
    import sagc_fast.train.trainer  # noqa: F401

    assert transformers.AutoTokenizer


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    config = Path(args.config) if args.config else folder / "kill_test.yaml"
    if not args.config:
        config.write_text(json.dumps(DEFAULT))  # JSON is YAML
    if wait(start(config, folder / "reference", args.overrides)) != 0:
        raise SystemExit(f"the uninterrupted run failed; see {folder / 'reference.out'}")
    span = training_seconds(folder / "reference")
    rng = random.Random(args.seed)
    kills = {"training": 0, "checkpoint": 0}
    num_runs, found = 0, []
    while sum(kills.values()) < args.kills:
        run_dir = folder / f"killed-{num_runs}"
        num_runs += 1
        is_killed, num_before = True, sum(kills.values())
        while is_killed and sum(kills.values()) < min(args.kills, num_before + KILLS_PER_RUN):
            kind, is_time = moment(rng, run_dir, span)
            is_killed = kill_when(start(config, run_dir, args.overrides), is_time)
            kills[kind] += is_killed
        if is_killed and wait(start(config, run_dir, args.overrides)) != 0:
            raise SystemExit(f"the resumed run failed; see {run_dir}.out")
        found += [f"{run_dir.name}: {name}" for name in differences(folder / "reference", run_dir)]
        print(f"{sum(kills.values())} kills, {num_runs} runs compared, {len(found)} differences", file=sys.stderr)
    total = sum(kills.values())
    return {"kills": total, "kills_in_checkpoint": kills["checkpoint"], "runs": num_runs, "differences": found}


if __name__ == "__main__":
    sys.exit(main())
