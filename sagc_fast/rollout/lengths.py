"""What past completions say about the length of the next ones. Guides the order of admission, never the tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

NEWEST_WEIGHT = 0.5
"""Weight of the newest group in a prompt's running mean (ours): lengths drift as the policy learns."""
MAX_PROMPTS = 100_000
"""Prompts remembered; the one not seen for longest is forgotten first."""


class LengthHistory:
    """Mean completion length per prompt id, and over all completions, across the calls of an engine."""

    def __init__(self, max_prompts: int = MAX_PROMPTS) -> None:
        self._max_prompts = max_prompts
        self._by_prompt: OrderedDict[int, float] = OrderedDict()
        self._overall: float | None = None

    def __len__(self) -> int:
        return len(self._by_prompt)

    @property
    def overall(self) -> float | None:
        """Running mean length of all recorded groups in tokens, or None before the first."""
        return self._overall

    def expected(self, prompt_id: int) -> float | None:
        """Running mean length for this prompt in tokens, or None when it has not been seen."""
        return self._by_prompt.get(prompt_id)

    def record(self, lengths: Sequence[int], prompt_id: int | None = None) -> None:
        """Add one finished group; without a prompt id that means the same across calls only the overall mean moves."""
        mean = sum(lengths) / len(lengths)
        self._overall = _blend(self._overall, mean, weight=0.1)
        if prompt_id is None:
            return
        self._by_prompt[prompt_id] = _blend(self._by_prompt.get(prompt_id), mean, NEWEST_WEIGHT)
        self._by_prompt.move_to_end(prompt_id)
        if len(self._by_prompt) > self._max_prompts:
            self._by_prompt.popitem(last=False)

    def clear(self) -> None:
        self._by_prompt.clear()
        self._overall = None


def _blend(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)
