"""The addition task with SAGC and with fixed G=16 from the same weights, prompts and noise: seconds and accuracy.

Both runs warm up first with two steps of their own; the order of the two is G=16, SAGC.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

from gpu.device import DEVICE, REHEARSAL
from gpu.report import out_folder, part, row
from sagc_fast import TrainConfig
from sagc_fast.train.trainer import Trainer

STEPS, PROMPTS = (2, 3) if REHEARSAL else (30, 16)
CONTROLLERS = {
    "fixed G=16": {"kind": "fixed", "group_size": 4 if REHEARSAL else 16},
    "SAGC": {"kind": "sagc", "candidates": [2, 4] if REHEARSAL else [4, 8, 16], "delta": 0.4},
}


def train(name: str, controller: dict[str, Any], steps: int, folder: Path) -> list[dict[str, Any]]:
    """The step records of a run."""
    shutil.rmtree(folder, ignore_errors=True)
    task = {"name": "addition", **({"max_new_tokens": 8} if REHEARSAL else {})}
    config = TrainConfig.from_dict(
        {
            "model": {"path": "addition", "device": DEVICE.type},
            "task": task,
            "rollout": {"prompts_per_step": PROMPTS, "kv_budget_gb": 0.25},
            "controller": controller,
            "algo": {"name": "grpo"},
            "optimizer": {"learning_rate": 4e-4, "warmup_steps": 5},
            "evaluation": {"every": 0, "num_problems": 8 if REHEARSAL else 128},
            "checkpoint": {"every": 0, "keep_best": False},
            "metrics": {"display": "plain"},
            "steps": steps,
            "threads": 1,
            "run_dir": str(folder),
        },
        where="gpu_check",
    )
    Trainer(config, stream=io.StringIO()).fit()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    with part() as outcome:
        seconds = {}
        for name, controller in CONTROLLERS.items():
            with outcome.section(name):
                folder = out_folder() / "runs" / name.replace(" ", "_")
                if not REHEARSAL:
                    train(name, controller, 2, folder)
                records = train(name, controller, STEPS, folder)
                steps = [r for r in records if r["event"] == "step"]
                accuracy = [r["accuracy"] for r in records if "accuracy" in r]
                seconds[name] = sum(r["step_seconds"] for r in steps)
                sizes = sum(r["group_size"] for r in steps) / len(steps)
                row(
                    f"{STEPS} steps of addition, {name}", seconds[name], "s",
                    beside=f"mean G {sizes:.1f}, accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}",
                )  # fmt: skip
        if len(seconds) == 2:
            row("wall-clock of G=16 over SAGC", seconds["fixed G=16"] / seconds["SAGC"], "x")


if __name__ == "__main__":
    main()
