"""Engine steps as native calls, for the weights and the KV cache of one ``generate`` call: decode steps in one call,
several at a time where nothing is due in between; any other step in two (forward; language-model head and draw).

What the model does operator by operator, the decoder does in one piece with the same kernels and the same bits: no
tensor and no Python per operation, scratch memory that lives as long as the decoder. Source: csrc/cpu/decoder.cpp.

Shape suffixes: T tokens of the step, S slots of the row table, D decode rows, N steps, R rows whose output is wanted or
drawn, U distinct hidden states, E model width, H query heads, D2 half the head width, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sagc_fast.ops.backend import native_module, resolve
from sagc_fast.ops.layouts import PagedLayout


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; the order of the fields is the order in which the library reads them. None: not in the model."""

    input_norm: torch.Tensor
    qkv_weight: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o_weight: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up_weight: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_weight: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The model as the decoder reads it: contiguous, of one dtype, [out, in]."""

    embedding: torch.Tensor
    """[V, E]"""
    final_norm: torch.Tensor
    head: torch.Tensor
    """[V, E]; the embedding itself when tied."""
    layers: Sequence[LayerWeights]
    num_heads: int
    rms_norm_eps: float


@dataclass(frozen=True, slots=True)
class BoundRows:
    """The row table as the decoder reads it: one entry per slot; the order of the fields is the library's."""

    last_token: torch.Tensor
    """int64 [S], as all that follow up to ``sample_index``."""
    num_computed: torch.Tensor
    num_output: torch.Tensor
    max_output: torch.Tensor
    end_set: torch.Tensor
    """Row of ``end_ids``."""
    seed: torch.Tensor
    """Bits of an unsigned number, as the next two."""
    prompt_id: torch.Tensor
    sample_index: torch.Tensor
    temperature: torch.Tensor
    """fp32 [S]; 0: greedy."""
    group_index: torch.Tensor
    """int32 [S], ``share_group_S`` of the paged layout."""
    shared_blocks: torch.Tensor
    """int32 [S]"""
    block_tables: torch.Tensor
    """int32 [S, B]"""
    end_ids: torch.Tensor
    """int64 [sets, ids], filled up with -1."""


class Decoder:
    """Holds the tensors it was made of, and a second layout of some weights: no weight may change while it lives. Make
    one per ``generate`` call; it costs some microseconds, or a millisecond per 10 MB that are laid out. Scratch memory
    goes with the object."""

    def __init__(self, weights: DecoderWeights, caches: Sequence[torch.Tensor]) -> None:
        """``caches``: key and value cache of each layer in turn, [num_blocks, kv heads, block_size, D]."""
        absent = weights.final_norm.new_empty(0)
        tensors = [weights.embedding, weights.final_norm, weights.head]
        for layer in weights.layers:
            values = (getattr(layer, name) for name in LayerWeights.__dataclass_fields__)
            tensors += [absent if value is None else value.detach() for value in values]
        self.head_seconds = 0.0
        """In the language-model head during the last :meth:`sample`."""
        self._native = native_module()
        self._handle = self._native.decoder_create(tensors, list(caches), weights.num_heads, weights.rms_norm_eps)
        weakref.finalize(self, self._native.decoder_free, self._handle)

    def forward(
        self, token_ids_T: torch.Tensor, layout: PagedLayout, cos_PD2: torch.Tensor, sin_PD2: torch.Tensor
    ) -> torch.Tensor:
        """Write the step's keys and values, return the hidden states [R, E] of ``layout.logits_rows_R`` behind the
        final norm. Positions and slots follow from the layout's block tables."""
        return self._native.decoder_forward(self._handle, token_ids_T, layout, cos_PD2, sin_PD2)

    def sample(
        self, hidden_UE: torch.Tensor, index_R: torch.Tensor, uniform_R: torch.Tensor, temperature_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Language-model head and draw without filters: (token [R] int64, log-prob [R] fp32).

        Sample r is drawn from hidden state ``index_R[r]`` (int64, not falling), so siblings share one row of logits;
        the rest is as in :func:`sagc_fast.ops.sample_tokens`. Logits exist for a bounded number of rows at a time.
        """
        *drawn, self.head_seconds = self._native.decoder_sample(
            self._handle, hidden_UE, index_R, uniform_R, temperature_R
        )
        return tuple(drawn)

    def uniforms(self, *keys_R: torch.Tensor) -> torch.Tensor:
        """Keyed noise, float64 [R]: :func:`sagc_fast.rollout.noise.uniforms` of seed, prompt id, sample index and
        position, int64 [R] each (the bits of the unsigned numbers)."""
        return self._native.keyed_uniforms(*keys_R)

    def bind(self, rows: BoundRows, cos_PD2: torch.Tensor, sin_PD2: torch.Tensor) -> None:
        """Let :meth:`steps` read these arrays, where they lie and as they are then; the tables of angles must reach to
        the last position of any row."""
        columns = [getattr(rows, name) for name in BoundRows.__dataclass_fields__]
        self._native.decoder_bind(self._handle, columns, cos_PD2, sin_PD2)

    def steps(
        self, slots_D: torch.Tensor, most_steps: int, stop_at_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """N decode steps of these rows, each feeding on the tokens of the one before; the row table is only read. A row
        that is over, by an ending id or its length cap, takes no part in the steps behind. N is ``most_steps``, or
        less: nothing follows the first step after which no more than ``stop_at_rows`` rows go on, nor a quarter of a
        second.

        Returns tokens (int64 [D x N], those of a row side by side, 0 behind its end), their log-probs (fp32), and the
        seconds of each step's forward pass with the language-model head, and of its draw (float64 [N, 2]). The cache
        holds the keys and values of what was fed. Blocks for ``most_steps`` tokens, or for as many as a row has left,
        must be in the tables. No filters: all that counts is a row's temperature.
        """
        return self._native.decoder_steps(self._handle, slots_D, most_steps, stop_at_rows)


def has_decoder(device_type: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Whether the native decoder serves a model and a cache of these dtypes there."""
    is_native = resolve("decoder", device_type, dtype) == "native"
    return is_native and native_module().supports_cache(cache_dtype)
