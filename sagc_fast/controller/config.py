"""SAGCConfig: every number of the controller, checked when it is made.

"paper" below is "Faster Synchronous On-Policy RL via Straggler-Aware Group Sizing" (arXiv:2606.02218). It states the
rules but none of the values, so every default is ours unless it says otherwise.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from sagc_fast.controller._layout import RATIOS, SIGNALS
from sagc_fast.controller.hold import ADV_SCALES, HOLDS
from sagc_fast.errors import ConfigError

MAX_GROUP_SIZE = 65_536
"""Far beyond any use (ours), and within what counts and memory bear."""


class ControllerWarning(UserWarning):
    """The controller works, but not as its user will expect; the message says why and what to change."""


class DeltaOutOfReachWarning(ControllerWarning):
    """Even the smallest candidate straggles more often than ``delta`` allows.

    Args:
        delta: straggler rate to hold.
        group_size: the smallest candidate.
        rate: its straggler rate as the posterior has it, mean and 90% interval in ``low`` and ``high``.
    """

    def __init__(self, delta: float, group_size: int, rate: float, low: float, high: float) -> None:
        self.delta, self.group_size, self.rate = delta, group_size, rate
        super().__init__(self.sentence(f"{rate:.0%} of its groups (90% interval {low:.0%} to {high:.0%})"))

    def sentence(self, share: str) -> str:
        """The message, ``share`` saying in how many of its groups the smallest candidate straggles."""
        return (
            f"delta={self.delta:g} is out of reach: even G={self.group_size} straggles in {share}, so "
            f"G={self.group_size} is held; raise delta or tau, or add a smaller candidate."
        )


@dataclass(frozen=True, slots=True)
class SAGCConfig:
    """What the controller may choose from, what it must keep, and how fast it learns.

    Raises ConfigError for a value that cannot be used; warns (ControllerWarning) about an arm that can never straggle.
    """

    candidates: tuple[int, ...] = (4, 8, 16)
    """Group sizes to choose from, strictly increasing integers >= 2. Paper: its static baselines are 4, 8 and 16."""
    tau: float = 2.0
    """A group straggles when its longest completion exceeds ``tau`` times its median one; > 1. Ours."""
    delta: float = 0.25
    """Long-run share of straggling groups to hold, in (0, 1). Ours."""
    eta: float = 2.0
    """Dual step: lambda moves by ``eta * (straggler rate - delta)`` per step. Ours: lambda must reach 1 / (p_2G - p_G),
    which is 2 to 15, while a training run has a few hundred steps; docs/controller.md derives the value."""
    gamma: float = 0.97
    """Forgetting per step, in (0, 1]: 0.97 remembers about 33 steps. Paper: a forgetting factor; ours: its value, and
    that evidence decays towards the prior in every arm."""
    prior_alpha: float = 1.0
    """Straggling groups that the prior of every arm pretends to have seen; > 0. Ours: uniform, Beta(1, 1)."""
    prior_beta: float = 1.0
    """Groups without straggler that the prior of every arm pretends to have seen; > 0. Ours."""
    lambda_0: float = 0.0
    """Price of a straggler at the start, in units of log2 G; within [0, lambda_max]. Ours."""
    lambda_max: float = 20.0
    """Bound of lambda; at the bound the smallest arm is held (see ``fallback``). Ours."""
    radius: int = 1
    """How many places of the candidate list one step may move. Paper: a neighbourhood of the present G; ours: 1."""
    dwell: int = 1
    """Steps an arm is kept at least; 5 calms Thompson's flips. The dual step is divided by its square root, so that
    the noise lambda gathers between two choices stays the same. Ours: 1, no constraint."""
    start: int | None = None
    """Group size of the first step, one of the candidates; None is the smallest: cheapest, and the way up shows the
    controller every arm. Ours."""
    signal: str = "group"
    """What counts as the event. "group": k straggling of n groups give (k, n - k) to the posterior and k / n to the
    dual; "any": one bit per step, any group straggled; "batch": one bit per step, max and median over all completions.
    Paper: the event of a group; ours: k of n."""
    ratio: str = "group"
    """"group": a group's maximum over its own median (paper). "reference": over a median of all completions smoothed
    over steps (beyond the paper): takes the small-G artefact away."""
    fallback: bool = True
    """Hold the smallest arm, and stop winding lambda up, while delta is out of its reach. Ours; False is the paper's
    plain rule."""
    hold: str = "prompts"
    """What stays constant when G changes: "prompts" per step (the only reading that gives the paper's saving),
    "completions" or "tokens"; read by ``SAGC.num_prompts``. Ours."""
    adv_scale: str = "none"
    """"loo": advantages times G / (G - 1), so that the gradient's scale does not depend on G (recommended where the
    group mean includes the sample itself); "none": as in the algorithm. Read by ``SAGC.advantage_scale``. Ours."""
    max_length: int | None = None
    """Length cap in tokens, to report the share of completions cut at it. Ours: None, only what ``observe`` is told."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", _checked_candidates(self.candidates))
        _check_numbers(self)
        _check_choices(self)
        blind = [size for size in self.candidates if size == 2]
        if blind and self.tau >= 2.0 and self.ratio == "group":
            warnings.warn(
                f"SAGCConfig.candidates contains 2 and tau is {self.tau:g}: the longest of two completions is never "
                'more than twice their median, so G=2 cannot straggle; use ratio="reference" or tau below 2.',
                ControllerWarning,
                stacklevel=4,
            )

    @property
    def utilities(self) -> tuple[float, ...]:
        """u(G) = log2 G of every candidate (paper)."""
        return tuple(math.log2(size) for size in self.candidates)

    @property
    def dual_step(self) -> float:
        """``eta`` for steps of which ``dwell`` make one choice."""
        return self.eta / math.sqrt(self.dwell)

    @property
    def start_arm(self) -> int:
        """Place of the first step's group size among the candidates."""
        return 0 if self.start is None else self.candidates.index(self.start)


def _checked_candidates(value: object) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or len(value) == 0:
        raise ConfigError(f"SAGCConfig.candidates is {value!r}; it must be a list of group sizes such as (4, 8, 16).")
    for size in value:
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise ConfigError(f"SAGCConfig.candidates contains {size!r}; every group size must be an integer >= 2.")
        if size < 2:
            raise ConfigError(
                f"SAGCConfig.candidates contains {size}; a group of fewer than 2 completions has no group advantage, "
                "so use sizes >= 2."
            )
        if size > MAX_GROUP_SIZE:
            raise ConfigError(
                f"SAGCConfig.candidates contains {size}; the largest group that can be asked for is {MAX_GROUP_SIZE:,}."
            )
    sizes = tuple(int(size) for size in value)
    if len(set(sizes)) != len(sizes):
        raise ConfigError(f"SAGCConfig.candidates {sizes} names a group size twice; list each size once.")
    if list(sizes) != sorted(sizes):
        raise ConfigError(f"SAGCConfig.candidates {sizes} is not sorted; list the sizes from small to large.")
    return sizes


def _check_numbers(config: SAGCConfig) -> None:
    for name in ("tau", "delta", "eta", "gamma", "prior_alpha", "prior_beta", "lambda_max", "lambda_0"):
        _require(config, name, _is_number(getattr(config, name)), "a finite number")
    _require(config, "tau", config.tau > 1, "a number > 1")
    _require(config, "delta", 0 < config.delta < 1, "a number strictly between 0 and 1")
    _require(config, "gamma", 0 < config.gamma <= 1, "a number in (0, 1]")
    for name in ("eta", "prior_alpha", "prior_beta", "lambda_max"):
        _require(config, name, getattr(config, name) > 0, "a number > 0")
    in_range = 0 <= config.lambda_0 <= config.lambda_max
    _require(config, "lambda_0", in_range, f"a number between 0 and lambda_max={config.lambda_max!r}")
    for name in ("radius", "dwell"):
        _require(config, name, _is_count(getattr(config, name)), "an integer >= 1")
    _require(config, "max_length", config.max_length is None or _is_count(config.max_length), "an integer >= 1 or None")


def _require(config: SAGCConfig, name: str, is_met: bool, wanted: str) -> None:
    if not is_met:
        raise ConfigError(f"SAGCConfig.{name} is {getattr(config, name)!r}; it must be {wanted}.")


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_choices(config: SAGCConfig) -> None:
    for name, allowed in (("signal", SIGNALS), ("ratio", RATIOS), ("hold", HOLDS), ("adv_scale", ADV_SCALES)):
        _require(config, name, getattr(config, name) in allowed, f"one of {', '.join(map(repr, allowed))}")
    _require(config, "fallback", isinstance(config.fallback, bool), "true or false")
    is_known = config.start is None or config.start in config.candidates
    _require(config, "start", is_known, f"None or one of the candidates {config.candidates}")
