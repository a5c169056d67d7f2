"""What past completions say about the length of the next ones. Guides the order of admission, never the tokens."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEWEST_WEIGHT = 0.5
"""Weight of the newest group in a prompt's running mean (ours): lengths drift as the policy learns."""
OVERALL_WEIGHT = 0.1
"""Weight of the newest group in the mean over all groups (ours)."""
MAX_PROMPTS = 100_000
"""Prompts remembered; the one not seen for longest is forgotten first."""


class LengthHistory:
    """Mean completion length per prompt, and over all completions, across the calls of an engine.

    A prompt is known by its tokens, not by its place in the noise key: the same problem drawn again has another key.
    """

    def __init__(self, max_prompts: int = MAX_PROMPTS) -> None:
        self._max_prompts = max_prompts
        self._by_prompt: OrderedDict[bytes, float] = OrderedDict()
        self._overall: float | None = None

    def __len__(self) -> int:
        return len(self._by_prompt)

    @property
    def overall(self) -> float | None:
        """Running mean length of all recorded groups in tokens, or None before the first."""
        return self._overall

    def expected(self, token_ids: NDArray[np.int64]) -> float | None:
        """Running mean length for this prompt in tokens, or None when it has not been seen."""
        return self._by_prompt.get(prompt_key(token_ids))

    def record(self, token_ids: NDArray[np.int64], lengths: Sequence[int]) -> None:
        """Add the lengths of a finished group with this prompt."""
        mean = sum(lengths) / len(lengths)
        self._overall = _blend(self._overall, mean, OVERALL_WEIGHT)
        key = prompt_key(token_ids)
        self._by_prompt[key] = _blend(self._by_prompt.get(key), mean, NEWEST_WEIGHT)
        self._by_prompt.move_to_end(key)
        if len(self._by_prompt) > self._max_prompts:
            self._by_prompt.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, as before the first call."""
        self._by_prompt.clear()
        self._overall = None

    def state(self) -> dict[str, Any]:
        """The history as plain values, JSON-able; prompts from the one not seen for longest to the newest."""
        return {"overall": self._overall, "prompts": [[key.hex(), mean] for key, mean in self._by_prompt.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` gave, to the bit; what was recorded here before is forgotten."""
        self.clear()
        self._overall = state["overall"]
        self._by_prompt.update((bytes.fromhex(key), mean) for key, mean in state["prompts"])


def prompt_key(token_ids: NDArray[np.int64]) -> bytes:
    """16 bytes by which a prompt is known across calls: a hash of its tokens."""
    return hashlib.blake2b(token_ids.tobytes(), digest_size=16).digest()


def _blend(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)
