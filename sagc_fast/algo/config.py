"""Options of the algorithms and the named sets of them: GRPO, Dr.GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE++.

An algorithm is three records: how advantages are made, which loss is taken, which completions and groups take part. The
names are disjoint, so a configuration gives them flat: ``{"name": "dapo", "clip_high": 0.3}``. docs/algorithms.md says
which public library means the same by which name. Standard library only.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from sagc_fast.errors import ConfigError


def _alternatives(name: object, choices: list[str]) -> str:
    best = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.6)
    return f"one of {', '.join(choices)}" + (f" (did you mean {best[0]}?)" if best else "")


def _choice(record: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(record, name)
    if value not in choices:
        raise ConfigError(f"algo.{name} is {value!r}; it must be {_alternatives(value, list(choices))}.")


def _number(record: object, name: str, lowest: float, allow_infinite: bool = False) -> float:
    value = getattr(record, name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if not is_number or value < lowest or (math.isinf(value) and not allow_infinite):
        wanted = "a number" if lowest == -math.inf else f"a number of at least {lowest:g}"
        raise ConfigError(f"algo.{name} is {value!r}; it must be {wanted}.")
    return value


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """How the rewards of a group become advantages (see advantage.py)."""

    baseline: Literal["mean", "loo"] = "mean"
    """``mean``: the group's mean, the completion itself included; ``loo``: the mean of the others (RLOO)."""
    scale: Literal["std", "batch", "none"] = "std"
    """Divide by the group's standard deviation (GRPO), by that of all centred rewards of the batch (REINFORCE++ with
    a group baseline), or by nothing (Dr.GRPO, RLOO)."""
    eps: float = 1e-4
    """Added to the standard deviation; as in TRL."""
    ddof: int = 1
    """1: divide the squares by n - 1, as torch.std and the libraries do; 0: by n."""
    adv_scale: Literal["none", "loo"] = "none"
    """``loo`` multiplies by n / (n - 1), undoing the shrinkage by (1 - 1/n) of a mean that includes the completion
    itself, so that the size of the gradient does not depend on G (ours)."""
    tolerance: float = 1e-6
    """A group whose rewards span at most this (times the largest magnitude when that is above 1) has no signal:
    its advantages are exactly 0 (ours)."""

    def __post_init__(self) -> None:
        _choice(self, "baseline", ("mean", "loo"))
        _choice(self, "scale", ("std", "batch", "none"))
        _choice(self, "adv_scale", ("none", "loo"))
        _number(self, "eps", 0.0)
        _number(self, "tolerance", 0.0)
        if self.ddof not in (0, 1) or isinstance(self.ddof, bool):
            raise ConfigError(f"algo.ddof is {self.ddof!r}; it must be 0 or 1.")
        if self.baseline == "loo" and self.adv_scale == "loo":
            raise ConfigError(
                "algo.adv_scale is loo with algo.baseline loo, the same correction twice; drop one of them."
            )


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Which policy loss is taken (see loss.py for the formula)."""

    objective: Literal["clip", "cispo"] = "clip"
    """``clip``: PPO's min(r A, clip(r) A); ``cispo``: stop_gradient(clip(r)) A log pi."""
    ratio_level: Literal["token", "sequence"] = "token"
    """r per token, or one r per completion, exp of its mean log-ratio (GSPO)."""
    clip_low: float = 0.2
    """The ratio's lower bound is 1 - clip_low; 1.0 or more is no bound."""
    clip_high: float = 0.2
    """The ratio's upper bound is 1 + clip_high, in CISPO too; inf is no bound."""
    dual_clip: float | None = None
    """c > 1: for A < 0 the objective never falls below c A (dual-clip PPO, arXiv:1912.09729); None is off."""
    aggregation: Literal["sequence", "token", "constant"] = "sequence"
    """``sequence``: mean over a completion's tokens, then over completions; ``token``: over all tokens; ``constant``:
    sum over tokens / (max_length x number of completions)."""
    kl_beta: float = 0.0
    """Weight of the KL penalty to the reference model; 0 needs no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimate of KL(policy || reference): with u = log pi_ref - log pi, k1 is -u, k2 u^2 / 2, k3
    exp(u) - u - 1. As a loss term k1 has no gradient in expectation."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty goes: a term of this loss, or subtracted from the rewards (rewards.py)."""
    entropy_coef: float = 0.0
    """Bonus on the entropy of the policy, aggregated as the policy term."""
    rollout_is: Literal["none", "truncate", "mask"] = "none"
    """Correction of rollout/training mismatch by w = pi_old / pi_rollout on the policy term: ``truncate`` weights by
    min(w, cap); ``mask`` weights by w and drops what lies outside [floor, cap]."""
    rollout_is_cap: float = 2.0
    """Upper limit of ``truncate`` and of ``mask``."""
    rollout_is_floor: float = 0.0
    """Lower limit of ``mask``."""
    rollout_is_level: Literal["token", "sequence"] = "token"
    """w per token, or the product of w over the completion."""

    def __post_init__(self) -> None:
        _choice(self, "objective", ("clip", "cispo"))
        _choice(self, "ratio_level", ("token", "sequence"))
        _choice(self, "aggregation", ("sequence", "token", "constant"))
        _choice(self, "kl_estimator", ("k1", "k2", "k3"))
        _choice(self, "kl_in", ("loss", "reward"))
        _choice(self, "rollout_is", ("none", "truncate", "mask"))
        _choice(self, "rollout_is_level", ("token", "sequence"))
        _number(self, "clip_low", 0.0)
        _number(self, "clip_high", 0.0, allow_infinite=True)
        _number(self, "kl_beta", 0.0)
        _number(self, "entropy_coef", -math.inf)
        _number(self, "rollout_is_floor", 0.0)
        if _number(self, "rollout_is_cap", 0.0) <= self.rollout_is_floor:
            raise ConfigError(
                f"algo.rollout_is_cap is {self.rollout_is_cap!r}; it must lie above rollout_is_floor "
                f"({self.rollout_is_floor!r})."
            )
        if self.dual_clip is not None:
            if _number(self, "dual_clip", 0.0) <= 1.0:
                raise ConfigError(f"algo.dual_clip is {self.dual_clip!r}; it must be above 1, or null for off.")
            if self.objective == "cispo":
                raise ConfigError(
                    "algo.dual_clip is set with the cispo objective, which has no minimum to bound; drop it."
                )

    @property
    def needs_reference(self) -> bool:
        """True when a reference model's log-probs are wanted, for the loss or for the reward."""
        return self.kl_beta > 0.0


@dataclass(frozen=True, slots=True)
class FilterConfig:
    """Which completions and groups take part in an update (see filters.py)."""

    dynamic_sampling: bool = False
    """Keep only groups with 0 < number correct < G, and draw more prompts to replace the others (DAPO)."""
    max_refill_factor: float = 4.0
    """At most this many times the step's prompts are drawn in one step, first draw included (ours)."""
    max_refill_seconds: float = math.inf
    """No further refill is started after this many seconds of the step's rollout (ours)."""
    skip_after: int = 0
    """Pass over a problem for a while after so many completions in a row that were all right or all wrong, over one or
    several groups; 0 is off. It biases what is learnt towards the problems in between (ours)."""
    skip_times: int = 3
    """Draws of such a problem that are passed over before it is tried again (ours)."""
    overlong_cache_fraction: float = 0.0
    """Soft overlong punishment over this last part of the length cap: 0 is off; DAPO's 4,096 of 20,480 is 0.2."""
    mask_truncated: bool = False
    """Leave completions cut at the length cap out of the loss and of the group's statistics."""

    def __post_init__(self) -> None:
        for name in ("dynamic_sampling", "mask_truncated"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"algo.{name} is {getattr(self, name)!r}; it must be true or false.")
        for name, lowest in (("skip_after", 0), ("skip_times", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise ConfigError(f"algo.{name} is {value!r}; it must be a whole number of at least {lowest}.")
        _number(self, "max_refill_factor", 1.0)
        _number(self, "max_refill_seconds", 0.0, allow_infinite=True)
        if _number(self, "overlong_cache_fraction", 0.0) > 1.0:
            raise ConfigError(
                f"algo.overlong_cache_fraction is {self.overlong_cache_fraction!r}; it must lie in [0, 1] (0 is off)."
            )


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A named set of options."""

    name: str
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    filters: FilterConfig = FilterConfig()


GRPO = LossConfig()
DR_GRPO = LossConfig(aggregation="constant")
DAPO = LossConfig(clip_low=0.2, clip_high=0.28, aggregation="token")
GSPO = LossConfig(ratio_level="sequence", clip_low=3e-4, clip_high=4e-4)
CISPO = LossConfig(objective="cispo", clip_low=1.0, clip_high=4.0, aggregation="token")

_UNSCALED = AdvantageConfig(scale="none")
ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        Algorithm("grpo", AdvantageConfig(), GRPO),
        Algorithm("dr_grpo", _UNSCALED, DR_GRPO),
        Algorithm("dapo", AdvantageConfig(), DAPO, FilterConfig(dynamic_sampling=True, overlong_cache_fraction=0.2)),
        Algorithm("gspo", AdvantageConfig(), GSPO),
        Algorithm("cispo", AdvantageConfig(), CISPO),
        Algorithm("rloo", AdvantageConfig(baseline="loo", scale="none"), LossConfig(aggregation="constant")),
        Algorithm("reinforce_pp", AdvantageConfig(scale="batch", eps=1e-8), LossConfig(aggregation="token")),
    )
}


def make_algorithm(options: Mapping[str, Any]) -> Algorithm:
    """The algorithm ``options["name"]`` with the other keys (fields of the three records) put over its own values.

    Raises ConfigError for an unknown name or key (the nearest valid one is named) and for a value out of range.
    """
    given = dict(options)
    name = given.pop("name", "grpo")
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ConfigError(f"algo.name is {name!r}; it must be {_alternatives(str(name), list(ALGORITHMS))}.")
    algorithm = ALGORITHMS[name]
    parts = {"advantage": algorithm.advantage, "loss": algorithm.loss, "filters": algorithm.filters}
    owners = {f.name: part for part, record in parts.items() for f in fields(record)}
    for key in given:
        if key not in owners:
            raise ConfigError(f"algo.{key} is not an option; it must be {_alternatives(key, list(owners))}.")
    changed = {
        part: replace(record, **{k: v for k, v in given.items() if owners[k] == part}) for part, record in parts.items()
    }
    return Algorithm(name, **changed)
