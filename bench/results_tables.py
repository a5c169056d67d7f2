"""The tables of docs/results.md from the stored runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import numpy as np
import studies
from results_grid import ALGORITHMS, CONTROLLERS, EQUAL_STEPS, FIXED, MODELS, OURS, SEEDS, TRL, Cell, cells
from studies import WINDOW, Run

LABELS = {"G4": "4", "G8": "8", "G16": "16", "sagc": "SAGC", "prompt_aware": "SAGC, prompt-aware"}
TITLES = {"smollm2": "SmolLM2-135M", "addition": "addition, 94k", "addition_large": "addition, 741k"}


@cache
def run_of(cell: Cell) -> Run:
    """The run's numbers by step, as far as it went."""
    return studies.columns(cell.file, cell.key)


@cache
def heldout_of(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """(steps, accuracies) of the run's evaluations."""
    rows = list(studies.rows_of(cell.heldout_file, cell.key))
    return np.array([float(r["step"]) for r in rows]), np.array([float(r["accuracy"]) for r in rows])


@cache
def seeds_of(model: str, algorithm: str) -> tuple[int, ...]:
    """Seeds with every run of this package there: only these are averaged, so that cells compare."""
    return tuple(s for s in SEEDS[model] if all(Cell(model, algorithm, c, s).is_done for c in CONTROLLERS))


def at_equal_steps(cell: Cell) -> dict[str, float]:
    """The figures of a run after the steps at which all are compared (TRL's short runs: after theirs)."""
    run, num_steps = run_of(cell), EQUAL_STEPS[cell.model]
    steps, accuracies = heldout_of(cell)
    part = {name: values[:num_steps] for name, values in run.items()}
    return {
        "straggler_rate": part["straggler_rate"].mean(),
        "cpu_seconds": part["cpu_seconds"][-1],
        "wall_seconds": part["wall_seconds"][-1],
        "tokens": part["tokens"][-1],
        "idle_fraction": part["idle_fraction"].mean(),
        "reward": part["reward_mean"][-WINDOW:].mean(),
        "length": part["length_mean"].mean(),
        "group_size": part["group_size"].mean(),
        "seconds_per_step": part["cpu_seconds"][-1] / len(part["step"]),
        "num_steps": len(part["step"]),
        "heldout": float(accuracies[steps == num_steps][0]) if num_steps in steps else np.nan,
    }


def at_budget(cell: Cell, axis: str, budget: float) -> tuple[float, float, float]:
    """(steps, reward, held-out accuracy) when a run has spent ``budget`` of ``axis``, ``tokens`` or ``cpu_seconds``:
    the mean reward of the last steps that fit, and the accuracy between the two evaluations around that point, by a
    straight line. The run must reach the budget."""
    run = run_of(cell)
    num_steps = int(np.searchsorted(run[axis], budget, side="right"))
    steps, accuracies = heldout_of(cell)
    spent = np.concatenate([[0.0], run[axis]])[steps.astype(int)]
    reward = float(run["smooth"][max(num_steps - 1, 0)])
    return num_steps, reward, float(np.interp(budget, spent, accuracies))


def smallest_total(model: str, algorithm: str, seed: int, axis: str) -> float:
    """What the run that spends least has spent in all: the budget at which the runs of a seed are compared."""
    return min(float(run_of(Cell(model, algorithm, c, seed))[axis][-1]) for c in CONTROLLERS)


# ---- tables ----------------------------------------------------------------------------------------------------------


def equal_steps() -> Iterator[str]:
    """A table for every model and algorithm, as the paper's."""
    for model, algorithm in _pairs():
        seeds = seeds_of(model, algorithm)
        yield f"*{TITLES[model]}, {algorithm.upper()}: {EQUAL_STEPS[model]} steps, seeds {_names(seeds)}*"
        yield ""
        yield (
            "| trainer | G | mean G | straggler rate | CPU s | wall s | tokens | idle | reward "
            "| held-out (lowest, highest) | mean length |"
        )
        yield "|" + "---|" * 11
        for group in _groups(model, algorithm, seeds):
            figures = [at_equal_steps(cell) for cell in group]
            yield _row(_trainer(group, figures), LABELS[group[0].controller], *_cells_of(figures))
        yield ""


def gain() -> Iterator[str]:
    """CPU seconds of a step, from TRL's largest group to SAGC in this package. The engine's ratio is over the steps and
    seeds that TRL has run: the first steps of SmolLM2 are its dearest."""
    yield (
        "| | TRL, G=16 | here, G=16, same steps | engine: TRL / here | here, G=16 | SAGC | G=4 "
        "| controller: G=16 / SAGC |"
    )
    yield "|" + "---|" * 8
    for model, algorithm in _pairs():
        seeds = seeds_of(model, algorithm)
        theirs = [cell for s in seeds if (cell := Cell(model, algorithm, "G16", s, TRL)).is_done]
        peer = same = ratio = "-"
        if theirs:
            num_steps = [len(run_of(cell)["step"]) for cell in theirs]
            ours = [Cell(model, algorithm, "G16", cell.seed) for cell in theirs]
            their_seconds = _mean(map(_seconds_per_step, theirs, num_steps))
            our_seconds = _mean(map(_seconds_per_step, ours, num_steps))
            peer, same = _significant(their_seconds), _significant(our_seconds)
            ratio = f"{their_seconds / our_seconds:.1f}"
        large, sagc, small = (
            _mean(_seconds_per_step(Cell(model, algorithm, c, s), EQUAL_STEPS[model]) for s in seeds)
            for c in ("G16", "sagc", "G4")
        )
        own = (_significant(seconds) for seconds in (large, sagc, small))
        yield _row(f"{TITLES[model]}, {algorithm.upper()}", peer, same, ratio, *own, f"{large / sagc:.1f}")


def _seconds_per_step(cell: Cell, num_steps: int) -> float:
    return float(run_of(cell)["cpu_seconds"][num_steps - 1]) / num_steps


def fair() -> Iterator[str]:
    """Equal tokens and equal seconds, in this package."""
    yield "| | G | steps | reward | held-out (lowest, highest) | steps | reward | held-out (lowest, highest) |"
    yield "|" + "---|" * 8
    for model, algorithm in _pairs():
        seeds = seeds_of(model, algorithm)
        budgets = {a: [smallest_total(model, algorithm, s, a) for s in seeds] for a in ("tokens", "cpu_seconds")}
        title = f"**{TITLES[model]}, {algorithm.upper()}**"
        tokens, seconds = (_mean(budgets[axis]) for axis in budgets)
        yield _row(title, "", f"**{tokens:,.0f} tokens**", "", "", f"**{_significant(seconds)} CPU s**", "", "")
        for controller in CONTROLLERS:
            row = []
            for axis, budget in budgets.items():
                points = [
                    at_budget(Cell(model, algorithm, controller, seed), axis, each)
                    for seed, each in zip(seeds, budget, strict=True)
                ]
                steps, reward, heldout = zip(*points, strict=True)
                row += [f"{_mean(steps):.0f}", f"{_mean(reward):.3f}", _spread(heldout)]
            yield _row("", LABELS[controller], *row)


def every_run() -> Iterator[str]:
    """A line for every run that there is, averaged or not."""
    yield "| model | algorithm | trainer | G | seed | steps | " + " | ".join(
        ("mean G", "straggler rate", "CPU s", "wall s", "tokens", "idle", "reward", "held-out", "mean length")
    ) + " |"  # fmt: skip
    yield "|" + "---|" * 15
    done = [cell for cell in cells() if cell.is_done]
    for cell in sorted(done, key=lambda c: (MODELS.index(c.model), ALGORITHMS.index(c.algorithm), c.trainer == OURS)):
        figures = at_equal_steps(cell)
        names = (TITLES[cell.model], cell.algorithm, _TRAINERS[cell.trainer], LABELS[cell.controller], str(cell.seed))
        yield _row(*names, f"{figures['num_steps']}", *_cells_of([figures]))


TABLES = {"equal_steps": equal_steps, "gain": gain, "fair": fair, "every_run": every_run}


def marks(name: str) -> tuple[str, str]:
    return f"<!-- table {name}: written by bench/results_study.py -->", f"<!-- end of table {name} -->"


def with_tables(page: str) -> str:
    """The page with every table written anew."""
    for name, table in TABLES.items():
        page = studies.with_body(page, marks(name), "\n".join(["", *table()]).rstrip() + "\n")
    return page


# ---- words -----------------------------------------------------------------------------------------------------------

_TRAINERS = {OURS: "here", TRL: "TRL"}


def _pairs() -> list[tuple[str, str]]:
    """Models and algorithms with at least one seed complete; the pretrained model first."""
    models = sorted(MODELS, key=list(TITLES).index)
    return [(m, a) for m in models for a in ALGORITHMS if seeds_of(m, a)]


def _groups(model: str, algorithm: str, seeds: Sequence[int]) -> Iterator[list[Cell]]:
    """The cells of each row: TRL's with the seeds that they have, then ours."""
    for trainer, controllers in ((TRL, FIXED), (OURS, CONTROLLERS)):
        for controller in controllers:
            row = [Cell(model, algorithm, controller, seed, trainer) for seed in seeds]
            if done := [cell for cell in row if cell.is_done]:
                yield done


def _trainer(group: Sequence[Cell], figures: Sequence[dict[str, float]]) -> str:
    """TRL's rows say how many seeds, and how many steps when they are few."""
    name = _TRAINERS[group[0].trainer]
    notes = []
    if figures[0]["num_steps"] < EQUAL_STEPS[group[0].model]:
        notes.append(f"{figures[0]['num_steps']} steps")
    if len(group) < len(seeds_of(group[0].model, group[0].algorithm)):
        notes.append(f"seeds {_names(cell.seed for cell in group)}")
    return f"{name} ({', '.join(notes)})" if notes else name


def _cells_of(figures: Sequence[dict[str, float]]) -> Iterator[str]:
    """The wall clock is the mean over the seeds that have one."""
    walls = [f["wall_seconds"] for f in figures if not np.isnan(f["wall_seconds"])]
    mean = {name: _mean(f[name] for f in figures) for name in figures[0]}
    yield f"{mean['group_size']:.1f}"
    yield f"{mean['straggler_rate']:.2f}"
    yield _significant(mean["cpu_seconds"])
    yield _significant(_mean(walls) if walls else np.nan)
    yield f"{mean['tokens']:,.0f}"
    yield f"{mean['idle_fraction']:.2f}"
    yield f"{mean['reward']:.3f}"
    yield _spread([f["heldout"] for f in figures])
    yield f"{mean['length']:.1f}"


def _row(*texts: str) -> str:
    return "| " + " | ".join(texts) + " |"


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _spread(values: Sequence[float]) -> str:
    if any(value != value for value in values):
        return "-"
    mean = f"{_mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f}, {max(values):.3f})"


def _significant(seconds: float) -> str:
    """Three figures."""
    return "-" if seconds != seconds else f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _names(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))
