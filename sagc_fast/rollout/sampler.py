"""Draw the step's tokens: logits in bounded slices, keyed noise, and filters kept away from rows that have none.

Shape suffixes: U distinct hidden states, E model width, R sampled rows, V vocabulary.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sagc_fast import ops
from sagc_fast.profiling import ranged
from sagc_fast.rollout.rows import RowTable, Slots

LOGITS_BYTES = 32 * 2**20
"""Bound on the logits held at a time (ours); 170 rows of a vocabulary of 49,152."""


class Sampler:
    """Samples rows of the row table; rows never affect each other, so slicing does not change a bit."""

    def __init__(self, model: Any, rows: RowTable, decoder: ops.Decoder | None) -> None:
        self._model = model
        self._rows = rows
        self._decoder = decoder
        self._slice_rows = max(1, LOGITS_BYTES // (4 * model.config.vocab_size))
        self.logits_seconds = 0.0
        """Time in the language-model head during the last call."""

    @ranged("sample")
    def sample(
        self, hidden_UE: torch.Tensor, index_R: NDArray[np.int64], slots: Slots, offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and log-probs for ``slots``; sample r is drawn from hidden state ``index_R[r]`` (rising) with the
        noise of the place ``offsets[r]`` behind the slot's next token."""
        self.logits_seconds = 0.0
        if self._decoder is not None and not self._rows.is_filtered[slots].any():
            noise = self._decoder.uniforms(*map(torch.from_numpy, self._rows.noise_keys(slots, offsets)))
            temperature = torch.from_numpy(self._rows.temperature[slots])
            drawn = self._decoder.sample(hidden_UE, torch.from_numpy(index_R), noise, temperature)
            self.logits_seconds = self._decoder.head_seconds
            return tuple(column.numpy() for column in drawn)
        noise_R = self._rows.uniforms(slots, offsets)
        tokens = np.empty(slots.size, dtype=np.int64)
        logprobs = np.empty(slots.size, dtype=np.float32)
        for begin in range(0, slots.size, self._slice_rows):
            part = slice(begin, begin + self._slice_rows)
            logits_RV = self._logits(hidden_UE, index_R[part])
            tokens[part], logprobs[part] = self._draw(logits_RV, noise_R[part], slots[part])
        return tokens, logprobs

    def _logits(self, hidden_UE: torch.Tensor, index_R: NDArray[np.int64]) -> torch.Tensor:
        """[R, V]; a hidden state that several siblings draw from is multiplied once."""
        started = perf_counter()
        first, last = int(index_R[0]), int(index_R[-1]) + 1
        logits = self._model.logits(hidden_UE[first:last])
        self.logits_seconds += perf_counter() - started
        if np.array_equal(index_R, np.arange(first, last)):
            return logits
        return logits.index_select(0, torch.from_numpy(index_R - first).to(logits.device))

    def _draw(
        self, logits_RV: torch.Tensor, noise_R: NDArray[np.float64], slots: Slots
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        is_filtered = self._rows.is_filtered[slots]
        if not is_filtered.any():
            return self._draw_alike(logits_RV, noise_R, slots, has_filters=False)
        tokens = np.empty(slots.size, dtype=np.int64)
        logprobs = np.empty(slots.size, dtype=np.float32)
        for has_filters in (False, True):
            chosen = np.flatnonzero(is_filtered == has_filters)
            if chosen.size:
                logits = logits_RV.index_select(0, torch.from_numpy(chosen).to(logits_RV.device))
                tokens[chosen], logprobs[chosen] = self._draw_alike(logits, noise_R[chosen], slots[chosen], has_filters)
        return tokens, logprobs

    def _draw_alike(
        self, logits_RV: torch.Tensor, noise_R: NDArray[np.float64], slots: Slots, has_filters: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        rows = self._rows
        columns = [noise_R, rows.temperature[slots]]
        if has_filters:
            columns += [rows.top_k[slots], rows.top_p[slots], rows.min_p[slots]]
        tokens, logprobs = ops.sample_tokens(logits_RV, *(torch.from_numpy(c).to(logits_RV.device) for c in columns))
        return tokens.cpu().numpy(), logprobs.cpu().numpy()
