"""Line charts as HTML and SVG, readable at any width without a script.

The SVG holds marks only and is stretched to whatever room there is; strokes keep their width (``non-scaling-stroke``,
points are strokes of no length with round ends). Everything written is HTML placed in per cent, so that text keeps its
size on a phone, on a wide screen and on paper. The page's script adds a cross-hair that reads the same columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Literal

from sagc_fast.report.data import Columns, RunData
from sagc_fast.report.text import escape, format_value

WIDTH, HEIGHT = 1000, 400
TABLE_ROWS = 9
FEW_POINTS = 12  # up to here the points of a line are marked, so that one alone is seen
LABEL_GAP = 0.075  # of the plot's height: end labels closer than this would touch

Values = Sequence[float | None]
Mark = Literal["line", "dots", "steps", "errors"]


@dataclass(frozen=True)
class Series:
    """One drawn set of points; ``style`` is a CSS class that gives the colour ("run-0", "arm-2")."""

    x: Values
    y: Values
    style: str
    mark: Mark = "line"
    label: str = ""
    """Written at the end of the line; empty for none."""
    spread: Values = ()
    """Half height of the error bar at each point, for mark="errors"."""
    run: int = 0
    """Index of the run it belongs to."""


@dataclass(frozen=True)
class Band:
    x: Values
    low: Values
    high: Values
    style: str
    css: str = ""
    """Further classes, for instance "wide" for the paler of two bands."""
    run: int = 0


@dataclass(frozen=True)
class Rule:
    """A horizontal line at a value that matters."""

    y: float
    label: str
    style: str


@dataclass(frozen=True)
class Readout:
    """What the cross-hair and the table show: two columns of the embedded data, by name."""

    run: int
    source: Literal["steps", "evals"]
    x: str
    y: str
    label: str
    style: str


@dataclass(frozen=True)
class Chart:
    id: str
    title: str
    caption: str
    x_label: str
    y_style: Literal["percent", "number", "seconds"] = "number"
    series: list[Series] = field(default_factory=list)
    bands: list[Band] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    readouts: list[Readout] = field(default_factory=list)
    y_range: tuple[float | None, float | None] = (0.0, None)
    """Fixed ends of the y axis; None fits the data."""
    y_ticks: Sequence[float] = ()
    """Exact ticks instead of round ones (group sizes); the axis is then logarithmic to base 2."""
    only_run: int | None = None
    """The run that the whole figure is about, when it is about one."""


@dataclass(frozen=True)
class _Axes:
    x0: float
    x1: float
    y0: float
    y1: float
    is_log: bool

    def x(self, value: float) -> float:
        return (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        """Share of the height above the lower edge, clipped to the plot."""
        low, high = self.y0, self.y1
        if self.is_log:
            low, high, value = math.log2(low), math.log2(high), math.log2(max(value, low))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def point(self, x: float, y: float) -> str:
        return f"{WIDTH * self.x(x):.1f} {HEIGHT * (1 - self.y(y)):.1f}"


def render_chart(chart: Chart, runs: Sequence[RunData]) -> str:
    """The whole figure: heading, plot, and the numbers as a table to open."""
    axes = _fit_axes(chart)
    about = "" if chart.only_run is None else f' data-of="{chart.only_run}"'
    caption = f"{chart.caption[:1].upper()}{chart.caption[1:]}."
    heading = f"<figcaption><h3>{escape(chart.title)}</h3><p>{escape(caption)}</p></figcaption>"
    opening = f'<figure class="chart" id="{chart.id}"{about}>{heading}'
    if axes is None:
        return f'{opening}<p class="empty">No run recorded this.</p></figure>'
    y_ticks = list(chart.y_ticks) or nice_ticks(axes.y0, axes.y1)
    x_ticks = _x_tick_values(chart, axes)
    domain = f"{axes.x0!r} {axes.x1!r} {axes.y0!r} {axes.y1!r}"
    return (
        f'{opening}<div class="plot" role="img" tabindex="0" aria-label="{escape(_alternative(chart))}"'
        f' data-domain="{domain}" data-style="{chart.y_style}" data-x-label="{escape(chart.x_label)}"'
        f' data-readouts="{escape(json.dumps([asdict(readout) for readout in chart.readouts]))}">'
        f'<div class="y-ticks" aria-hidden="true">{_y_ticks(y_ticks, axes, chart.y_style)}</div>'
        f'<div class="canvas">{_svg(chart, axes, x_ticks, y_ticks)}{_rule_labels(chart, axes)}</div>'
        f'<div class="ends" aria-hidden="true">{_end_labels(chart, axes)}</div>'
        f'<div class="x-ticks" aria-hidden="true">{_x_ticks(x_ticks, axes)}</div>'
        f'<div class="x-label" aria-hidden="true">{escape(chart.x_label)}</div></div>'
        f"{_table(chart, runs)}</figure>"
    )


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """At most ``count`` + 1 round numbers from low to high."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _x_tick_values(chart: Chart, axes: _Axes) -> list[float]:
    """Round numbers, whole ones only on an axis that counts."""
    ticks = nice_ticks(axes.x0, axes.x1, count=6)
    is_count = all(x is None or x == int(x) for series in chart.series for x in series.x)
    return [tick for tick in ticks if tick == int(tick)] if is_count else ticks


def rolling(values: Values, window: int) -> tuple[list[float | None], list[float | None]]:
    """Mean and standard deviation (ddof 0) of the last ``window`` values that are there, at each place."""
    means: list[float | None] = []
    spreads: list[float | None] = []
    for end in range(1, len(values) + 1):
        seen = [v for v in values[max(0, end - window) : end] if v is not None]
        mean = sum(seen) / len(seen) if seen else None
        means.append(mean)
        spreads.append(None if mean is None else math.sqrt(sum((v - mean) ** 2 for v in seen) / len(seen)))
    return means, spreads


def _fit_axes(chart: Chart) -> _Axes | None:
    points = [(x, y) for s in chart.series for x, y in zip(s.x, s.y, strict=True) if x is not None and y is not None]
    if not points:
        return None
    xs = [x for x, _ in points]
    x0, x1 = min(xs), max(xs)
    if x0 == x1:
        x0, x1 = x0 - 0.5, x1 + 0.5
    if chart.y_ticks:
        return _Axes(x0, x1, chart.y_ticks[0] / 1.3, chart.y_ticks[-1] * 1.3, is_log=True)
    ys = [y for _, y in points] + [rule.y for rule in chart.rules]
    ys += [v for band in chart.bands for v in (*band.low, *band.high) if v is not None]
    low = min(ys) if chart.y_range[0] is None else min(chart.y_range[0], *ys)
    high = max(ys) if chart.y_range[1] is None else chart.y_range[1]
    if high <= low:
        high = low + (abs(low) or 1.0)
    ticks = nice_ticks(low, high)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    y0 = low if low == chart.y_range[0] else math.floor(low / step + 1e-9) * step
    y1 = high if high == chart.y_range[1] else math.ceil(high / step - 1e-9) * step
    return _Axes(x0, x1, y0, y1, is_log=False)


def _svg(chart: Chart, axes: _Axes, x_ticks: list[float], y_ticks: list[float]) -> str:
    grid = "".join(f"M0 {HEIGHT * (1 - axes.y(t)):.1f}H{WIDTH}" for t in y_ticks)
    grid += "".join(f"M{WIDTH * axes.x(t):.1f} {HEIGHT}v-6" for t in x_ticks)
    marks = [f'<path class="grid" d="{grid}"/>']
    for b in chart.bands:
        marks.append(f'<path class="band {b.style} {b.css}" data-of="{b.run}" d="{_band_path(b, axes)}"/>')
    for rule in chart.rules:
        marks.append(f'<path class="rule {rule.style}" d="M0 {HEIGHT * (1 - axes.y(rule.y)):.1f}H{WIDTH}"/>')
    for s in sorted(chart.series, key=lambda s: s.mark != "dots"):
        marks.append(f'<path class="{s.mark} {s.style}" data-of="{s.run}" d="{_series_path(s, axes)}"/>')
        if s.mark in ("line", "steps") and len(s.x) <= FEW_POINTS:
            points = _series_path(replace(s, mark="dots"), axes)
            marks.append(f'<path class="dots few {s.style}" data-of="{s.run}" d="{points}"/>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{"".join(marks)}</svg>'


def _series_path(series: Series, axes: _Axes) -> str:
    if series.mark == "dots":
        return "".join(f"M{axes.point(x, y)}h0" for x, y in zip(series.x, series.y, strict=True) if _both(x, y))
    if series.mark == "errors":
        bars = zip(series.x, series.y, series.spread, strict=True)
        return "".join(
            f"M{axes.point(x, y - (e or 0))}L{axes.point(x, y + (e or 0))}M{axes.point(x, y)}h0"
            for x, y, e in bars
            if _both(x, y)
        )
    parts: list[str] = []
    last_y: float | None = None
    for x, y in zip(series.x, series.y, strict=True):
        if not _both(x, y):
            last_y = None
            continue
        if last_y is None:
            parts.append(f"M{axes.point(x, y)}h0")  # a lone point still shows
        elif series.mark == "steps":
            parts.append(f"L{axes.point(x, last_y)}L{axes.point(x, y)}")
        else:
            parts.append(f"L{axes.point(x, y)}")
        last_y = y
    return "".join(parts)


def _band_path(band: Band, axes: _Axes) -> str:
    """One closed outline per stretch without gaps."""
    stretches: list[list[tuple[float, float, float]]] = [[]]
    for x, low, high in zip(band.x, band.low, band.high, strict=True):
        if x is None or low is None or high is None:
            stretches.append([])
        else:
            stretches[-1].append((x, low, high))
    paths = []
    for stretch in filter(None, stretches):
        upper = [axes.point(x, high) for x, _, high in stretch]
        lower = [axes.point(x, low) for x, low, _ in reversed(stretch)]
        paths.append("M" + "L".join(upper + lower) + "Z")
    return "".join(paths)


def _both(x: float | None, y: float | None) -> bool:
    return x is not None and y is not None


def _y_ticks(ticks: list[float], axes: _Axes, style: str) -> str:
    return "".join(f'<span style="bottom:{100 * axes.y(t):.2f}%">{format_tick(t, style)}</span>' for t in ticks)


def _x_ticks(ticks: list[float], axes: _Axes) -> str:
    return "".join(f'<span style="left:{100 * axes.x(t):.2f}%">{format_tick(t, "number")}</span>' for t in ticks)


def format_tick(value: float, style: str) -> str:
    if style == "percent":
        return f"{100 * value:g}%"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}".replace("e-0", "e-")


def _rule_labels(chart: Chart, axes: _Axes) -> str:
    return "".join(
        f'<span class="rule-label" style="bottom:{100 * axes.y(rule.y):.2f}%">{escape(rule.label)}</span>'
        for rule in chart.rules
    )


def _end_labels(chart: Chart, axes: _Axes) -> str:
    """The label of each line beside its last point, pushed apart where they would touch."""
    ends = []
    for series in chart.series:
        values = [y for y in series.y if y is not None]
        if series.label and values:
            ends.append([axes.y(values[-1]), series])
    ends.sort(key=lambda end: end[0])
    for below, above in pairwise(ends):
        above[0] = max(above[0], below[0] + LABEL_GAP)
    overflow = max(0.0, ends[-1][0] - 1.0) if ends else 0.0
    return "".join(
        f'<span class="{series.style}" data-of="{series.run}" style="bottom:{100 * (height - overflow):.2f}%">'
        f"{escape(series.label)}</span>"
        for height, series in ends
    )


def _alternative(chart: Chart) -> str:
    """First, last, lowest and highest value of every line, for readers who do not see the figure."""
    parts = []
    for series in chart.series:
        points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if _both(x, y)]
        if series.mark != "dots" and points and series.label:
            first, last = points[0][1], points[-1][1]
            low, high = min(y for _, y in points), max(y for _, y in points)
            shown = [format_value(v, chart.y_style) for v in (first, last, low, high)]
            parts.append(f"{series.label}: from {shown[0]} to {shown[1]}, between {shown[2]} and {shown[3]}")
    return f"{chart.title} against {chart.x_label}. {'; '.join(parts)}"


def _table(chart: Chart, runs: Sequence[RunData]) -> str:
    """A few rows of each read-out, taken from the columns that the figure draws."""
    blocks = []
    for readout in chart.readouts:
        columns: Columns = getattr(runs[readout.run], readout.source)
        xs, ys = columns.get(readout.x, []), columns.get(readout.y, [])
        points = [(x, y) for x, y in zip(xs, ys, strict=False) if _both(x, y)]
        if points:
            picked = [points[i] for i in spaced_indices(len(points), TABLE_ROWS)]
            heads = "".join(f'<th scope="col">{format_tick(round(x, 2), "number")}</th>' for x, _ in picked)
            cells = "".join(f"<td>{format_value(y, chart.y_style)}</td>" for _, y in picked)
            blocks.append(
                f'<table><thead><tr><th scope="col">{escape(chart.x_label)}</th>{heads}</tr></thead>'
                f'<tbody><tr><th scope="row">{escape(readout.label)}</th>{cells}</tr></tbody></table>'
            )
    return f'<details class="numbers"><summary>Numbers</summary><div class="scroll">{"".join(blocks)}</div></details>'


def spaced_indices(length: int, count: int) -> list[int]:
    """At most ``count`` places from first to last, evenly spread."""
    if length <= count:
        return list(range(length))
    return sorted({round(i * (length - 1) / (count - 1)) for i in range(count)})
