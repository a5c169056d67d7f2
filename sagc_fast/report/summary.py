"""What a run achieved and what one run gained over another, in numbers and in sentences computed from them.

Runs are compared at equal optimizer steps (the first N that both have) and, where held-out evaluations allow it, at
equal training time as well; a difference of accuracies is called one only beyond its 95% interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sagc_fast.report.data import RunData
from sagc_fast.report.text import NBSP, compact, duration, escape, percent, sentence_list

Z95 = 1.96
TIE = 0.03
"""Times and tokens closer than this share of each other are called equal: repeats differ by as much."""
MANY_CLIPPED = 0.1
"""From this share of cut completions on, max/median says little (ours)."""
BUSY = 0.2
"""Share of its time off the CPU from which on a run's seconds are those of its neighbours (ours)."""
OFF = 0.1
"""Difference between two runs' ratios of seconds and of CPU seconds that is no noise (ours)."""
PHASES = ("rollout", "reward", "update", "checkpoint", "other")
PHASE_NAMES = {
    "rollout": "rollout",
    "reward": "waiting for rewards",
    "update": "update",
    "checkpoint": "checkpoints",
    "other": "everything else",
}


@dataclass(frozen=True)
class Accuracy:
    """One held-out evaluation."""

    step: float
    value: float
    stderr: float | None
    minutes: float | None
    """Training time at that step."""

    def __str__(self) -> str:
        return percent(self.value) + (f"{NBSP}±{NBSP}{100 * Z95 * self.stderr:.1f}" if self.stderr else "")


@dataclass(frozen=True)
class RunSummary:
    """Totals and means over the first ``num_steps`` steps; None where the run did not record a value."""

    run: RunData
    num_steps: int
    seconds: float | None
    cpu_seconds: float | None
    """Of the training process."""
    phase_seconds: dict[str, float]
    output_tokens: float | None
    tokens_per_second: float | None
    """Output tokens per second of rollout."""
    group_size: float | None
    straggler_rate: float | None
    """Straggling groups of all groups."""
    clipped_ratio: float | None
    idle_fraction: float | None
    length: float | None
    reward_first: float | None
    """Mean reward of the first tenth of the steps."""
    reward_last: float | None
    accuracy_first: Accuracy | None
    accuracy_last: Accuracy | None
    delta: float | None

    @property
    def has_goal(self) -> bool:
        """True when a controller steered the straggler rate towards ``delta``."""
        return self.run.controller in ("sagc", "prompt_aware") and self.delta is not None


def summarize(run: RunData, num_steps: int | None = None) -> RunSummary:
    """Sum up the first ``num_steps`` steps of a run (all by default)."""
    n = run.num_steps if num_steps is None else min(num_steps, run.num_steps)

    def column(name: str) -> list[float]:
        return [v for v in run.column(name)[:n] if v is not None]

    def mean(name: str) -> float | None:
        return sum(column(name)) / len(column(name)) if column(name) else None

    def mean_over_completions(name: str) -> float | None:
        """Steps of larger groups weigh more; runs that did not count their completions get the mean of the steps."""
        counted = zip(run.column(name)[:n], run.column("num_completions_sampled")[:n], strict=True)
        pairs = [(value, count) for value, count in counted if value is not None and count]
        return sum(v * c for v, c in pairs) / sum(c for _, c in pairs) if pairs else mean(name)

    def total(name: str) -> float | None:
        return sum(column(name)) if column(name) else None

    groups, stragglers = total("num_groups"), total("num_straggler_groups")
    tokens, rollout = total("num_output_tokens"), total("rollout_seconds")
    rewards, tenth = column("reward_mean"), max(1, n // 10)
    accuracies = accuracies_until(run, run.steps["step"][n - 1] if n else 0)
    deltas = column("delta")
    return RunSummary(
        run=run,
        num_steps=n,
        seconds=total("step_seconds"),
        cpu_seconds=total("cpu_seconds"),
        phase_seconds=_phases(total),
        output_tokens=tokens,
        tokens_per_second=tokens / rollout if tokens and rollout else None,
        group_size=mean(run.size_column),
        straggler_rate=stragglers / groups if stragglers is not None and groups else mean("straggler_rate"),
        clipped_ratio=mean_over_completions("clipped_ratio"),
        idle_fraction=mean("idle_fraction"),
        length=mean_over_completions("length_mean"),
        reward_first=_mean(rewards[:tenth]),
        reward_last=_mean(rewards[-tenth:]),
        accuracy_first=accuracies[0] if accuracies else None,
        accuracy_last=accuracies[-1] if len(accuracies) > 1 else None,
        delta=deltas[-1] if deltas else None,
    )


def accuracies_until(run: RunData, last_step: float) -> list[Accuracy]:
    """Held-out evaluations up to a step, in order."""
    absent = [None] * len(run.evals["step"])
    columns = [run.evals.get(name, absent) for name in ("step", "accuracy", "accuracy_stderr", "minutes")]
    return [Accuracy(*row) for row in zip(*columns, strict=True) if row[1] is not None and row[0] <= last_step]


def pick_baseline(runs: Sequence[RunData]) -> int:
    """The run that the others are held against: the largest fixed group size, otherwise the first run with steps."""
    fixed = [i for i, run in enumerate(runs) if run.controller == "fixed" and run.num_steps]
    if fixed and len(runs) > 1:
        return max(fixed, key=lambda i: (_mean([g for g in runs[i].column("group_size") if g]) or 0, -i))
    return next(i for i, run in enumerate(runs) if run.num_steps)


def comparisons(runs: Sequence[RunData]) -> list[tuple[int, int]]:
    """(run, baseline) pairs worth words. A run that adapts G is held against the largest fixed G, which it is to beat
    in time, and against the smallest, the honest baseline: at equal prompts most of the saving is fewer completions.
    """
    base = pick_baseline(runs)
    whole = [i for i, run in enumerate(runs) if run.num_steps]
    adaptive = [i for i in whole if runs[i].adapts]
    fixed = [i for i in whole if runs[i].controller == "fixed"]
    if not adaptive or not fixed:
        return [(i, base) for i in whole if i != base]
    smallest = min(fixed, key=lambda i: _mean([g for g in runs[i].column("group_size") if g]) or 0)
    return [(i, against) for i in adaptive for against in dict.fromkeys((base, smallest))]


def comparison_sentences(run: RunData, baseline: RunData) -> list[str]:
    """What ``run`` gained over ``baseline``; HTML, names in bold."""
    n = min(run.num_steps, baseline.num_steps)
    ours, theirs = summarize(run, n), summarize(baseline, n)
    name, other = _bold(run), _bold(baseline)
    sentences = [
        _time_sentence(ours, theirs, name, other),
        _reason_sentence(ours, theirs, name),
        _straggler_sentence(ours, theirs, name, other),
        _accuracy_sentence(ours, theirs, name, other),
        _equal_time_sentence(run, baseline, name, other),
    ]
    return [sentence for sentence in sentences if sentence]


def single_sentences(run: RunData) -> list[str]:
    """What one run did from its beginning to its end; HTML."""
    whole = summarize(run)
    name = _bold(run)
    sentences = []
    took = f" and {duration(whole.seconds)} of training" if whole.seconds else ""
    if whole.accuracy_first and whole.accuracy_last:
        change = _change(whole.accuracy_last, whole.accuracy_first)
        verb = {1: "rose", -1: "fell", 0: "did not change measurably: it went"}[change]
        sentences.append(
            f"Held-out accuracy of {name} {verb} from {whole.accuracy_first} to {whole.accuracy_last} in"
            f" {steps(whole.num_steps)}{took}."
        )
    elif whole.reward_first is not None:
        course = f"went from {compact(whole.reward_first)} to {compact(whole.reward_last)} (first and last tenth)"
        reward = f"was {compact(whole.reward_last)}" if whole.num_steps == 1 else course
        sentences.append(
            f"{name} took {steps(whole.num_steps)}{took}; its mean reward {reward}. It holds no pair of held-out"
            " evaluations."
        )
    if whole.straggler_rate is not None:
        goal = f", against a goal of {percent(whole.delta)}" if whole.has_goal else ""
        size = f" at a mean group size of {compact(whole.group_size)}" if whole.group_size else ""
        sentences.append(f"{percent(whole.straggler_rate)} of its groups straggled{goal}{size}.")
    if whole.tokens_per_second and whole.idle_fraction is not None:
        sentences.append(
            f"It sampled {compact(whole.output_tokens)} tokens at {compact(whole.tokens_per_second)} per second of"
            f" rollout; a lock-step batch would have left {percent(whole.idle_fraction)} of its row-steps idle."
        )
    return sentences


def warnings(run: RunData) -> list[str]:
    """What a reader must know before trusting the figures of a run; plain text."""
    notes = list(run.problems)
    whole = summarize(run)
    if whole.clipped_ratio is not None and whole.clipped_ratio >= MANY_CLIPPED:
        notes.append(
            f"{percent(whole.clipped_ratio)} of the completions were cut at the length limit, which hides their true"
            " lengths: the straggler rate is then too low"
        )
    skipped = sum(v or 0 for v in run.column("is_skipped"))
    if skipped:
        notes.append(f"{skipped:.0f} of {run.num_steps} updates were skipped")
    errors = sum(v or 0 for v in run.column("num_reward_errors"))
    if errors:
        notes.append(f"{errors:,.0f} completions could not be scored and count as reward 0")
    waiting = _waiting_share(run)
    if waiting is not None and waiting > BUSY:
        notes.append(
            f"for {percent(waiting)} of the rollout and update time the process did not run: other work kept the"
            " machine busy, so compare tokens and rates rather than seconds"
        )
    if run.num_steps and not accuracies_until(run, math.inf):
        notes.append("no held-out evaluation is recorded, so rewards are those of the training prompts only")
    return notes


def _waiting_share(run: RunData) -> float | None:
    """Share of rollout and update spent off the CPU; None on a GPU or without a record of CPU seconds."""
    wall = sum(v or 0 for phase in ("rollout", "update") for v in run.column(f"{phase}_seconds"))
    cpu = sum(v or 0 for v in run.column("cpu_seconds"))
    model = run.config.get("model")
    on_cpu = not isinstance(model, dict) or str(model.get("device", "cpu")) == "cpu"
    return 1 - cpu / wall if cpu and wall and on_cpu else None


def time_ratio(ours: RunSummary, theirs: RunSummary) -> float | None:
    """How many times as long the other run took; above 1 means ours is faster."""
    return theirs.seconds / ours.seconds if ours.seconds and theirs.seconds else None


def is_by_neighbours(ours: RunSummary, theirs: RunSummary) -> bool:
    """Whether the ratio of two runs' times is that of how busy the machine was: off the ratio of their CPU seconds by
    more than a tenth, and the process of one of them waited for a CPU."""
    ratio = time_ratio(ours, theirs)
    if ratio is None or not ours.cpu_seconds or not theirs.cpu_seconds:
        return False
    is_busy = any((_waiting_share(whole.run) or 0) > BUSY for whole in (ours, theirs))
    return is_busy and abs(math.log(ratio * ours.cpu_seconds / theirs.cpu_seconds)) > OFF


def _time_sentence(ours: RunSummary, theirs: RunSummary, name: str, other: str) -> str:
    ratio = time_ratio(ours, theirs)
    if ratio is None:
        return ""
    if is_by_neighbours(ours, theirs):
        more = theirs.cpu_seconds / ours.cpu_seconds
        return (
            f"{other} took {more:.2f} times the CPU seconds of {name} for {steps(ours.num_steps)} of training"
            f" ({theirs.cpu_seconds:.1f} against {ours.cpu_seconds:.1f}); by the clock"
            f" {duration(theirs.seconds)} against {duration(ours.seconds)}, but other work kept the machine busy."
        )
    times = f"({duration(ours.seconds)} against {duration(theirs.seconds)} of training)"
    if abs(math.log(ratio)) < TIE:
        return f"{name} and {other} took the same time for {steps(ours.num_steps)} {times}."
    if ratio > 1:
        return f"{name} finished {steps(ours.num_steps)} {ratio:.2f} times as fast as {other} {times}."
    return f"{name} took {1 / ratio:.2f} times as long as {other} for {steps(ours.num_steps)} {times}."


def _reason_sentence(ours: RunSummary, theirs: RunSummary, name: str) -> str:
    ratio = time_ratio(ours, theirs)
    if is_by_neighbours(ours, theirs):
        ratio = theirs.cpu_seconds / ours.cpu_seconds
    if ratio is None or not ours.output_tokens or not theirs.output_tokens:
        return ""
    tokens = theirs.output_tokens / ours.output_tokens
    counts = f"({compact(ours.output_tokens)} against {compact(theirs.output_tokens)})"
    if abs(math.log(tokens)) < TIE:
        return f"Both sampled about as many output tokens {counts}, so the difference is time per token."
    fewer = f"{percent(1 - 1 / tokens)} fewer" if tokens > 1 else f"{percent(1 / tokens - 1)} more"
    per_token = tokens / ratio
    pace = "about the same time" if abs(math.log(per_token)) < TIE else f"{per_token:.2f} times the time"
    return f"{name} sampled {fewer} output tokens {counts}, each in {pace}."


def _straggler_sentence(ours: RunSummary, theirs: RunSummary, name: str, other: str) -> str:
    if ours.straggler_rate is None or theirs.straggler_rate is None:
        return ""
    goal = f"; the goal of {name} was {percent(ours.delta)}" if ours.has_goal else ""
    sizes = ""
    if ours.group_size and theirs.group_size:
        sizes = f", at mean group sizes of {compact(ours.group_size)} and {compact(theirs.group_size)}"
    return (
        f"{percent(ours.straggler_rate)} of the groups of {name} straggled and {percent(theirs.straggler_rate)} of"
        f" those of {other}{sizes}{goal}."
    )


def _accuracy_sentence(ours: RunSummary, theirs: RunSummary, name: str, other: str) -> str:
    if not (ours.accuracy_last and theirs.accuracy_last):
        return ""
    gains = [
        f"{label} went from {s.accuracy_first} to {s.accuracy_last} (step {s.accuracy_last.step:.0f})"
        for label, s in ((name, ours), (other, theirs))
    ]
    verdict = {
        1: f"{name} ended higher",
        -1: f"{name} ended lower",
        0: "the two ends do not differ beyond the noise of the evaluation",
    }[_change(ours.accuracy_last, theirs.accuracy_last)]
    return f"Held-out accuracy: {sentence_list(gains)}; {verdict}."


def _equal_time_sentence(run: RunData, baseline: RunData, name: str, other: str) -> str:
    """Where the slower of the two stood when the faster one had finished the steps that both have."""
    timed = [[a for a in accuracies_until(r, math.inf) if a.minutes is not None] for r in (run, baseline)]
    if not all(timed):
        return ""
    limit = min(accuracies[-1].minutes for accuracies in timed)
    ours, theirs = ([a for a in accuracies if a.minutes <= limit + 1e-9] for accuracies in timed)
    if limit <= 0 or len(ours) < 2 or len(theirs) < 2:
        return ""
    return (
        f"At equal training time ({duration(60 * limit)}), the last evaluation of {name} is {ours[-1]} (step"
        f" {ours[-1].step:.0f}), that of {other} {theirs[-1]} (step {theirs[-1].step:.0f})."
    )


def _change(new: Accuracy, old: Accuracy) -> int:
    """1 or -1 for a difference beyond its 95% interval, otherwise 0; without standard errors any difference counts."""
    noise = Z95 * math.hypot(new.stderr or 0.0, old.stderr or 0.0)
    difference = new.value - old.value
    return 0 if abs(difference) <= noise else int(math.copysign(1, difference))


def _phases(total: Callable[[str], float | None]) -> dict[str, float]:
    seconds = {phase: total(f"{phase}_seconds") or 0.0 for phase in PHASES[:-1]}
    seconds["other"] = max(0.0, (total("step_seconds") or 0.0) - sum(seconds.values()))
    return seconds


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def steps(count: int) -> str:
    """The number with its noun."""
    return "1 step" if count == 1 else f"{count} steps"


def _bold(run: RunData) -> str:
    return f"<b>{escape(run.name)}</b>"
