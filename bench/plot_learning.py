"""Draw the learning curve of one run: reward of every step, held-out accuracy, group size.

python bench/plot_learning.py docs/runs/smollm2_chain_sum docs/img/smollm2_chain_sum.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

REWARD, HELDOUT, SIZE = "#9db8d9", "#1f4e8c", "#b5542b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run directory (metrics.jsonl is read)")
    parser.add_argument("out", type=Path, help="picture to write, .png or .svg")
    args = parser.parse_args()
    records = [json.loads(line) for line in (args.run / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["event"] == "step"]
    evals = [r for r in records if r["event"] == "eval"]

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7.2, 4.2), sharex=True, height_ratios=(3, 1), constrained_layout=True
    )
    top.plot([r["step"] for r in steps], [r["outcome_mean"] for r in steps], color=REWARD, label="sampled in training")
    top.errorbar(
        [r["step"] for r in evals],
        [r["accuracy"] for r in evals],
        yerr=[r["accuracy_stderr"] for r in evals],
        color=HELDOUT,
        marker="o",
        capsize=3,
        label=f"held out, n={evals[0]['num_problems']} (bars: standard error)",
    )
    top.set_ylabel("share correct")
    top.set_ylim(0, 1)
    top.legend(loc="lower right", frameon=False)
    bottom.step([r["step"] for r in steps], [r["group_size"] for r in steps], where="mid", color=SIZE)
    bottom.set_ylabel("G")
    bottom.set_yscale("log", base=2)
    bottom.set_yticks(
        sorted({r["group_size"] for r in steps}), [str(g) for g in sorted({r["group_size"] for r in steps})]
    )
    bottom.set_xlabel("optimizer step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
