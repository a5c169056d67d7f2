"""The picture of a rollout: one bar per completion from its first engine step to its last, idle area left hatched.

Rows are those of a lock-step batch of ``capacity_rows``: a completion keeps its row, and what it leaves behind stays
empty until another takes the row. Within a group the longest stands first, so that a straggler is seen at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sagc_fast.report.charts import format_tick, nice_ticks, spaced_indices
from sagc_fast.report.data import RunData
from sagc_fast.report.text import compact, escape, percent

MAX_SNAPSHOTS = 7
"""Snapshots shown of each run: the first, the last and some between (ours; more would only make the file larger)."""
ROW_HEIGHT = 10
BAR_HEIGHT = 8
GROUP_STYLES = 8
RUN_COLOURS = 6


@dataclass(frozen=True)
class Snapshot:
    """One recorded rollout with a row for every completion."""

    step: int
    capacity_rows: int
    num_steps: int
    """Engine steps of the rollout."""
    rows: tuple[dict[str, Any], ...]
    """As recorded, ordered by row."""
    lanes: tuple[int, ...]
    """Row of the batch, from 0 at the top, that each completion takes."""
    idle_fraction: float
    active_rows: tuple[int, ...]


def snapshots(run: RunData) -> list[Snapshot]:
    """The run's recorded rollouts, thinned to MAX_SNAPSHOTS."""
    usable = [record for record in run.timelines if record["rows"]]
    return [snapshot(usable[i]) for i in spaced_indices(len(usable), MAX_SNAPSHOTS)]


def snapshot(record: dict[str, Any]) -> Snapshot:
    """Give every completion a row. Idle share as the engine counts it: 1 - sum(active) / (capacity x steps)."""
    rows = sorted(record["rows"], key=lambda r: (r["first_step"], r["group"], -r["last_step"], r["sample"]))
    lanes = assign_lanes([(r["first_step"], r["last_step"]) for r in rows])
    num_steps = 1 + max(r["last_step"] for r in rows)
    active = record.get("active_rows")
    if not isinstance(active, list) or not all(isinstance(a, (int, float)) for a in active) or not active:
        active = [sum(r["first_step"] <= t <= r["last_step"] for r in rows) for t in range(num_steps)]
    capacity = max(int(record["capacity_rows"]), max(lanes) + 1)
    idle = 1 - sum(active) / (capacity * len(active))
    return Snapshot(int(record["step"]), capacity, num_steps, tuple(rows), tuple(lanes), idle, tuple(active))


def assign_lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """The lowest free row for each (first, last) span, spans sorted by first; a row is free again after last."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    lanes = []
    opened = 0
    for first, last in spans:
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, opened = opened, opened + 1
        heapq.heappush(busy, (last, lane))
        lanes.append(lane)
    return lanes


def render_timelines(run: RunData, index: int) -> str:
    """The snapshots of one run behind tabs that need no script; an empty string when none was recorded."""
    shots = snapshots(run)
    if not shots:
        return ""
    group = f"timeline-{index}"
    tabs = []
    for k, shot in enumerate(shots):
        checked = " checked" if k == len(shots) - 1 else ""
        tabs.append(
            f'<input type="radio" name="{group}" id="{group}-{k}"{checked}>'
            f'<label for="{group}-{k}">step {shot.step}</label>'
            f"{_panel(shot, f'{group}-{k}-plot')}"  # next to its tab, which shows it; the style sheet moves it below
        )
    caption = f"<figcaption><h3>{tag(run, index)} {escape(run.name)}</h3></figcaption>"
    body = f'<span class="tabs-title">Optimizer step</span>{"".join(tabs)}'
    return f'<figure class="timeline" id="{group}" data-of="{index}">{caption}<div class="tabs">{body}</div></figure>'


def run_style(index: int) -> str:
    """The CSS class that carries a run's colour and dash pattern."""
    return f"run-{index % RUN_COLOURS}"


def tag(run: RunData, index: int) -> str:
    """The run's letter on its colour."""
    return f'<span class="tag {run_style(index)}">{escape(run.tag)}</span>'


def _panel(shot: Snapshot, plot_id: str) -> str:
    height = ROW_HEIGHT * shot.capacity_rows
    bars = "".join(_bar(i, row, lane) for i, (row, lane) in enumerate(zip(shot.rows, shot.lanes, strict=True)))
    num_groups = len({r["group"] for r in shot.rows})
    said = (
        f"{len(shot.rows)} completions of {num_groups} prompts in {shot.num_steps} engine steps;"
        f" {percent(shot.idle_fraction)} of the row-steps idle"
    )
    ticks = "".join(
        f'<span style="left:{100 * t / shot.num_steps:.2f}%">{format_tick(t, "number")}</span>'
        for t in nice_ticks(0, shot.num_steps, count=6)
    )
    return (
        f'<div class="panel"><p>{said}.</p>'
        f'<div class="rows-plot"><div class="rows-label" aria-hidden="true">{shot.capacity_rows} rows</div>'
        f'<div class="idle" style="--rows:{shot.capacity_rows}">'
        f'<svg id="{plot_id}" class="bars" role="img" aria-label="Rollout of optimizer step {shot.step}: {said}."'
        f' viewBox="0 0 {shot.num_steps} {height}" preserveAspectRatio="none">{bars}</svg></div>'
        f'<div class="rows-label" aria-hidden="true">live</div>{_active_strip(shot)}'
        f'<div class="x-ticks" aria-hidden="true">{ticks}</div>'
        f'<div class="x-label" aria-hidden="true">engine step</div></div>{_completions_table(shot)}</div>'
    )


def _bar(index: int, row: dict[str, Any], lane: int) -> str:
    return (
        f'<rect class="g{row["group"] % GROUP_STYLES}" data-row="{index}" data-group="{row["group"]}"'
        f' x="{row["first_step"]}" y="{ROW_HEIGHT * lane + 1}"'
        f' width="{row["last_step"] - row["first_step"] + 1}" height="{BAR_HEIGHT}"/>'
    )


def _active_strip(shot: Snapshot) -> str:
    """Live rows over the engine steps: what compaction leaves to compute."""
    steps = "".join(f"V{shot.capacity_rows - a}h1" for a in shot.active_rows)
    outline = f"M0 {shot.capacity_rows}{steps}V{shot.capacity_rows}Z"
    return (
        f'<svg class="live" aria-hidden="true" viewBox="0 0 {len(shot.active_rows)} {shot.capacity_rows}"'
        f' preserveAspectRatio="none"><path d="{outline}"/></svg>'
    )


def _completions_table(shot: Snapshot) -> str:
    """Every completion in words: for readers without a pointer, and where the script finds what a bar stands for."""
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("group", "sample", "tokens", "reward", "text"))
    body = "".join(
        f'<tr data-row="{i}"><td>{r["group"]}</td><td>{r["sample"]}</td><td>{r["length"]}</td><td>{_reward(r)}</td>'
        f'<td class="text">{escape(str(r.get("text") or ""))}</td></tr>'
        for i, r in sorted(enumerate(shot.rows), key=lambda item: (item[1]["group"], item[1]["sample"]))
    )
    return (
        f'<details class="numbers"><summary>The {len(shot.rows)} completions</summary><div class="scroll tall">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def _reward(row: dict[str, Any]) -> str:
    value = row.get("reward")
    return compact(value) if isinstance(value, (int, float)) and value == value else "–"
