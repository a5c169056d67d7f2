"""Where completion lengths come from in a simulation: synthetic length processes, and recorded traces.

A process is asked for the lengths of some problems' groups at a moment of the run (``progress`` in [0, 1)). Lengths are
whole tokens, at least 1, cut at ``cap``. None of the families is from the paper; all parameters are ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np

from sagc_fast.errors import ConfigError, DatasetError

LONGEST = 2**31 - 1
"""Tokens of the longest completion: a bound no model reaches, below which the sums of a step stay exact."""

MAX_PROBLEMS = 10_000_000


@dataclass(frozen=True, slots=True)
class LengthProcess:
    """Lognormal lengths whose median and spread may depend on the problem and on the moment; the parent of the rest."""

    median: float = 200.0
    """Median length in tokens."""
    sigma: float = 0.6
    """Standard deviation of log length within a group."""
    cap: float = 4096.0
    """Longest possible completion (max_new_tokens), where lengths are cut; may be infinite ("inf")."""
    num_problems: int = 512
    """Size of the pool that prompts are drawn from."""
    changes: ClassVar[bool] = False
    """Whether lengths depend on the moment of the run."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not value > 0 or (value == math.inf and item.name != "cap"):
                wanted = "> 0" if item.name == "cap" else "a finite number > 0"
                raise ConfigError(
                    f"Length process {type(self).__name__}: {item.name} is {value!r}; it must be {wanted}."
                )
        if self.num_problems > MAX_PROBLEMS:
            raise ConfigError(
                f"Length process {type(self).__name__}: num_problems is {self.num_problems}; it must be at most "
                f"{MAX_PROBLEMS:,}."
            )

    def sample(self, rng: np.random.Generator, progress: float, problem_ids: np.ndarray, group_size: int) -> np.ndarray:
        """Lengths int64 [len(problem_ids), group_size]."""
        with np.errstate(over="ignore", invalid="ignore"):  # a spread beyond floats ends at the cap
            lengths = np.ceil(self._draw(rng, progress, problem_ids, group_size))
        return np.fmax(np.fmin(lengths, min(self.cap, LONGEST)), 1).astype(np.int64)

    def _draw(self, rng: np.random.Generator, progress: float, problem_ids: np.ndarray, group_size: int) -> np.ndarray:
        return self.median * np.exp(self.sigma * rng.standard_normal((len(problem_ids), group_size)))


@dataclass(frozen=True, slots=True)
class Pareto(LengthProcess):
    """A tail without scale: P(length > x) = (x_min / x) ** alpha."""

    alpha: float = 1.5
    """Tail exponent; below 2 the variance is infinite."""

    def _draw(self, rng: np.random.Generator, progress: float, problem_ids: np.ndarray, group_size: int) -> np.ndarray:
        shortest = self.median / np.exp2(1.0 / self.alpha)
        return shortest * (1.0 + rng.pareto(self.alpha, (len(problem_ids), group_size)))


@dataclass(frozen=True, slots=True)
class Mixture(LengthProcess):
    """Two ways to answer: a direct one around ``median`` and, with probability ``share``, a long one round ``long``."""

    long: float = 1500.0
    """Median length of a long answer, tokens."""
    share: float = 0.1
    """Probability of one, at most 1."""

    def __post_init__(self) -> None:
        LengthProcess.__post_init__(self)
        if self.share > 1.0:
            raise ConfigError(f"Length process Mixture: share is {self.share!r}; it must be a probability.")

    def _draw(self, rng: np.random.Generator, progress: float, problem_ids: np.ndarray, group_size: int) -> np.ndarray:
        shape = (len(problem_ids), group_size)
        centre = np.where(rng.random(shape) < self.share, self.long, self.median)
        return centre * np.exp(self.sigma * rng.standard_normal(shape))


@dataclass(frozen=True, slots=True)
class Drift(LengthProcess):
    """Median and sigma move to ``to_median`` and ``to_sigma`` over the run, the median geometrically."""

    changes: ClassVar[bool] = True
    to_median: float = 600.0
    to_sigma: float = 1.0

    def _draw(self, rng: np.random.Generator, progress: float, problem_ids: np.ndarray, group_size: int) -> np.ndarray:
        median = self.median * (self.to_median / self.median) ** progress
        sigma = self.sigma + (self.to_sigma - self.sigma) * progress
        return median * np.exp(sigma * rng.standard_normal((len(problem_ids), group_size)))


@dataclass(frozen=True, slots=True)
class Shock(LengthProcess):
    """Median and sigma jump to ``to_median`` and ``to_sigma`` after the share ``at`` of the run."""

    changes: ClassVar[bool] = True
    to_median: float = 200.0
    to_sigma: float = 1.0
    at: float = 0.5

    def _draw(self, rng: np.random.Generator, progress: float, problem_ids: np.ndarray, group_size: int) -> np.ndarray:
        is_after = progress >= self.at
        median, sigma = (self.to_median, self.to_sigma) if is_after else (self.median, self.sigma)
        return median * np.exp(sigma * rng.standard_normal((len(problem_ids), group_size)))


@dataclass(frozen=True, slots=True)
class Difficulty(LengthProcess):
    """Every problem has its own median and its own sigma: some never straggle, some nearly always do."""

    spread_median: float = 0.5
    """Standard deviation of log median over problems."""
    spread_sigma: float = 0.4
    """Standard deviation of log sigma over problems."""
    seed: int = 1
    """Which pool of problems."""

    def _draw(self, rng: np.random.Generator, progress: float, problem_ids: np.ndarray, group_size: int) -> np.ndarray:
        pool_2P = _problem_pool(int(self.seed), int(self.num_problems))
        medians = self.median * np.exp(self.spread_median * pool_2P[0, problem_ids])
        sigmas = self.sigma * np.exp(self.spread_sigma * pool_2P[1, problem_ids])
        noise = rng.standard_normal((len(problem_ids), group_size))
        return medians[:, None] * np.exp(sigmas[:, None] * noise)


@lru_cache(maxsize=8)
def _problem_pool(seed: int, num_problems: int) -> np.ndarray:
    """Standard normal [2, num_problems]: every problem's place in the spread of medians and of sigmas."""
    return np.random.default_rng(seed).standard_normal((2, num_problems))


PROCESSES: dict[str, Callable[..., LengthProcess]] = {
    "lognormal": LengthProcess,
    "pareto": Pareto,
    "mixture": Mixture,
    "drift": Drift,
    "shock": Shock,
    "difficulty": Difficulty,
}


def parse_process(spec: str) -> LengthProcess | Trace:
    """``name:key=value,...`` (see PROCESSES and their fields), or the path of a recorded trace. Raises ConfigError."""
    name, _, options = spec.partition(":")
    if name not in PROCESSES:
        if Path(spec).suffix == ".jsonl" or Path(spec).exists():
            return read_trace(spec)
        known = ", ".join(PROCESSES)
        raise ConfigError(f"Length process {spec!r} is neither a trace file nor one of {known}.")
    known_fields = {item.name for item in fields(PROCESSES[name])}  # type: ignore[arg-type]
    values: dict[str, float] = {}
    for option in filter(None, options.split(",")):
        key, _, text = option.partition("=")
        if key not in known_fields:
            raise ConfigError(
                f"Length process {name!r} has no parameter {key!r}; it has {', '.join(sorted(known_fields))}."
            )
        try:
            values[key] = int(text) if key in ("num_problems", "seed") else float(text)
        except ValueError as error:
            raise ConfigError(f"Length process {name!r}: {key} is {text!r}; it must be a number.") from error
    return PROCESSES[name](**values)


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded lengths, replayed: at each moment groups are drawn from the recorded step of that moment.

    A group of G is a random part of a recorded group that has at least G completions, which is exact. A larger G than
    any recorded group of the step is drawn with replacement: its maximum, and so its straggler rate, is too low.
    """

    changes: ClassVar[bool] = True
    steps: tuple[tuple[tuple[int, ...], ...], ...]
    """Lengths by step and group."""
    cap: float = math.inf
    """Largest recorded max_new_tokens."""
    num_problems: int = field(default=1)
    """Groups of the largest step: the replay draws group places, not problems."""

    @property
    def largest_group(self) -> int:
        return max(len(group) for step in self.steps for group in step)

    def sample(self, rng: np.random.Generator, progress: float, problem_ids: np.ndarray, group_size: int) -> np.ndarray:
        """Lengths int64 [len(problem_ids), group_size]; ``problem_ids`` pick groups, modulo their number."""
        step = self.steps[min(int(progress * len(self.steps)), len(self.steps) - 1)]
        large = [group for group in step if len(group) >= group_size] or list(step)
        picked = [large[int(index) % len(large)] for index in problem_ids]
        if len({len(group) for group in picked}) == 1 and len(picked[0]) >= group_size:
            order = rng.random((len(picked), len(picked[0]))).argsort(axis=1)[:, :group_size]
            return np.take_along_axis(np.array(picked, dtype=np.int64), order, axis=1)
        return np.array([rng.choice(g, group_size, replace=len(g) < group_size) for g in picked], dtype=np.int64)


def read_trace(path: str | Path) -> Trace:
    """Read a lengths.jsonl as ``sagc-fast train`` writes it: {"lengths": [[...] per group], "max_new_tokens": ...}.

    Raises DatasetError naming file and line.
    """
    path = Path(path)
    if path.is_dir():
        raise DatasetError(f"The trace {path} is a folder; give the file in a run's folder: {path / 'lengths.jsonl'}.")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise DatasetError(f"The trace {path} is not text in UTF-8; give the lengths.jsonl of a run.") from None
    except OSError as error:
        reason = error.strerror or error
        raise DatasetError(f"The trace {path} cannot be read: {reason}; give the lengths.jsonl of a run.") from error
    steps, caps = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"a {type(record).__name__} is no object")
            cap = float(record.get("max_new_tokens") or math.inf)
            groups = tuple(tuple(_checked_length(length) for length in group) for group in record["lengths"] if group)
        except (ValueError, TypeError, KeyError) as error:
            problem = {KeyError: "no lengths", TypeError: "its values are of the wrong kind"}.get(type(error), error)
            raise DatasetError(
                f'{path}, line {number}, is not a step of a trace ({problem}); wanted {{"lengths": [[12, 30], ...]}}.'
            ) from error
        caps.append(cap)
        if groups:
            steps.append(groups)
    if not steps:
        raise DatasetError(f"The trace {path} holds no step with lengths; give the lengths.jsonl of a run.")
    return replace(Trace(tuple(steps)), cap=max(caps), num_problems=max(map(len, steps)))


def _checked_length(length: object) -> int:
    if isinstance(length, bool) or not isinstance(length, (int, float)) or not 0 <= length <= LONGEST:
        raise ValueError(f"length {length!r}")
    return int(length)
