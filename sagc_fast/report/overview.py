"""The summary's tiles, tables and cautions, and the details at the end of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sagc_fast.report.data import RunData
from sagc_fast.report.summary import Accuracy, RunSummary, is_by_neighbours, steps, summarize, time_ratio, warnings
from sagc_fast.report.text import compact, duration, escape, percent
from sagc_fast.report.timeline import tag


def tiles(runs: Sequence[RunData], pairs: Sequence[tuple[int, int]]) -> str:
    """The first comparison, or the course of the only run, as a few large figures."""
    if not pairs:
        return _single_tiles(summarize(next(run for run in runs if run.num_steps)))
    other, base = pairs[0]
    n = min(runs[base].num_steps, runs[other].num_steps)
    ours, theirs = summarize(runs[other], n), summarize(runs[base], n)
    shown = []
    there = f"in {runs[base].tag}"
    if is_by_neighbours(ours, theirs):
        note = f"{theirs.cpu_seconds:.1f} → {ours.cpu_seconds:.1f} s; the machine was busy"
        shown.append((f"{theirs.cpu_seconds / ours.cpu_seconds:.2f}×", "the speed in CPU seconds", note))
    elif ratio := time_ratio(ours, theirs):
        note = f"{duration(theirs.seconds)} → {duration(ours.seconds)}"
        shown.append((f"{ratio:.2f}×", "the speed at equal steps", note))
    if ours.straggler_rate is not None and theirs.straggler_rate is not None:
        shown.append((percent(ours.straggler_rate), "groups straggled", f"{percent(theirs.straggler_rate)} {there}"))
    if ours.output_tokens and theirs.output_tokens:
        shown.append((compact(ours.output_tokens), "output tokens", f"{compact(theirs.output_tokens)} {there}"))
    if ours.accuracy_last and theirs.accuracy_last:
        value = percent(ours.accuracy_last.value)
        shown.append((value, "held-out accuracy", f"{theirs.accuracy_last} {there}"))
    return _tile_row(shown, f"{runs[other].tag} against {runs[base].tag}, the same {steps(n)}")


def _single_tiles(whole: RunSummary) -> str:
    shown = []
    if whole.accuracy_last and whole.accuracy_first:
        shown.append((percent(whole.accuracy_last.value), "held-out accuracy", f"{whole.accuracy_first} before"))
    if whole.straggler_rate is not None:
        goal = f"goal {percent(whole.delta)}" if whole.has_goal else ""
        shown.append((percent(whole.straggler_rate), "groups straggled", goal))
    if whole.tokens_per_second:
        shown.append((compact(whole.tokens_per_second), "tokens per second", "of rollout"))
    if whole.seconds:
        shown.append((duration(whole.seconds), "of training", steps(whole.num_steps)))
    return _tile_row(shown, "")


def _tile_row(shown: Sequence[tuple[str, str, str]], title: str) -> str:
    if not shown:
        return ""
    body = "".join(
        f'<div class="tile"><span class="value">{escape(value)}</span><span>{escape(label)}</span>'
        f'<span class="note">{escape(note)}</span></div>'
        for value, label, note in shown
    )
    heading = f'<p class="tiles-title">{escape(title)}</p>' if title else ""
    return f'{heading}<div class="tiles">{body}</div>'


def comparison_table(runs: Sequence[RunData], base: int) -> str:
    """One column per run over all of its steps."""
    sums = [summarize(run) for run in runs]
    kinds: tuple[tuple[str, Callable[[RunSummary], str]], ...] = (
        ("controller", lambda s: escape(s.run.controller)),
        ("optimizer steps", lambda s: str(s.num_steps)),
        ("training time", lambda s: duration(s.seconds)),
        ("· rollout", lambda s: duration(s.phase_seconds["rollout"])),
        ("· waiting for rewards", lambda s: duration(s.phase_seconds["reward"])),
        ("· update", lambda s: duration(s.phase_seconds["update"])),
        ("output tokens", lambda s: compact(s.output_tokens)),
        ("tokens per second of rollout", lambda s: compact(s.tokens_per_second)),
        ("mean group size", lambda s: compact(s.group_size)),
        ("straggler rate", lambda s: percent(s.straggler_rate)),
        ("cut completions", lambda s: percent(s.clipped_ratio)),
        ("idle row-steps", lambda s: percent(s.idle_fraction)),
        ("mean completion length", lambda s: compact(s.length)),
        ("training reward, first → last tenth", lambda s: f"{compact(s.reward_first)} → {compact(s.reward_last)}"),
        ("held-out accuracy, before → after", lambda s: _before_after(s.accuracy_first, s.accuracy_last)),
    )
    is_marked = len(runs) > 1
    heads = "".join(
        f'<th scope="col">{tag(run, i)} {escape(run.name)}'
        f"{' <small>baseline</small>' if i == base and is_marked else ''}</th>"
        for i, run in enumerate(runs)
    )
    return _table(heads, [(name, [show(s) for s in sums]) for name, show in kinds], "figures")


def _before_after(first: Accuracy | None, last: Accuracy | None) -> str:
    return "–" if first is None else f"{first} → {last}" if last else str(first)


def warning_list(runs: Sequence[RunData]) -> str:
    """What to know about each run before relying on its figures."""
    items = [f"<li><b>{escape(run.name)}</b>: {escape(note)}.</li>" for run in runs for note in warnings(run)]
    if not items:
        return ""
    return f'<div class="notes"><h3>Before you rely on these figures</h3><ul>{"".join(items)}</ul></div>'


def details(runs: Sequence[RunData]) -> str:
    """Where the numbers come from: software and machine, each run's folder and starts, and the settings that differ."""
    found = [_flatten({k: v for k, v in run.versions.items() if k != "starts"}) for run in runs]
    names = list(dict.fromkeys(name for versions in found for name in versions))
    shared = [n for n in names if all(v.get(n, "–") == found[0].get(n, "–") for v in found)]
    parts = [_facts([(name, found[0][name]) for name in shared])]
    for i, run in enumerate(runs):
        own = [(name, found[i].get(name, "–")) for name in names if name not in shared]
        starts = [("started", f"{_clock(start.get('time'))}: {start.get('command', '–')}") for start in _starts(run)]
        heading = f"<h3>{tag(run, i)} {escape(run.name)}</h3>" if len(runs) > 1 else ""
        parts.append(heading + _facts([("folder", run.path), *own, *starts]))
    if len(runs) > 1:
        differing = _differing_settings(runs)
        said = "These settings differ." if differing else "The configurations are the same."
        heads = "".join(f'<th scope="col">{tag(run, i)} {escape(run.name)}</th>' for i, run in enumerate(runs))
        parts.append(f"<h3>Configuration</h3><p>{said}</p>{_table(heads, differing) if differing else ''}")
    for run in runs:
        if run.config:
            summary = f"<summary>Configuration of {escape(run.name)}</summary>"
            parts.append(f'<details class="numbers">{summary}<pre>{escape(_dump(run.config))}</pre></details>')
    return "".join(parts)


def _facts(pairs: Sequence[tuple[str, Any]]) -> str:
    """Names and values below each other; long values break and nothing runs out of a narrow screen."""
    body = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in pairs)
    return f'<dl class="facts">{body}</dl>' if pairs else ""


def _clock(time: Any) -> str:
    """A start's ISO time without its T and its offset from UTC, which is 0."""
    return f"{str(time)[:19].replace('T', ' ')} UTC" if time else "at an unknown time"


def context_line(runs: Sequence[RunData]) -> str:
    """Machine, software, commit and day, as far as all runs share them; plain text."""
    versions = [run.versions for run in runs]

    def shared(name: str) -> str:
        values = {str(found.get(name, "")) for found in versions}
        return values.pop() if len(values) == 1 else ""

    days = {str(start.get("time", ""))[:10] for run in runs for start in _starts(run)}
    parts = [
        shared("cpu"),
        shared("cores") and f"{shared('cores')} core{'s' * (shared('cores') != '1')}",
        shared("torch") and f"torch {shared('torch')}",
        shared("commit") and f"commit {shared('commit')[:10]}",
        " and ".join(sorted(days)) if len(days) < 3 else f"{min(days)} to {max(days)}",
    ]
    return " · ".join(part for part in parts if part)


def _starts(run: RunData) -> list[dict[str, Any]]:
    value = run.versions.get("starts")
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _table(heads: str, rows: Sequence[tuple[str, Sequence[str]]], css: str = "") -> str:
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{value}</td>" for value in values)}</tr>'
        for name, values in rows
    )
    head = f"<thead><tr><td></td>{heads}</tr></thead>"
    return f'<div class="scroll"><table class="{css}">{head}<tbody>{body}</tbody></table></div>'


def _differing_settings(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    flat = [_flatten(run.config) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings if name != "run_dir")  # shown as the folder
    found = []
    for name in names:
        values = [settings.get(name, "–") for settings in flat]
        if any(value != values[0] for value in values):
            found.append((escape(name), [escape(str(value)) for value in values]))
    return found


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves under dotted names; a list of records counts its items from 0, a list of plain values is one leaf."""
    is_records = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    if not isinstance(value, dict) and not is_records:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in enumerate(value) if is_records else value.items():
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _dump(config: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
