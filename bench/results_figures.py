"""The figures of docs/results.md from the stored runs."""

from __future__ import annotations

import numpy as np
import studies
from results_grid import ALGORITHMS, CONTROLLERS, EQUAL_STEPS, FIXED, MODELS, TRL, Cell
from results_tables import LABELS, TITLES, at_equal_steps, run_of, seeds_of, smallest_total
from studies import ROOT

IMAGES = ROOT / "docs/img"
COLOURS = dict(zip(CONTROLLERS, ("#9ab8d6", "#4a82b8", "#1b3f66", "#c2571a", "#5f8f3c"), strict=True))
AXES = {"step": "optimizer steps", "tokens": "sampled tokens (thousands)", "cpu_seconds": "CPU seconds"}


def draw() -> None:
    """Write every figure for which there are runs."""
    import matplotlib

    matplotlib.use("Agg")
    for model in MODELS:
        if all(seeds_of(model, algorithm) for algorithm in ALGORITHMS):
            _rewards(model)
    _seconds()


def _rewards(model: str) -> None:
    """Rewards against steps, tokens and seconds; straggler rate against steps. A row for each algorithm."""
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(2, 4, figsize=(13, 5.4), constrained_layout=True)
    for row, algorithm in zip(grid, ALGORITHMS, strict=True):
        seeds = seeds_of(model, algorithm)
        for controller in CONTROLLERS:
            runs = [run_of(Cell(model, algorithm, controller, seed)) for seed in seeds]
            for axes, axis in zip(row, AXES, strict=False):
                _band(axes, studies.band(runs, axis), controller, 1000 if axis == "tokens" else 1)
            rates = [studies.running_mean(r["straggler_rate"][: EQUAL_STEPS[model]]) for r in runs]
            stacked = np.stack(rates)
            steps = np.arange(1, stacked.shape[1] + 1)
            _band(row[3], (steps, stacked.mean(0), stacked.min(0), stacked.max(0)), controller)
        row[0].set_xlim(1, EQUAL_STEPS[model])
        row[1].set_xlim(0, 1.1 * min(smallest_total(model, algorithm, s, "tokens") for s in seeds) / 1000)
        row[2].set_xlim(0, 1.1 * min(smallest_total(model, algorithm, s, "cpu_seconds") for s in seeds))
        for axes, label in zip(row, (*AXES.values(), AXES["step"]), strict=True):
            axes.set_xlabel(label)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        low, high = min(a.get_ylim()[0] for a in row[:3]), max(a.get_ylim()[1] for a in row[:3])
        for axes in row[:3]:
            axes.set_ylim(low, high)
        row[3].set_ylim(0, 1.02)
        row[0].set_ylabel(f"{algorithm.upper()}: reward")
        row[3].set_ylabel("straggler rate")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, title=TITLES[model], frameon=False, loc="outside upper center", ncols=len(labels))
    _save(figure, f"results_{model}.png")


def _band(axes, band, controller: str, unit: int = 1) -> None:
    x, mean, low, high = band
    axes.fill_between(x / unit, low, high, color=COLOURS[controller], alpha=0.15, linewidth=0)
    axes.plot(x / unit, mean, color=COLOURS[controller], label=_name(controller))


def _seconds() -> None:
    """CPU seconds of a GRPO step: TRL's trainer and this one, by group size."""
    from matplotlib import pyplot as plt

    models = [m for m in MODELS if seeds_of(m, "grpo") and Cell(m, "grpo", "G16", 0, TRL).is_done]
    if not models:
        return
    figure, axes_of = plt.subplots(1, len(models), figsize=(5 * len(models), 3), constrained_layout=True, squeeze=False)
    for axes, model in zip(axes_of[0], models, strict=True):
        bars = [(Cell(model, "grpo", c, 0, TRL), f"TRL, {_name(c)}", "#8c8c8c") for c in FIXED]
        bars += [(Cell(model, "grpo", c, 0), _name(c), COLOURS[c]) for c in CONTROLLERS]
        bars = [bar for bar in bars if bar[0].is_done]
        seconds = [at_equal_steps(cell)["seconds_per_step"] for cell, _, _ in bars]
        places = range(len(bars), 0, -1)
        axes.barh(places, seconds, color=[colour for _, _, colour in bars])
        axes.set_yticks(places, [name for _, name, _ in bars])
        for place, value in zip(places, seconds, strict=True):
            axes.text(value, place, f" {value:.3g}", va="center")
        axes.set_xscale("log")
        axes.set_xlim(min(seconds) / 2, max(seconds) * 3)
        axes.set_xlabel("CPU seconds per step (log scale)")
        axes.set_title(f"{TITLES[model]}, GRPO, seed 0")
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, "results_seconds.png")


def _name(controller: str) -> str:
    return f"G = {LABELS[controller]}" if controller in FIXED else LABELS[controller]


def _save(figure, name: str) -> None:
    from matplotlib import pyplot as plt

    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / name, dpi=100)
    plt.close(figure)
