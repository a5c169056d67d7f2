"""``sagc-fast demo``: one small policy, three ways to size its groups, and what each costs and gains."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagc_fast.errors import CheckpointError

if TYPE_CHECKING:
    from rich.table import Table

    from sagc_fast.config import TrainConfig

HELP = "train the small addition policy with fixed and with straggler-aware group sizes, and compare"
EPILOG = """examples:
  sagc-fast demo                            a few minutes on two cores; writes runs/demo and its report.html
  sagc-fast demo --seed 3 --steps 120       other problems and noise, longer
  sagc-fast demo --quick                    seconds: does everything run here?
  sagc-fast demo --json                     the table's figures as one JSON line at the end

The runs start from the same weights and see the same problems. Fixed G=16 is what SAGC is to beat in time. Fixed G=4 is
the honest baseline: at equal prompts, most of the saving is fewer completions. Ctrl-C removes what is unfinished."""

MARKER = "demo.json"
"""In every folder that this command made, and may therefore replace; holds the figures once they are there."""
STEPS, PROMPTS, EVALUATED = 60, 16, 256
QUICK_STEPS, QUICK_PROMPTS, QUICK_EVALUATED = 2, 3, 16


@dataclass(frozen=True)
class DemoRun:
    """One of the runs that are compared."""

    folder: str
    title: str
    controller: dict[str, Any]


RUNS = (
    DemoRun("fixed-16", "fixed G=16", {"kind": "fixed", "group_size": 16}),
    DemoRun("sagc", "SAGC", {"kind": "sagc", "candidates": [4, 8, 16], "delta": 0.4}),
    DemoRun("fixed-4", "fixed G=4", {"kind": "fixed", "group_size": 4}),
)
"""``delta``: G=4 straggles in six of ten groups at first, in a third once guessing is unlearnt, so .4 is met later."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder of the runs (default: runs/demo)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help=f"optimizer steps of each run (default: {STEPS})")
    parser.add_argument("--seed", type=int, default=0, help="of problems, noise and controller (default: 0)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} small steps each: a check, not a result")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line at the end")


def run(args: argparse.Namespace) -> int:
    configs = [demo_config(demo, args.out, args.steps, args.seed, args.quick) for demo in RUNS]
    prepare(args.out)
    try:
        figures = train_all(configs, args.out)
    except BaseException:  # Ctrl-C above all: nothing half-made may pass for a result
        shutil.rmtree(args.out, ignore_errors=True)
        raise
    if args.json:
        print(json.dumps(figures))
    return 0


def demo_config(demo: DemoRun, out: Path, steps: int | None, seed: int, is_quick: bool) -> TrainConfig:
    """The whole configuration of one run; only ``controller`` and ``run_dir`` differ between the runs of a demo."""
    from sagc_fast.config import TrainConfig

    return TrainConfig.from_dict(
        {
            "model": {"path": "addition"},
            "task": {"name": "addition"},
            "rollout": {"prompts_per_step": QUICK_PROMPTS if is_quick else PROMPTS, "kv_budget_gb": 0.25},
            "controller": demo.controller,
            "algo": {"name": "grpo"},
            "optimizer": {"learning_rate": 4e-4, "warmup_steps": 5},
            "evaluation": {"every": 0 if is_quick else 20, "num_problems": QUICK_EVALUATED if is_quick else EVALUATED},
            "checkpoint": {"every": 0, "keep_best": False},
            "steps": steps if steps is not None else QUICK_STEPS if is_quick else STEPS,
            "seed": seed,
            "threads": 1,  # a model this small gains nothing from more, and loses much beside a busy neighbour
            "run_dir": str(out / demo.folder),
        },
        where="the demo",
    )


def prepare(out: Path) -> None:
    """Make ``out`` an empty folder with the marker; an earlier demo in it is removed.

    Raises CheckpointError when something else is there or the folder cannot be made.
    """
    is_empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not is_empty and not (out / MARKER).is_file():
        raise CheckpointError(
            f"{out} holds something else than an earlier demo, so it is left alone; give another folder with --out."
        )
    try:
        if out.exists():
            shutil.rmtree(out)
        out.mkdir(parents=True)
        (out / MARKER).write_text("{}\n")
    except OSError as error:
        raise CheckpointError(f"{out} cannot be made anew ({error}); give another folder with --out.") from None


def train_all(configs: Sequence[TrainConfig], out: Path) -> dict[str, Any]:
    """Train every run, print the table, write the report; returns the figures.

    Raises KeyboardInterrupt when a run was asked to stop.
    """
    from rich.console import Console

    from sagc_fast.report import write_report
    from sagc_fast.train.trainer import Trainer

    console, started = Console(), time.monotonic()
    console.print(
        f"{len(RUNS)} runs of {configs[0].steps} steps: the same weights, problems and noise, other group sizes."
    )
    for number, (demo, config) in enumerate(zip(RUNS, configs, strict=True), start=1):
        console.rule(f"run {number} of {len(RUNS)}: {demo.title}", align="left")
        if Trainer(config).fit()["is_interrupted"]:
            raise KeyboardInterrupt
    figures = read_figures(out)
    figures["wall_seconds"] = time.monotonic() - started
    (out / MARKER).write_text(json.dumps(figures, indent=2) + "\n")
    write_report([out / demo.folder for demo in RUNS], out / "report.html")
    console.print(make_table(figures))
    console.print(f"{figures['wall_seconds']:.0f} s in all; curves and timelines: {out / 'report.html'}")
    return figures


def read_figures(out: Path) -> dict[str, Any]:
    """Totals and means of every run, from its metrics.jsonl alone."""
    from sagc_fast.report.data import load_runs
    from sagc_fast.report.summary import summarize

    runs = {}
    for demo, data in zip(RUNS, load_runs([out / demo.folder for demo in RUNS]), strict=True):
        whole = summarize(data)
        first, last = whole.accuracy_first, whole.accuracy_last
        lengths = data.evals.get("length_mean", [])
        runs[demo.folder] = {
            "title": demo.title,
            "steps": whole.num_steps,
            "group_size_mean": whole.group_size,
            "straggler_rate": whole.straggler_rate,
            "idle_fraction": whole.idle_fraction,
            "length_mean": whole.length,
            "output_tokens": whole.output_tokens,
            "rollout_seconds": whole.phase_seconds["rollout"],
            "reward_seconds": whole.phase_seconds["reward"],
            "update_seconds": whole.phase_seconds["update"],
            "train_seconds": whole.seconds,
            "train_cpu_seconds": whole.cpu_seconds,
            "accuracy_before": first.value if first else None,
            "accuracy_after": last.value if last else None,
            "accuracy_stderr": last.stderr if last else None,
            "heldout_length_before": lengths[0] if lengths else None,
            "heldout_length_after": lengths[-1] if len(lengths) > 1 else None,
        }
    return {"runs": runs}


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure of every run and, where it means something, fixed G=16 over SAGC."""

    label: str
    key: str
    form: str
    has_ratio: bool = False


ROWS = (
    Row("group size, mean", "group_size_mean", "{:.1f}"),
    Row("straggling groups", "straggler_rate", "{:.0%}", has_ratio=True),
    Row("idle in lock-step", "idle_fraction", "{:.0%}", has_ratio=True),
    Row("length, mean tokens", "length_mean", "{:.1f}", has_ratio=True),
    Row("tokens sampled", "output_tokens", "{:,.0f}", has_ratio=True),
    Row("seconds: rollout", "rollout_seconds", "{:.1f}", has_ratio=True),
    Row("seconds: reward wait", "reward_seconds", "{:.1f}"),
    Row("seconds: update", "update_seconds", "{:.1f}", has_ratio=True),
    Row("seconds: training", "train_seconds", "{:.1f}", has_ratio=True),
    Row("  CPU seconds of it", "train_cpu_seconds", "{:.1f}", has_ratio=True),
    Row("held-out accuracy before", "accuracy_before", "{:.3f}"),
    Row("held-out accuracy after", "accuracy_after", "{:.3f}"),
    Row("  standard error", "accuracy_stderr", "{:.3f}"),
    Row("held-out length before", "heldout_length_before", "{:.1f}"),
    Row("held-out length after", "heldout_length_after", "{:.1f}"),
)


def make_table(figures: dict[str, Any]) -> Table:
    """The figures side by side: a column per run and the ratio of the first run to SAGC."""
    from rich.table import Table

    runs = figures["runs"]
    table = Table(
        title=f"Addition, {runs[RUNS[0].folder]['steps']} steps, the same prompts for every run",
        caption="Smaller groups sample fewer completions: weigh SAGC against both fixed sizes. On a machine with other"
        " work compare CPU seconds.",
        caption_justify="left",
    )
    table.add_column("")
    for demo in RUNS:
        table.add_column(demo.title, justify="right")
    table.add_column("G=16 / SAGC", justify="right")
    for row in ROWS:
        values = [runs[demo.folder][row.key] for demo in RUNS]
        cells = ["-" if value is None else row.form.format(value) for value in values]
        table.add_row(row.label, *cells, _ratio(*values[:2]) if row.has_ratio else "")
    return table


def _ratio(theirs: float | None, ours: float | None) -> str:
    return f"{theirs / ours:.2f}" if theirs and ours else "-"
