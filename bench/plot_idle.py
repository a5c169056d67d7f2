"""Draws where a rollout waits: one bar per completion, and in grey the rows that are done while the longest still runs.

    python bench/plot_idle.py runs/demo/fixed-16 runs/demo/sagc --step 30 --out docs/img/idle.png

Reads ``timeline.jsonl`` of each run (the recorded rollout nearest to ``--step``). Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#1b6ca8", "#e07b00")
"""Of even and odd groups: neighbours differ, and the two differ for every kind of colour vision."""
IDLE = "#dcdcdc"


def rollout(run: Path, step: int) -> dict[str, Any]:
    """The recorded rollout whose optimizer step is nearest to ``step``."""
    path = run / "timeline.jsonl"
    if not path.exists():
        raise SystemExit(f"{path} does not exist; give a run directory that `sagc-fast train` wrote.")
    return min(map(json.loads, path.read_text(encoding="utf-8").splitlines()), key=lambda r: abs(r["step"] - step))


def draw(axes: Any, record: dict[str, Any], title: str, num_steps: int) -> None:
    """Bars of one rollout on an axis of ``num_steps`` decoding steps."""
    rows = sorted(record["rows"], key=lambda row: (row["group"], -row["last_step"]))
    end = max(row["last_step"] for row in rows) + 1
    for y, row in enumerate(rows):
        length = row["last_step"] + 1 - row["first_step"]
        axes.barh(y, end, height=1.0, color=IDLE, linewidth=0)
        axes.barh(y, length, left=row["first_step"], height=1.0, color=COLOURS[row["group"] % 2], linewidth=0)
    idle = 1 - sum(row["last_step"] + 1 - row["first_step"] for row in rows) / (len(rows) * end)
    axes.set(xlim=(0, num_steps), ylim=(len(rows), 0), xlabel="decoding step", yticks=[])
    axes.set_title(
        f"{title}: {len(rows)} completions, {end} steps, {idle:.0%} idle in lock-step", fontsize=10, loc="left"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, one panel each")
    parser.add_argument("--step", type=int, default=1, help="optimizer step (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("idle.png"))
    args = parser.parse_args()
    records = [rollout(run, args.step) for run in args.runs]
    num_steps = max(row["last_step"] + 1 for record in records for row in record["rows"])
    figure, panels = plt.subplots(1, len(records), figsize=(6.5 * len(records), 4.2), squeeze=False)
    for axes, run, record in zip(panels[0], args.runs, records, strict=True):
        draw(axes, record, run.name, num_steps)
        axes.set_ylabel("completions, group by group")
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)
    print(args.out)


if __name__ == "__main__":
    main()
