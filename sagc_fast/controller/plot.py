"""The picture of a comparison: group size and lambda over time, posteriors, and the frontier. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sagc_fast.controller._beta import beta_quantile
from sagc_fast.controller.compare import Comparison, static_frontier
from sagc_fast.controller.config import SAGCConfig
from sagc_fast.controller.simulate import RunRecord
from sagc_fast.errors import ConfigError

_COLOURS = ("#1b6ca8", "#e07b00", "#3a923a", "#8e4ec6", "#b03a48", "#5f6b7a")


def require_matplotlib() -> Any:
    """matplotlib.pyplot on a backend without display; ConfigError with the remedy where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "Pictures need matplotlib, which is not installed; run: pip install sagc_fast[plot]"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def check_picture_path(path: str | Path) -> None:
    """Raises ConfigError where no picture can be written: before the work that it is to show."""
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    path, known = Path(path), FigureCanvasBase.get_supported_filetypes()
    if path.is_dir() or path.suffix.lstrip(".").lower() not in known:
        raise ConfigError(f"The picture cannot be written to {path}; give a file name ending in .png or .svg.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"The picture cannot be written to {path}: there is no folder {path.parent}; make it first.")


def plot_comparison(comparison: Comparison, config: SAGCConfig, hold: str, title: str, path: str | Path) -> None:
    """Write the four panels for one hold; the suffix of ``path`` chooses the format. Raises ConfigError."""
    plt = require_matplotlib()
    records = comparison.records[hold]
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    shown = next((name for name in ("sagc", "prompt-aware", "sagc-plain") if name in records), next(iter(records)))
    _plot_group_size(axes[0, 0], records, config)
    _plot_price(axes[0, 1], records, config)
    _plot_posteriors(axes[1, 0], records[shown], comparison, config)
    _plot_frontier(axes[1, 1], comparison.rows[hold])
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The picture cannot be written to {path} ({error}); give a path ending in .png or .svg."
        ) from error
    finally:
        plt.close(figure)


def _steered(records: dict[str, RunRecord]) -> list[RunRecord]:
    return [r for name, r in records.items() if name in ("sagc", "sagc-plain", "prompt-aware", "cost-aware")]


def rolling_mean(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(steps, means) of every full window."""
    window = max(1, min(window, len(values)))
    return np.arange(window, len(values) + 1), np.convolve(values, np.ones(window) / window, mode="valid")


def _plot_group_size(axis: Any, records: dict[str, RunRecord], config: SAGCConfig) -> None:
    if "sagc" in records:
        sizes = records["sagc"].group_size
        axis.plot(
            np.arange(1, len(sizes) + 1), sizes, ".", ms=2, color=_COLOURS[0], alpha=0.35, label="sagc, each step"
        )
    for colour, record in zip(_COLOURS, _steered(records), strict=False):
        steps, means = rolling_mean(record.log2_group_size, 25)
        axis.plot(steps, 2.0**means, color=colour, lw=1.6, label=f"{record.name}, 25-step mean")
    axis.set_yscale("log", base=2)
    axis.set_yticks(config.candidates, [str(size) for size in config.candidates])
    axis.set(xlabel="optimizer step", ylabel="group size G", title="Group size")
    axis.legend(fontsize=8, loc="best")


def _plot_price(axis: Any, records: dict[str, RunRecord], config: SAGCConfig) -> None:
    priced = [r for r in _steered(records) if np.isfinite(r.price).any()]
    for colour, record in zip(_COLOURS, priced, strict=False):
        axis.plot(np.arange(1, len(record.price) + 1), record.price, color=colour, lw=1.1, label=f"λ, {record.name}")
    axis.set(xlabel="optimizer step", ylabel="λ (log2 G per unit of rate)", title="Price λ and straggler rate")
    rate_axis = axis.twinx()
    for colour, record in zip(_COLOURS, priced, strict=False):
        steps, means = rolling_mean(record.straggler_rate, 50)
        rate_axis.plot(steps, means, color=colour, lw=1.3, ls=":", label="_")
    rate_axis.plot([], [], color="0.4", lw=1.3, ls=":", label="their rates, 50-step means")
    rate_axis.axhline(config.delta, color="black", lw=0.8, ls="--", label=f"δ = {config.delta:g}")
    rate_axis.set(ylabel="straggler rate", ylim=(0, 1))
    rate_axis.spines["top"].set_visible(False)
    handles = [item for a in (axis, rate_axis) for item in a.get_legend_handles_labels()[0]]
    axis.legend(handles, [item.get_label() for item in handles], fontsize=8, loc="best")


def _plot_posteriors(axis: Any, record: RunRecord, comparison: Comparison, config: SAGCConfig) -> None:
    steps = np.array([step for step, _ in record.posteriors])
    thinned = range(0, len(steps), max(1, len(steps) // 120))
    for colour, size in zip(_COLOURS, config.candidates, strict=False):
        shapes = [record.posteriors[i][1][size] for i in thinned]
        means = [a / (a + b) for a, b in shapes]
        low, high = ([beta_quantile(q, a, b) for a, b in shapes] for q in (0.05, 0.95))
        axis.plot(steps[list(thinned)], means, color=colour, lw=1.4, label=f"G={size}")
        axis.fill_between(steps[list(thinned)], low, high, color=colour, alpha=0.15, lw=0)
        axis.axhline(comparison.rates[size], color=colour, lw=0.9, ls="--")
    axis.axhline(config.delta, color="black", lw=0.8, ls="--")
    axis.set(xlabel="optimizer step", ylabel="straggler probability", ylim=(0, 1))
    axis.set_title(f"Posteriors of {record.name} (90%; dashed: true run averages, black: δ)")
    axis.legend(fontsize=8, loc="best")


def _plot_frontier(axis: Any, rows: list[dict[str, Any]]) -> None:
    frontier = static_frontier(rows)
    if frontier:
        axis.plot(*zip(*frontier, strict=True), color="0.6", lw=1.2, zorder=1, label="fixed G, and mixtures of two")
    styles = iter(zip(_COLOURS[1:] * 2, "oDvP^X<>hp", strict=False))
    for row in rows:
        x, y, name = row["step_seconds"], row["informative_groups_per_step"], row["policy"]
        is_fixed = name.startswith("fixed-")
        colour, marker = ("0.35", "s") if is_fixed else ((_COLOURS[0], "*") if name == "sagc" else next(styles))
        axis.scatter(x, y, s=170 if name == "sagc" else 40, marker=marker, color=colour, zorder=4 if is_fixed else 3)
        if is_fixed:
            axis.annotate(f"G={name[6:]}", (x, y), xytext=(5, -13), textcoords="offset points", fontsize=9)
        else:
            axis.scatter([], [], s=40, marker=marker, color=colour, label=name)
    axis.set(xlabel="seconds per step (continuous batching)", ylabel="informative groups per step")
    axis.set_title("Statistical efficiency against time")
    axis.legend(fontsize=8, loc="lower right")
