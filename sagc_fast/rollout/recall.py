"""Completions of the last call that had a prompt, kept as a source of drafts for the next call that has it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sagc_fast.rollout.lengths import prompt_key


class CompletionRecall:
    """Token ids per prompt, by its tokens; never more than ``limit_bytes`` of them, the oldest prompts go first.

    They only guide drafts: what is sampled does not depend on them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        """Of token ids (int32); keys and records come on top, some 200 bytes per completion."""
        self._texts: OrderedDict[bytes, list[NDArray[np.int32]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._texts)

    def texts(self, prompt: NDArray[np.int64]) -> list[list[int]]:
        """The completions stored for this prompt."""
        return [text.tolist() for text in self._texts.get(prompt_key(prompt), ())]

    def store(self, prompt: NDArray[np.int64], completions: Iterable[Sequence[int]]) -> None:
        """Put these completions in place of the prompt's earlier ones."""
        key = prompt_key(prompt)
        texts = [np.array(completion, dtype=np.int32) for completion in completions]
        self.num_bytes += _bytes_of(texts) - _bytes_of(self._texts.pop(key, []))
        self._texts[key] = texts
        while self._texts and self.num_bytes > self.limit_bytes:
            self.num_bytes -= _bytes_of(self._texts.popitem(last=False)[1])
        if not self._texts:
            self.num_bytes = 0  # an interrupt between a prompt and its bytes had left too many


def _bytes_of(texts: list[NDArray[np.int32]]) -> int:
    return sum(text.nbytes for text in texts)
