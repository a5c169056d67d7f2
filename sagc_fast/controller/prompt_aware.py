"""Prompt-aware SAGC: a group size per prompt within one step, under one shared straggler budget.

Beyond the paper, which names it as future work (its SAGC is blind to prompt difficulty). A price on stragglers buys most
where prompts differ: the budget goes to prompts that seldom straggle, and they get the large groups.

Model, per prompt b (a problem id, or any bucket key that callers make of it) and candidate c:

    p_bc ~ Beta(s m_c + k_bc, s (1 - m_c) + n_bc - k_bc)        m_c: global posterior mean, s: prior strength in groups

so a prompt without history is the global arm, and history outweighs it after about s groups. Two sources of evidence:
the group itself, and the groups inside it: completions of one prompt are exchangeable, so a group of 16 is also four
groups of 4, and every step teaches all smaller arms. The price lambda is shared and moved by the rate over all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sagc_fast.controller._twin import beta_variate, median
from sagc_fast.controller.config import SAGCConfig
from sagc_fast.controller.sagc import SAGC
from sagc_fast.errors import ConfigError

PRIOR_STRENGTH = 4.0
"""Groups of its own that a prompt needs before its history weighs as much as the global arm (ours)."""

BUCKET_GAMMA = 0.99
"""Forgetting of a prompt's history per optimizer step: slower than the arms', a prompt returns only now and then (ours)."""


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
            raise ConfigError("PromptAwareSAGC judges every prompt by its own group; use signal='group', ratio='group'.")
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
        values = {}
        for i in arms:
            mean = state["alpha"][i] / (state["alpha"][i] + state["beta"][i])
            events, trials = bucket["events"][i] * fade, bucket["trials"][i] * fade
            alpha, beta = self._strength * mean + events, self._strength * (1.0 - mean) + trials - events
            stream = (place + 1) * len(config.candidates) + i  # the streams below are the global arms'
            values[i] = config.utilities[i] - state["lambda"] * beta_variate(
                alpha, beta, state["step"], stream, self._core.key
            )
        return config.candidates[max(arms, key=values.__getitem__)]

    def observe(
        self,
        lengths: Sequence[Sequence[float]],
        *,
        num_clipped: int | None = None,
        problem_ids: Sequence[Any] | None = None,
        seconds: float | None = None,
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
        core, sizes, step = self._core, self.config.candidates, self._core.state["step"]
        bucket = self._buckets.setdefault(
            key, {"arm": 0, "step": step, "events": [0.0] * len(sizes), "trials": [0.0] * len(sizes)}
        )
        fade = BUCKET_GAMMA ** (step - bucket["step"])
        bucket["step"] = step
        bucket["arm"] = max((i for i, size in enumerate(sizes) if size <= len(group)), default=0)
        for i, size in enumerate(sizes):
            parts = [group[start : start + size] for start in range(0, len(group) - size + 1, size)]
            events = sum(max(part) > self.config.tau * (median(part) or 1.0) for part in parts)
            core.credit(i, events, len(parts))
            bucket["events"][i] = bucket["events"][i] * fade + events
            bucket["trials"][i] = bucket["trials"][i] * fade + len(parts)

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
