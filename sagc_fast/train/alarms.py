"""Says loudly, once per cause, when a run cannot be learning, with the likely reason and what to do about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

PATIENCE = 3
"""Steps in a row without any learning signal before the alarm: one alone happens by chance with few prompts (ours)."""
MOSTLY = 0.95
"""Share of completions that counts as all of them in a diagnosis (ours)."""


class Alarms:
    """Watches the step records.

    Args:
        logprob_limit: mean absolute difference of rollout and training log-probs that is too much.
        state: from :meth:`state_dict`, so that a resumed run does not repeat itself.
    """

    def __init__(self, logprob_limit: float, state: Mapping[str, Any] | None = None) -> None:
        self.logprob_limit = logprob_limit
        state = state or {}
        self._raised: set[str] = set(state.get("raised", ()))
        self._steps_without_signal = int(state.get("steps_without_signal", 0))

    def check(self, record: Mapping[str, Any], num_informative_groups: int, example_error: str | None) -> None:
        """Look at one step's record (see the schema of metrics.jsonl).

        ``num_informative_groups``: groups whose completions differ in reward. ``example_error``: one scorer's error.
        """
        num_completions = record["num_completions_sampled"]
        if num_completions and record["num_reward_errors"] == num_completions:
            self._raise(
                "scorer",
                f"every completion's scorer failed ({example_error}): there is no reward to learn from; "
                "run the scorer by hand on one completion and check task.reward and its kwargs",
            )
        self._steps_without_signal = 0 if num_informative_groups else self._steps_without_signal + 1
        if self._steps_without_signal >= PATIENCE:
            cause, text = diagnose(record)
            self._raise(f"no signal: {cause}", f"no learning signal for {self._steps_without_signal} steps: {text}")
        difference = record.get("logprob_diff_mean")
        if difference is not None and difference > self.logprob_limit:
            self._raise(
                "logprobs",
                f"rollout and training log-probs differ by {difference:.3g} per token (limit {self.logprob_limit:g}): "
                "the policy is trained on another distribution than it samples; set update.old_logprobs to recompute, "
                "model.dtype to fp32, or report a fault of a fast path (SAGC_BACKEND=torch turns them off)",
            )

    def _raise(self, cause: str, text: str) -> None:
        if cause not in self._raised:
            self._raised.add(cause)
            logger.error("ALARM: %s", text)

    def state_dict(self) -> dict[str, Any]:
        return {"raised": sorted(self._raised), "steps_without_signal": self._steps_without_signal}


def diagnose(record: Mapping[str, Any]) -> tuple[str, str]:
    """(short name, sentence) of the likeliest reason that every group's completions got the same reward."""
    if record["num_reward_errors"] >= MOSTLY * record["num_completions_sampled"]:
        return "scorer fails", "the scorer fails on nearly every completion; see the first error above"
    if record["clipped_ratio"] >= MOSTLY:
        return (
            "all truncated",
            f"nearly all completions are cut at the cap ({record['length_max']} tokens) before they answer; raise "
            "rollout.max_new_tokens, or check that the prompt's format and the stop strings let the model end",
        )
    if record["outcome_mean"] == 0 and record["reward_std"] == 0:
        return (
            "all wrong",
            "no completion is judged correct; make the problems easier, show examples in the prompt, start from a "
            "fine-tuned model, or check that the scorer accepts a right answer",
        )
    if record["outcome_mean"] == 1:
        return "all right", "every completion is correct; make the problems harder or stop here"
    if record["reward_std"] == 0:
        return (
            "constant reward",
            f"the scorer gives every completion the same reward ({record['reward_mean']:g}); check it",
        )
    return (
        "equal within groups",
        "completions of a prompt all get the same reward; raise the group sizes or the temperature, or take problems "
        "that the model sometimes solves",
    )
