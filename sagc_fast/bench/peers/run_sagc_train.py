"""This package's trainer for a few optimizer steps, from the same weights in every run."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

from peer_worker import Run, serve


def load(settings: dict[str, Any]) -> Run:
    import torch

    from sagc_fast import TrainConfig, Trainer

    torch.set_num_threads(settings["threads"])

    def run(request: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="sagc-bench-") as folder:
            config = TrainConfig.from_dict(
                {
                    "model": {"path": settings["model"]},
                    "task": {"name": "addition"},
                    "rollout": {
                        "prompts_per_step": settings["num_prompts"],
                        "max_new_tokens": settings["max_new_tokens"],
                        "kv_budget_gb": 0.25,
                    },
                    "controller": {"kind": "fixed", "group_size": settings["group_size"]},
                    "algo": {"name": "grpo"},
                    "optimizer": {"learning_rate": settings["learning_rate"]},
                    "evaluation": {"every": 0},
                    "checkpoint": {"every": 0, "keep_best": False},
                    "metrics": {"tensorboard": False},
                    "steps": request["steps"],
                    "threads": settings["threads"],
                    "run_dir": str(Path(folder) / "run"),
                },
                where="bench train",
            )
            Trainer(config, stream=io.StringIO()).fit()
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        steps = [record for record in map(json.loads, lines) if record["event"] == "step"]
        return {
            "output_tokens": sum(step["num_output_tokens"] for step in steps),
            "seconds": {name: sum(step[f"{name}_seconds"] for step in steps) for name in ("rollout", "update")},
        }

    return run


if __name__ == "__main__":
    serve(load, ("sagc_fast", "torch"))
