"""Prompt-aware SAGC: a group size per prompt within one step, under one shared straggler budget.

Beyond the paper, which names it as future work (its SAGC is blind to prompt difficulty). A price on stragglers buys
most where prompts differ: the budget goes to prompts that seldom straggle, and they get the large groups.

Model. Globally every candidate c has SAGC's Beta posterior, of mean m_c. A prompt b has a tendency t_b, 1 for the
average prompt, that scales the hazard of straggling at every size alike (for lognormal lengths of different spread this
holds within a tenth or two):

    p_bc ~ Beta(S mu_bc, S (1 - mu_bc))        mu_bc = 1 - (1 - m_c) ** t_b        S = s + groups seen of b
    t_b  = (s + straggling groups of b) / (s + exposure of b)

where a group without straggler adds its hazard -log(1 - m_c) to the exposure, and one with a straggler the mean waiting
time of an event within that hazard: exposure is what an average prompt's number of straggling groups would have been.
A prompt without history is the global arm, and history outweighs it after about s groups; what a prompt shows at one
size counts for all of them. The price lambda is shared and moves with the rate over all groups.

The completions of a prompt are exchangeable, so a group of 16 is also two of 8 and four of 4: every group teaches its
own arm and all smaller ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sagc_fast.controller._twin import beta_variate, median
from sagc_fast.controller.config import SAGCConfig
from sagc_fast.controller.sagc import SAGC
from sagc_fast.errors import ConfigError

PRIOR_STRENGTH = 1.0
"""Groups after which a prompt's own history weighs as much as the global arms (ours; best of 1, 2, 4 in simulation)."""

BUCKET_GAMMA = 0.99
"""Forgetting of a prompt's history per optimizer step: slower than the arms', as a prompt returns seldom (ours)."""


class PromptAwareSAGC(SAGC):
    """``decide_groups(problem_ids)`` gives one group size per prompt; ``decide()`` stays the global one.

    ``observe`` needs ``problem_ids``, one per group in the order of ``lengths``; groups may differ in size. The signal
    is "group" and the ratio a group's own: others have no meaning per prompt (ConfigError). Plain Python: 0.1 ms per
    prompt and step.
    """

    name = "prompt-aware"

    def __init__(self, config: SAGCConfig | None = None, seed: int = 0, *, strength: float = PRIOR_STRENGTH) -> None:
        super().__init__(config, seed, backend="python")
        if self.config.signal != "group" or self.config.ratio != "group":
            raise ConfigError(
                "PromptAwareSAGC judges every prompt by its own group; use signal='group', ratio='group'."
            )
        if not strength > 0:
            raise ConfigError(f"PromptAwareSAGC's strength is {strength!r}; it must be a number of groups > 0.")
        self._strength = strength
        self._buckets: dict[str, dict[str, Any]] = {}

    def decide_groups(self, problem_ids: Sequence[Any]) -> list[int]:
        """Group size of every prompt of the next step. No side effect: the same answer until the next ``observe``."""
        return [self._decide_one(place, str(problem_id)) for place, problem_id in enumerate(problem_ids)]

    def _decide_one(self, place: int, key: str) -> int:
        state, config, bucket = self._core.state, self.config, self._buckets.get(key)
        if bucket is None:
            return self.decide()
        arms = range(
            max(0, bucket["arm"] - config.radius), min(len(config.candidates) - 1, bucket["arm"] + config.radius) + 1
        )
        if state["is_fallback"]:
            return config.candidates[arms[0]]
        fade = BUCKET_GAMMA ** (state["step"] - bucket["step"])
        tendency = (self._strength + fade * bucket["events"]) / (self._strength + fade * bucket["exposure"])
        strength = self._strength + fade * bucket["groups"]
        values = {}
        for i in arms:
            mean = 1.0 - (1.0 - self._global_mean(i)) ** tendency
            stream = (place + 1) * len(config.candidates) + i  # the streams below are the global arms'
            draw = beta_variate(strength * mean, strength * (1.0 - mean), state["step"], stream, self._core.key)
            values[i] = config.utilities[i] - state["lambda"] * draw
        return config.candidates[max(arms, key=values.__getitem__)]

    def _global_mean(self, arm: int) -> float:
        alpha, beta = self._core.state["alpha"][arm], self._core.state["beta"][arm]
        return min(max(alpha / (alpha + beta), 1e-6), 1.0 - 1e-6)

    def observe(
        self,
        lengths: Sequence[Sequence[float]],
        *,
        num_clipped: int | None = None,
        problem_ids: Sequence[Any] | None = None,
        seconds: float | None = None,
        num_steps: int | None = None,
    ) -> None:
        """Learn from one step; see the class. Raises ValueError when problem_ids do not match the groups."""
        if problem_ids is None or len(problem_ids) != len(lengths):
            raise ValueError("PromptAwareSAGC.observe() needs problem_ids, one per group of lengths.")
        groups = [[float(length) for length in group] for group in lengths]
        if any(not 0.0 <= length < float("inf") for group in groups for length in group):
            raise ValueError("observe() got a completion length that is negative, infinite or not a number.")
        core = self._core
        events, trials = core.summarise([length for group in groups for length in group], [g for g in groups if g])
        core.forget()
        for key, group in zip(map(str, problem_ids), groups, strict=True):
            if group:
                self._learn_group(key, group)
        if trials > 0:
            core.price(events / trials, trials)
        self._clipped_ratio = None if num_clipped is None else num_clipped / max(1, sum(map(len, groups)))
        self._settle(core.choose())

    def _learn_group(self, key: str, group: list[float]) -> None:
        """Evidence for the arm of this group's size and for every smaller one, globally and for the prompt."""
        core, sizes = self._core, [size for size in self.config.candidates if size <= len(group)]
        step = core.state["step"]
        bucket = self._buckets.setdefault(key, {"arm": 0, "step": step, "events": 0.0, "exposure": 0.0, "groups": 0.0})
        fade = BUCKET_GAMMA ** (step - bucket["step"])
        for name in ("events", "exposure", "groups"):
            bucket[name] *= fade
        bucket["step"], bucket["arm"] = step, max(len(sizes) - 1, 0)
        for i, size in enumerate(sizes):
            parts = [group[start : start + size] for start in range(0, len(group) - size + 1, size)]
            events = sum(max(part) > self.config.tau * (median(part) or 1.0) for part in parts)
            mean = self._global_mean(i)
            core.credit(i, events, len(parts))
            share = 1.0 / len(sizes)  # the same completions at several sizes are one piece of evidence
            bucket["events"] += share * events
            hazard = -math.log1p(-mean)
            until_event = 1.0 - hazard / math.expm1(hazard)  # mean waiting time of an event known to come before hazard
            bucket["exposure"] += share * (events * until_event + (len(parts) - events) * hazard)
            bucket["groups"] += share * len(parts)

    def observe_counts(self, num_stragglers: int, num_groups: int) -> None:
        """Not for this controller: it learns from every prompt's lengths."""
        raise ValueError("PromptAwareSAGC cannot learn from counts; call observe() with lengths and problem_ids.")

    def state_dict(self) -> dict[str, Any]:
        """SAGC's state and every prompt's history."""
        buckets = {
            key: {name: list(v) if isinstance(v, list) else v for name, v in bucket.items()}
            for key, bucket in self._buckets.items()
        }
        return super().state_dict() | {"buckets": buckets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As SAGC's; raises ConfigError when the prompts' history is missing."""
        if "buckets" not in state:
            raise ConfigError("The controller state lacks buckets; it is not a state_dict of PromptAwareSAGC.")
        super().load_state_dict(state)
        self._buckets = {
            key: {name: list(v) if isinstance(v, list) else v for name, v in bucket.items()}
            for key, bucket in state["buckets"].items()
        }
