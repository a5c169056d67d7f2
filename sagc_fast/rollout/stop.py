"""When a completion ends: ending token ids for whole batches at once, stop strings for the rows that have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BROKEN = "\ufffd"
_MAX_PENDING = 64
"""Tokens kept undecoded while each ends in the middle of a character; valid UTF-8 text rarely needs more than four."""


class EndTable:
    """The distinct sets of ending token ids of a call, as one padded table [sets, ids]."""

    def __init__(self) -> None:
        self._indices: dict[tuple[int, ...], int] = {}
        self._table = np.empty((0, 0), dtype=np.int64)

    def add(self, token_ids: tuple[int, ...]) -> int:
        """Index of this set, for :meth:`is_end`."""
        return self._indices.setdefault(token_ids, len(self._indices))

    def is_end(self, tokens_R: NDArray[np.int64], set_indices_R: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these tokens end their row. bool [R]."""
        return (self.ids[set_indices_R] == tokens_R[:, None]).any(axis=1)

    @property
    def ids(self) -> NDArray[np.int64]:
        """[sets, ids], rows filled up with -1."""
        if len(self._indices) != self._table.shape[0]:
            width = max(len(ids) for ids in self._indices)
            padded = [(*ids, *(-1,) * (width - len(ids))) for ids in self._indices]
            self._table = np.array(padded, dtype=np.int64).reshape(len(padded), width)
        return self._table


class Detokenizer:
    """Text of tokens, without special tokens and without cosmetic clean-up, so that text only grows as tokens come.

    ``tokenizer`` needs ``decode(ids, skip_special_tokens=, clean_up_tokenization_spaces=)`` as in transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str | None] = {}

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def piece(self, token_id: int) -> str | None:
        """What the token adds to a text it continues; None when it holds a part of a character. Cached for good."""
        if token_id not in self._pieces:
            alone = self.decode([token_id])
            # The second of two equal tokens stands in mid-text, where decoders keep its leading space.
            self._pieces[token_id] = None if _BROKEN in alone else self.decode([token_id, token_id])[len(alone) :]
        return self._pieces[token_id]


class StopMatcher:
    """Watches one completion for its stop strings, which may span tokens; O(1) work per token.

    Only the last characters that could begin a match are kept. Tokens that end in mid-character wait in ``_pending``
    until the character is complete, so no match is missed or invented at a seam.
    """

    def __init__(self, stop: tuple[str, ...], detokenizer: Detokenizer) -> None:
        self._stop = stop
        self._detokenizer = detokenizer
        self._keep = max(len(text) for text in stop) - 1
        self._tail = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> bool:
        """Add a token; True when the text now contains a stop string."""
        piece = None if self._pending else self._detokenizer.piece(token_id)
        if piece is None:
            self._pending.append(token_id)
            piece = self._detokenizer.decode(self._pending)
        whole = piece.rstrip(_BROKEN) if self._pending else piece
        text = self._tail + whole
        if any(stop in text for stop in self._stop):
            return True
        if whole == piece or len(self._pending) >= _MAX_PENDING:
            self._pending.clear()
            self._tail = text[max(0, len(text) - self._keep) :]
        return False


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text before the first stop string in it."""
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]
