"""Draw the step's tokens: logits in bounded slices, keyed noise, and filters kept away from rows that have none.

Shape suffixes: U distinct hidden states, E model width, R sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sagc_fast import ops
from sagc_fast.ops.sampling import not_finite
from sagc_fast.profiling import ranged
from sagc_fast.rollout.rows import RowTable, Slots
from sagc_fast.rollout.uploads import uploaded

LOGITS_BYTES, DEVICE_LOGITS_BYTES = 32 * 2**20, 512 * 2**20
"""Bound on the logits held at a time (ours), on the CPU (170 rows of a vocabulary of 49,152) and elsewhere."""

_Draw = tuple[NDArray[np.int64], torch.Tensor, torch.Tensor]
"""Numbers of the rows, their tokens and log-probs."""


class Sampler:
    """Samples rows of the row table; rows never affect each other, so slicing does not change a bit."""

    def __init__(self, model: Any, rows: RowTable, decoder: ops.Decoder | None) -> None:
        self._model = model
        self._rows = rows
        self._decoder = decoder
        self._row_bytes = 4 * model.config.vocab_size
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
        bound = LOGITS_BYTES if hidden_UE.device.type == "cpu" else DEVICE_LOGITS_BYTES
        num_at_once, draws = max(1, bound // self._row_bytes), []
        for begin in range(0, slots.size, num_at_once):
            part = slice(begin, begin + num_at_once)
            # No name holds the logits: they are gone before the next part's are made.
            draws += self._draw(self._logits(hidden_UE, index_R[part]), slots[part], offsets[part], begin)
        return self._results(draws, slots.size)

    def _logits(self, hidden_UE: torch.Tensor, index_R: NDArray[np.int64]) -> torch.Tensor:
        """[R, V]; a hidden state that several siblings draw from is multiplied once."""
        started = perf_counter()
        first, last = int(index_R[0]), int(index_R[-1]) + 1
        logits = self._model.logits(hidden_UE[first:last])
        self.logits_seconds += perf_counter() - started
        if np.array_equal(index_R, np.arange(first, last)):
            return logits
        return logits.index_select(0, *uploaded([index_R - first], logits.device))

    def _draw(self, logits_RV: torch.Tensor, slots: Slots, offsets: NDArray[np.int64], begin: int) -> Iterator[_Draw]:
        """Rows with filters apart from those without; their numbers count from ``begin``."""
        is_filtered = self._rows.is_filtered[slots]
        for has_filters in (False, True):
            chosen = np.flatnonzero(is_filtered == has_filters)
            if not chosen.size:
                continue
            logits = logits_RV
            if chosen.size < slots.size:
                logits = logits_RV.index_select(0, *uploaded([chosen], logits_RV.device))
            yield begin + chosen, *self._draw_alike(logits, slots[chosen], offsets[chosen], has_filters)

    def _draw_alike(
        self, logits_RV: torch.Tensor, slots: Slots, offsets: NDArray[np.int64], has_filters: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, device = self._rows, logits_RV.device
        columns = [rows.temperature[slots]]
        if has_filters:
            columns += [rows.top_k[slots], rows.top_p[slots], rows.min_p[slots]]
        if device.type == "cpu":
            return ops.sample_tokens(logits_RV, *uploaded([rows.uniforms(slots, offsets), *columns], device))
        tensors = uploaded([*rows.noise_keys(slots, offsets), *columns], device)
        return ops.sample_keyed_tokens(logits_RV, tuple(tensors[:4]), *tensors[4:])

    def _results(self, draws: list[_Draw], num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """All draws in row order; the one place where the host waits for the device, for one copy."""
        chosen = np.concatenate([rows for rows, *_ in draws])
        tokens_R, logprobs_R = (torch.cat(column) for column in list(zip(*draws, strict=True))[1:])
        if tokens_R.device.type != "cpu":
            # Exact: ids are below 2**53. Rows that nothing can be drawn from are marked there, not raised.
            pair = torch.stack((tokens_R.double(), logprobs_R.double())).cpu()
            tokens_R, logprobs_R = pair[0].long(), pair[1].float()
            num_bad = int(torch.isnan(logprobs_R).sum())
            if num_bad:
                raise RuntimeError(not_finite(num_bad, num_rows))
        tokens, logprobs = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.float32)
        tokens[chosen], logprobs[chosen] = tokens_R.numpy(), logprobs_R.numpy()
        return tokens, logprobs
