"""Keyed noise: the random number of a token is a pure function of (seed, prompt id, sample index, position).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a counter-based generator has no
state to advance, so neither batch order nor preemption nor another prompt's group size can shift a sequence's noise.

Layout: the 64-bit seed is the key (low word first); the counter's four words are prompt id low, prompt id high, sample
index, position. Every field has words of its own, so two different tokens never share a counter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter_4N: ArrayLike, key_2N: ArrayLike) -> NDArray[np.uint64]:
    """The four 32-bit output words [4, N] (held in uint64) of Philox4x32-10 for N counters and keys of 32-bit words."""
    counter = np.asarray(counter_4N, dtype=np.uint64)
    key = np.asarray(key_2N, dtype=np.uint64)
    round_keys_R2N = (key + _WEYL * np.arange(_ROUNDS, dtype=np.uint64)[:, None, None]) & _MASK
    multiplied, mixed = counter[0::2], counter[1::2]  # words (0, 2) are multiplied, words (1, 3) are mixed in
    for round_key in round_keys_R2N:
        product = multiplied * _MULTIPLIERS
        multiplied, mixed = (product >> _SHIFT)[::-1] ^ mixed ^ round_key, (product & _MASK)[::-1]
    return np.stack((multiplied[0], mixed[0], multiplied[1], mixed[1]))


def uniforms(
    seed: ArrayLike, prompt_id: ArrayLike, sample_index: ArrayLike, position: ArrayLike
) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one per key; the arguments broadcast.

    Args:
        seed: integers in [0, 2**64).
        prompt_id: integers in [0, 2**64).
        sample_index: place of the completion in its group, in [0, 2**32).
        position: place of the token in its completion, from 0, in [0, 2**32).
    """
    fields = (np.asarray(value, dtype=np.uint64) for value in (seed, prompt_id, sample_index, position))
    seeds, prompt_ids, samples, positions = np.broadcast_arrays(*fields)
    shape = seeds.shape
    seeds, prompt_ids = seeds.reshape(-1), prompt_ids.reshape(-1)
    counter = np.stack((prompt_ids & _MASK, prompt_ids >> _SHIFT, samples.reshape(-1), positions.reshape(-1)))
    words = philox4x32(counter, np.stack((seeds & _MASK, seeds >> _SHIFT)))
    bits = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    return (bits.astype(np.float64) * 2.0**-53).reshape(shape)


class NoiseAhead:
    """The same numbers for rows that draw one token after another, ``AHEAD`` positions computed at a time.

    A vectorised Philox call costs nearly the same for one position as for many, so most steps only read a table.
    """

    AHEAD = 32

    def __init__(self, capacity: int) -> None:
        self._numbers = np.empty((capacity, self.AHEAD))
        self._window = np.full(capacity, -1, dtype=np.int64)

    def forget(self, slot: int) -> None:
        """The slot belongs to another sequence from now on."""
        self._window[slot] = -1

    def draw(
        self,
        slots: NDArray[np.int64],
        offsets: NDArray[np.int64],
        seed: NDArray[np.uint64],
        prompt_id: NDArray[np.uint64],
        sample_index: NDArray[np.uint64],
        position: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """``uniforms(seed, prompt_id, sample_index, position + offset)`` of ``slots`` and ``offsets``; the other arrays
        are per slot. A slot may come several times, with different offsets."""
        window, column = np.divmod(position[slots] + offsets, self.AHEAD)
        is_stale = self._window[slots] != window
        if is_stale.any():
            # Positions of one slot on both sides of a window's end: the later ones are computed by themselves.
            is_first = is_stale & (offsets == 0)
            stale, first = slots[is_first], window[is_first] * self.AHEAD
            keys = (seed[stale, None], prompt_id[stale, None], sample_index[stale, None])
            self._numbers[stale] = uniforms(*keys, first[:, None] + np.arange(self.AHEAD))
            self._window[stale] = window[is_first]
            is_beyond = self._window[slots] != window
            if is_beyond.any():
                numbers = self._numbers[slots, column]
                far = slots[is_beyond]
                position_beyond = position[far] + offsets[is_beyond]
                numbers[is_beyond] = uniforms(seed[far], prompt_id[far], sample_index[far], position_beyond)
                return numbers
        return self._numbers[slots, column]
