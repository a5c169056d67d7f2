"""Which figure shows which columns of the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from sagc_fast.report.charts import Band, Chart, Readout, Rule, Series, Values, rolling
from sagc_fast.report.data import RunData
from sagc_fast.report.summary import PHASE_NAMES, PHASES, Z95, summarize
from sagc_fast.report.text import duration, escape
from sagc_fast.report.timeline import run_style, tag

ARM_COLOURS = 5
MIN_STEPS_TO_SMOOTH = 12
"""With fewer steps than this the steps themselves are the clearest picture (ours)."""
MANY_STEPS = 240
"""From here on points and changes of G are drawn finer, or they would merge into a block (ours)."""
MANY_EVALUATIONS = 30
"""From here on intervals are drawn as a band instead of bars (ours)."""


def accuracy_chart(runs: Sequence[RunData], x: str, x_label: str) -> Chart:
    series, bands, readouts = [], [], []
    for i, run in enumerate(runs):
        n = len(run.evals["step"])
        xs, ys = run.evals.get(x) or [None] * n, run.evals.get("accuracy", [None] * n)
        spread = [None if e is None else Z95 * e for e in run.evals.get("accuracy_stderr", [None] * n)]
        series.append(Series(xs, ys, run_style(i), label=run.tag, run=i))
        if n <= MANY_EVALUATIONS:
            series.append(Series(xs, ys, run_style(i), "errors", spread=spread, run=i))
        else:
            low, high = _around(ys, spread)
            bands.append(Band(xs, low, high, run_style(i), run=i))
        readouts.append(Readout(i, "evals", x, "accuracy", run.name, run_style(i)))
    against = "steps" if x == "step" else "time"
    return Chart(
        id=f"accuracy-{against}",
        title=f"Held-out accuracy against {against}",
        caption="problems never trained on, with 95% intervals",
        x_label=x_label,
        y_style="percent",
        series=series,
        bands=bands,
        readouts=readouts,
        y_range=(0.0, 1.0),
    )


def smoothed_chart(
    runs: Sequence[RunData],
    name: str,
    title: str,
    caption: str,
    *,
    style: str = "number",
    y_range: tuple[float | None, float | None] = (0.0, None),
    rules: Sequence[Rule] = (),
    band: bool = False,
) -> Chart:
    """A metric per step: points are steps, the line is the mean of the last few, the band their standard deviation."""
    series, bands, readouts, windows = [], [], [], set()
    for i, run in enumerate(runs):
        xs, ys = run.steps["step"], run.column(name)
        if all(y is None for y in ys):
            continue
        window = max(5, len(ys) // 15) if len(ys) >= MIN_STEPS_TO_SMOOTH else 1
        means, spreads = rolling(ys, window)
        series.append(Series(xs, means, run_style(i), label=run.tag, run=i))
        if window > 1:
            windows.add(window)
            style_of_dots = run_style(i) + (" many" if len(ys) > MANY_STEPS else "")
            series.append(Series(xs, ys, style_of_dots, "dots", run=i))
        if band and window > 1:
            low, high = _around(means, spreads)
            bands.append(Band(xs, low, high, run_style(i), run=i))
        readouts.append(Readout(i, "steps", "step", name, run.name, run_style(i)))
    if windows:
        sizes = " or ".join(str(w) for w in sorted(windows))
        caption += f"; line: mean of the last {sizes} steps"
        caption += "; band: one standard deviation of them" if band else ""
    return Chart(
        id=name.replace("_", "-"),
        title=title,
        caption=caption,
        x_label="optimizer step",
        y_style=style,
        series=series,
        bands=bands,
        rules=list(rules),
        readouts=readouts,
        y_range=y_range,
    )


def group_size_chart(runs: Sequence[RunData]) -> Chart:
    series = []
    caption = "completions per prompt in each step"
    for i, run in enumerate(runs):
        steps, sizes = run.steps["step"], run.column(run.size_column)
        if len(steps) <= MANY_STEPS or len(set(sizes)) == 1:
            series.append(Series(steps, sizes, run_style(i), "steps", run.tag, run=i))
        else:  # hundreds of changes side by side would be one solid block
            series.append(Series(steps, sizes, f"{run_style(i)} many", "dots", run=i))
            series.append(Series(steps, rolling(sizes, len(steps) // 30)[0], run_style(i), label=run.tag, run=i))
            caption = f"completions per prompt: each step, and the mean of the last {len(steps) // 30}"
    used = {g for run in runs for g in run.column("group_size") if g} | {g for run in runs for g in run.arms}
    return Chart(
        id="group-size",
        title="Group size G",
        caption=caption,
        x_label="optimizer step",
        series=series,
        readouts=[Readout(i, "steps", "step", r.size_column, r.name, run_style(i)) for i, r in enumerate(runs)],
        y_ticks=sorted(used),
    )


def lambda_chart(adaptive: Sequence[tuple[int, RunData]]) -> Chart:
    return Chart(
        id="lambda",
        title="Price of a straggler, λ",
        caption="rises while the straggler rate is above the goal, falls while it is below; a high price makes G small",
        x_label="optimizer step",
        series=[Series(r.steps["step"], r.column("lambda"), run_style(i), label=r.tag, run=i) for i, r in adaptive],
        readouts=[Readout(i, "steps", "step", "lambda", r.name, run_style(i)) for i, r in adaptive],
    )


def posterior_chart(index: int, run: RunData) -> Chart:
    series, bands, readouts = [], [], []
    for k, arm in enumerate(run.arms):
        style, steps = f"arm-{k % ARM_COLOURS}", run.steps["step"]
        mean, low, high = (run.column(f"arms.{arm}.{part}") for part in ("mean", "low", "high"))
        series.append(Series(steps, mean, style, label=f"{arm}", run=index))
        bands.append(Band(steps, low, high, style, run=index))
        readouts.append(Readout(index, "steps", "step", f"arms.{arm}.mean", f"G = {arm}", style))
    return Chart(
        id=f"posteriors-{index}",
        title=f"{run.tag} · what the controller believes",
        caption="straggler rate it expects at each G (written at the right): posterior mean and 90% interval",
        x_label="optimizer step",
        y_style="percent",
        series=series,
        bands=bands,
        readouts=readouts,
        y_range=(0.0, 1.0),
        only_run=index,
    )


def length_chart(index: int, run: RunData, longest: float | None) -> Chart:
    steps, style = run.steps["step"], run_style(index)
    p5, p25, p50, p75, p95 = (run.column(f"length_quantiles.{k}") for k in range(5))
    return Chart(
        id=f"lengths-{index}",
        title=f"{run.tag} · tokens per completion",
        caption="line: median; bands: middle half and middle 90%; points: longest of the step",
        x_label="optimizer step",
        series=[
            Series(steps, p50, style, label="½", run=index),
            Series(steps, run.column("length_max"), style, "dots", run=index),
        ],
        bands=[Band(steps, p5, p95, style, "wide", run=index), Band(steps, p25, p75, style, run=index)],
        readouts=[
            Readout(index, "steps", "step", f"length_quantiles.{k}", label, style)
            for k, label in ((0, "5%"), (1, "25%"), (2, "median"), (3, "75%"), (4, "95%"))
        ]
        + [Readout(index, "steps", "step", "length_max", "longest", style)],
        y_range=(0.0, longest),
        only_run=index,
    )


def _around(centres: Values, halves: Values) -> tuple[list[float | None], list[float | None]]:
    """The lower and the upper edge of a band; None where either is missing."""
    pairs = [None if c is None or h is None else (c - h, c + h) for c, h in zip(centres, halves, strict=True)]
    return [p and p[0] for p in pairs], [p and p[1] for p in pairs]


def phase_bars(runs: Sequence[RunData]) -> str:
    """Seconds of every phase as bars on one scale."""
    sums = [summarize(run) for run in runs]
    longest = max((sum(s.phase_seconds.values()) for s in sums), default=0.0)
    if not longest > 0:
        return '<p class="empty">No run recorded seconds by phase.</p>'
    key = "".join(f'<span class="key"><i class="phase-{p}"></i>{PHASE_NAMES[p]}</span>' for p in PHASES)
    caption = "<figcaption><h3>Seconds by phase</h3><p>All steps of each run, on one scale.</p></figcaption>"
    bars = "".join(_phase_row(i, run, sums[i].phase_seconds, longest) for i, run in enumerate(runs))
    return f'<figure class="phases" id="phases">{caption}<div>{key}</div>{bars}</figure>'


def _phase_row(index: int, run: RunData, seconds: dict[str, float], longest: float) -> str:
    shown = [phase for phase in PHASES if seconds[phase] > 0]
    parts = "".join(
        f'<div class="phase-{p}" style="width:{100 * seconds[p] / longest:.3f}%"'
        f' title="{PHASE_NAMES[p]}: {duration(seconds[p])}"></div>'
        for p in shown
    )
    said = ", ".join(f"{PHASE_NAMES[p]} {duration(seconds[p])}" for p in shown)
    return (
        f'<div class="phase-row" data-of="{index}"><div>{tag(run, index)} {escape(run.name)}</div>'
        f'<div class="phase-bar" role="img" aria-label="{said}">{parts}</div><div class="phase-said">{said}</div></div>'
    )
