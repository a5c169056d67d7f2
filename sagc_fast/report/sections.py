"""The page's parts, top to bottom: summary, learning, stragglers, lengths, time, rollouts, optimisation, details."""

from __future__ import annotations

from collections.abc import Sequence

from sagc_fast.report import overview
from sagc_fast.report.charts import Chart, Rule, render_chart
from sagc_fast.report.data import RunData
from sagc_fast.report.figures import (
    accuracy_chart,
    group_size_chart,
    lambda_chart,
    length_chart,
    phase_bars,
    posterior_chart,
    smoothed_chart,
)
from sagc_fast.report.summary import comparison_sentences, comparisons, pick_baseline, single_sentences
from sagc_fast.report.text import percent
from sagc_fast.report.timeline import render_timelines

SHARE = (0.0, 1.0)


def summary_section(runs: Sequence[RunData]) -> str:
    """What was gained, in words, in large figures and in one table; then what to know before believing it."""
    pairs = comparisons(runs)
    words = "".join(_findings(comparison_sentences(runs[i], runs[base]), i, base, runs) for i, base in pairs)
    if not words:
        words = "".join(_findings(single_sentences(run), i, i, runs) for i, run in enumerate(runs) if run.num_steps)
    figures = overview.tiles(runs, pairs) + overview.comparison_table(runs, pick_baseline(runs))
    return _section("summary", "Summary", words + figures + overview.warning_list(runs))


def _findings(sentences: Sequence[str], index: int, base: int, runs: Sequence[RunData]) -> str:
    if not sentences:
        return ""
    heading = f"<h3>{runs[index].tag} against {runs[base].tag}</h3>" if index != base else ""
    return f'<div class="findings">{heading}<ul>{"".join(f"<li>{sentence}</li>" for sentence in sentences)}</ul></div>'


def learning_section(runs: Sequence[RunData]) -> str:
    reward = "of the sampled completions of each step"
    correct = "share of completions judged correct"
    charts = [
        accuracy_chart(runs, "step", "optimizer step"),
        accuracy_chart(runs, "minutes", "minutes of training"),
        smoothed_chart(runs, "reward_mean", "Reward in training", reward, band=True),
        smoothed_chart(runs, "outcome_mean", "Correct in training", correct, style="percent", y_range=SHARE),
    ]
    return _section("learning", "Learning", _grid(charts, runs))


def straggler_section(runs: Sequence[RunData]) -> str:
    adaptive = [(i, run) for i, run in enumerate(runs) if run.arms]
    deltas = sorted({d for _, run in adaptive for d in run.column("delta")[-1:] if d is not None})
    rules = [Rule(d, f"goal δ = {percent(d)}", "delta") for d in deltas]
    rate = "share of a step's groups whose longest completion is more than τ times the median"
    charts = [
        smoothed_chart(runs, "straggler_rate", "Straggler rate", rate, style="percent", y_range=SHARE, rules=rules),
        group_size_chart(runs),
    ]
    if adaptive:
        charts.append(lambda_chart(adaptive))
        charts += [posterior_chart(i, run) for i, run in adaptive]
    return _section("stragglers", "Stragglers and group size", _grid(charts, runs))


def length_section(runs: Sequence[RunData]) -> str:
    longest = max((v for run in runs for v in run.column("length_max") if v is not None), default=None)
    charts = [length_chart(i, run, longest) for i, run in enumerate(runs) if run.num_steps]
    cut = "share that reached the length limit; their true length is unknown"
    charts.append(smoothed_chart(runs, "clipped_ratio", "Cut completions", cut, style="percent"))
    return _section("lengths", "Completion lengths", _grid(charts, runs))


def time_section(runs: Sequence[RunData]) -> str:
    step = "rollout, rewards, update and checkpoint"
    idle = "share of a lock-step batch that would wait for its longest row; compaction turns this area into saved time"
    tail = "share of engine steps with at most a quarter of the rows live"
    charts = [
        smoothed_chart(runs, "step_seconds", "Seconds per step", step, style="seconds"),
        smoothed_chart(runs, "tokens_per_second", "Rollout speed", "output tokens per second of rollout"),
        smoothed_chart(runs, "idle_fraction", "Idle row-steps", idle, style="percent", y_range=SHARE),
        smoothed_chart(runs, "tail_fraction", "Tail of the rollout", tail, style="percent", y_range=SHARE),
    ]
    return _section("time", "Time", phase_bars(runs) + _grid(charts, runs))


def rollout_section(runs: Sequence[RunData]) -> str:
    figures = "".join(render_timelines(run, i) for i, run in enumerate(runs))
    if not figures:
        return _section("rollouts", "Rollouts", '<p class="empty">No run recorded a rollout timeline.</p>')
    lead = (
        "<p>Each bar is a completion, from the engine step that sampled its first token to the one that sampled its"
        " last; bars of one colour share a prompt. The hatched area is what a batch that waits for its longest row"
        " leaves idle; the strip below counts the rows that were live. Point at a bar, or tap it, to read the"
        " completion.</p>"
    )
    return _section("rollouts", "Rollouts", lead + figures)


def health_section(runs: Sequence[RunData]) -> str:
    wanted = (
        ("entropy", "Entropy", "of the policy, per token, in nats", "number"),
        ("grad_norm", "Gradient norm", "before clipping", "number"),
        ("clip_high_fraction", "Ratios clipped from above", "share of tokens", "percent"),
        ("logprob_diff_max", "Rollout against training", "largest difference of a token's log-probability", "number"),
    )
    charts = [smoothed_chart(runs, name, title, caption, style=style) for name, title, caption, style in wanted]
    return _section("health", "Optimisation", _grid(charts, runs))


def details_section(runs: Sequence[RunData]) -> str:
    return _section("details", "Details", overview.details(runs))


def _section(anchor: str, title: str, body: str) -> str:
    heading = f'<h2 id="{anchor}-title">{title}</h2>'
    return f'<section id="{anchor}" aria-labelledby="{anchor}-title">{heading}{body}</section>'


def _grid(charts: Sequence[Chart], runs: Sequence[RunData]) -> str:
    return f'<div class="grid">{"".join(render_chart(chart, runs) for chart in charts)}</div>'
