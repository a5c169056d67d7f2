"""The learning study of docs/learning.md: three tasks, GRPO and DAPO, fixed G and SAGC, three seeds; runs and figures.

    python bench/learning_study.py                    # run what is missing, then draw the figures and write the table
    python bench/learning_study.py --share 0/2 & python bench/learning_study.py --share 1/2
    python bench/learning_study.py --draw-only

A run whose figures stand in the CSV files under docs/runs/learning is not run again, so the study can be stopped at any
time and goes on where it was. Runs use one thread and one process, after one another; seconds are CPU seconds of the
training process, because the wall clock of a busy machine measures its neighbours. Nothing is left out: every run of
the grid is in the table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import studies
from studies import ROOT, WINDOW

DATA, IMAGES, DOCUMENT = ROOT / "docs/runs/learning", ROOT / "docs/img", ROOT / "docs/learning.md"
TASKS = ("addition", "chain_sum", "spell_backward")
ALGORITHMS = ("grpo", "dapo")
CONTROLLERS = ("G4", "G8", "G16", "sagc")
SEEDS = (0, 1, 2)
COLOURS = dict(zip(CONTROLLERS, ("#9ab8d6", "#4a82b8", "#1b3f66", "#c2571a"), strict=True))
LABELS = {"G4": "G = 4", "G8": "G = 8", "G16": "G = 16", "sagc": "SAGC"}
STEP_FIELDS = ("group_size", "reward_mean", "straggler_rate", "length_mean", "num_groups_kept", "num_groups_sampled")
TABLE_MARKS = ("<!-- table of all runs: written by bench/learning_study.py -->", "<!-- end of table -->")


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    task: str
    algorithm: str
    controller: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.algorithm}-{self.controller}-{self.seed}"

    @property
    def key(self) -> dict[str, Any]:
        return {"algorithm": self.algorithm, "controller": self.controller, "seed": self.seed}

    def overrides(self, work: Path) -> list[str]:
        fixed = self.controller != "sagc"
        size = [f"controller.group_size={self.controller[1:]}"] if fixed else []
        kind = f"controller.kind={'fixed' if fixed else 'sagc'}"
        names = [f"algo.name={self.algorithm}", kind, *size, f"seed={self.seed}", f"run_dir={work / self.name}"]
        return names if self.task == "addition" else [*names, f"model.path={work / 'policies' / self.task}"]


def cells() -> list[Cell]:
    """Every run, one seed of everything before the next seed."""
    return [Cell(t, a, c, s) for s in SEEDS for t in TASKS for a in ALGORITHMS for c in CONTROLLERS]


# ---- running ---------------------------------------------------------------------------------------------------------


def run_missing(work: Path, share: int, num_shares: int) -> None:
    import torch

    from sagc_fast import TrainConfig

    torch.set_num_threads(1)
    missing = [cell for cell in cells()[share::num_shares] if not is_done(cell)]
    for number, cell in enumerate(missing, 1):
        config = ROOT / f"configs/learning/{cell.task}.yaml"
        make_start(cell.task, config, work)
        began = time.process_time()
        records = studies.train(TrainConfig.from_yaml(config, overrides=cell.overrides(work)))
        steps, evaluations = studies.split_records(records, STEP_FIELDS)
        studies.append(DATA / f"{cell.task}_heldout.csv", cell.key, evaluations)
        studies.append(DATA / f"{cell.task}.csv", cell.key, steps)  # last: this file says that the run is done
        print(f"{number}/{len(missing)} {cell.name}: {time.process_time() - began:.0f} CPU s", flush=True)


def is_done(cell: Cell) -> bool:
    return any(True for _ in studies.rows_of(DATA / f"{cell.task}.csv", cell.key))


def make_start(task: str, config: Path, work: Path) -> None:
    """The starting policy of a reasoning-gym task, made once."""
    from learning_policies import RECIPES, make_policy

    from sagc_fast import TrainConfig

    folder = work / "policies" / task
    if task not in RECIPES or (folder / "tokenizer_config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    loss = make_policy(RECIPES[task], TrainConfig.from_yaml(config).task, folder)
    print(f"policy for {task}: {loss:.3f} nats per token", flush=True)


# ---- drawing ---------------------------------------------------------------------------------------------------------


def columns(cell: Cell) -> studies.Run:
    return studies.columns(DATA / f"{cell.task}.csv", cell.key)


def accuracies(cell: Cell) -> list[float]:
    """Held-out, in order of the steps."""
    return [float(r["accuracy"]) for r in studies.rows_of(DATA / f"{cell.task}_heldout.csv", cell.key)]


def complete_seeds() -> list[int]:
    """Seeds with every run there: cells are compared over the same seeds alone."""
    return [seed for seed in SEEDS if all(is_done(cell) for cell in cells() if cell.seed == seed)]


def draw(task: str, seeds: Sequence[int]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    axes_names = {"step": "optimizer steps", "tokens": "sampled tokens (thousands)", "cpu_seconds": "CPU seconds"}
    figure, grid = plt.subplots(2, 3, figsize=(10, 5.4), sharey=True, constrained_layout=True)
    for row, algorithm in zip(grid, ALGORITHMS, strict=True):
        for axes, (axis, label) in zip(row, axes_names.items(), strict=True):
            for controller in CONTROLLERS:
                runs = [columns(Cell(task, algorithm, controller, seed)) for seed in seeds]
                x, mean, low, high = studies.band(runs, axis)
                x = x / 1000 if axis == "tokens" else x
                axes.fill_between(x, low, high, color=COLOURS[controller], alpha=0.18, linewidth=0)
                axes.plot(x, mean, color=COLOURS[controller], label=LABELS[controller])
            axes.set_xlabel(label)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        row[0].set_ylabel(f"{algorithm.upper()}: reward")
    grid[0, 0].legend(frameon=False, loc="lower right")
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / f"learning_{task}.png", dpi=110)
    plt.close(figure)


def table() -> Iterator[str]:
    """A line for every run that there is."""
    yield "| task | algorithm | G | seed | before | after | reward, last 5 | mean G | stragglers | tokens | CPU s |"
    yield "|" + "---|" * 11
    for cell in sorted(filter(is_done, cells()), key=lambda c: (TASKS.index(c.task), ALGORITHMS.index(c.algorithm))):
        run = columns(cell)
        accuracy = accuracies(cell)
        cells_of_row = (
            cell.task, cell.algorithm, LABELS[cell.controller].removeprefix("G = "), cell.seed,
            f"{accuracy[0]:.3f}", f"{accuracy[-1]:.3f}", f"{run['reward_mean'][-WINDOW:].mean():.3f}",
            f"{run['group_size'].mean():.1f}", f"{run['straggler_rate'].mean():.2f}",
            f"{run['tokens'][-1]:,.0f}", f"{run['cpu_seconds'][-1]:.1f}",
        )  # fmt: skip
        yield "| " + " | ".join(map(str, cells_of_row)) + " |"


def summary(seeds: Sequence[int]) -> Iterator[str]:
    """Means over the complete seeds, with the lowest and highest accuracy."""
    yield "| task | algorithm | G | held-out after (lowest, highest) | reward, last 5 steps | mean G | tokens | CPU s |"
    yield "|" + "---|" * 8
    for task in TASKS:
        for algorithm in ALGORITHMS:
            for controller in CONTROLLERS:
                group = [Cell(task, algorithm, controller, seed) for seed in seeds]
                runs = [columns(cell) for cell in group]
                after = [accuracies(cell)[-1] for cell in group]

                def mean(values: Iterable[float]) -> float:
                    return statistics.fmean(values)

                yield (
                    f"| {task} | {algorithm} | {LABELS[controller].removeprefix('G = ')} "
                    f"| {mean(after):.3f} ({min(after):.3f}, {max(after):.3f}) "
                    f"| {mean(r['reward_mean'][-WINDOW:].mean() for r in runs):.3f} "
                    f"| {mean(r['group_size'].mean() for r in runs):.1f} "
                    f"| {mean(r['tokens'][-1] for r in runs):,.0f} | {mean(r['cpu_seconds'][-1] for r in runs):.1f} |"
                )


def with_tables(page: str, seeds: Sequence[int]) -> str:
    """The page with both tables written anew."""
    of_seeds = f"Means over {len(seeds)} seeds ({', '.join(map(str, seeds))}):"
    body = "\n".join(["", of_seeds, "", *summary(seeds), "", "Every run:", "", *table(), ""])
    return studies.with_body(page, TABLE_MARKS, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/learning"), help="where runs and policies are kept")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="run every N-th missing run from the I-th on")
    parser.add_argument("--draw-only", action="store_true", help="figures and table from the stored CSV files")
    args = parser.parse_args()
    if not args.draw_only:
        run_missing(args.work, *map(int, args.share.split("/")))
    if missing := [cell.name for cell in cells() if not is_done(cell)]:
        print(f"{len(missing)} of {len(cells())} runs are missing, the next {missing[0]}", flush=True)
    seeds = complete_seeds()
    if not seeds:
        raise SystemExit("no seed has all its runs yet; figures are drawn from seeds that are complete")
    for task in TASKS:
        draw(task, seeds)
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), seeds))


if __name__ == "__main__":
    main()
