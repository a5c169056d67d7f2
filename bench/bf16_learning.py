"""Do bf16 parameters with fp32 masters learn as fp32 does? The addition task, the same steps and seeds in both dtypes.

    python bench/bf16_learning.py --out runs/bf16_learning

Fixed group size, so that no controller's decision hides a difference. The curves cannot be equal bit for bit: bf16
samples other tokens. What is compared is the reward, mean over seeds, in tenths of the run, beside its spread over the
seeds, and held-out accuracy at the end. Runs that are there are not repeated. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sagc_fast import TrainConfig, Trainer

CONFIG = Path(__file__).parents[1] / "configs/addition.yaml"
DTYPES = ("fp32", "bf16")
NUM_BINS = 10


def run(folder: Path, dtype: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """The run's metrics; trained first when they are not there or too short."""
    metrics = folder / f"{dtype}-seed{seed}" / "metrics.jsonl"
    if not metrics.exists() or len(_steps(_read(metrics))) < steps:
        overrides = [
            f"model.dtype={dtype}", f"seed={seed}", f"steps={steps}", f"run_dir={metrics.parent}",
            "controller.kind=fixed", "controller.group_size=8", "metrics.display=off", "metrics.tensorboard=false",
        ]  # fmt: skip
        Trainer(TrainConfig.from_yaml(CONFIG, overrides=overrides)).fit()
    return _read(metrics)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in records if r["event"] == "step"]


def binned_rewards(records: list[dict[str, Any]]) -> list[float]:
    """Mean reward in each tenth of the run."""
    rewards = [r["reward_mean"] for r in _steps(records)]
    edges = [len(rewards) * i // NUM_BINS for i in range(NUM_BINS + 1)]
    return [fmean(rewards[a:b]) for a, b in pairwise(edges)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bf16_learning"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    curves: dict[str, list[list[float]]] = {dtype: [] for dtype in DTYPES}
    accuracy: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for seed in range(options.seeds):
        for dtype in DTYPES:
            records = run(options.out, dtype, seed, options.steps)
            curves[dtype].append(binned_rewards(records))
            accuracy[dtype].append([r["accuracy"] for r in records if r["event"] == "eval"][-1])
            print(f"seed {seed} {dtype}: " + " ".join(f"{x:.3f}" for x in curves[dtype][-1]), flush=True)
    width = options.steps // NUM_BINS
    print(f"\nmean reward over {options.seeds} seeds (standard deviation over seeds)")
    print(f"{'steps':<10}" + "".join(f"{dtype:>16}" for dtype in DTYPES))
    for i in range(NUM_BINS):
        cells = [[curve[i] for curve in curves[dtype]] for dtype in DTYPES]
        label = f"{i * width + 1}-{(i + 1) * width}"
        print(f"{label:<10}" + "".join(f"{fmean(c):>9.3f} ({stdev(c):.3f})" for c in cells))
    print(f"{'held out':<10}" + "".join(f"{fmean(accuracy[d]):>9.3f} ({stdev(accuracy[d]):.3f})" for d in DTYPES))
    print(json.dumps({"bench": "bf16_learning", "steps": options.steps, "rewards": curves, "held_out": accuracy}))


if __name__ == "__main__":
    main()
