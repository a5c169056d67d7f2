"""A whole engine step in two native calls, for the weights and the KV cache of one ``generate`` call.

What the model does operator by operator, the decoder does in one piece with the same kernels and the same bits: no
tensor and no Python per operation, scratch memory that lives as long as the decoder. Source: csrc/cpu/decoder.cpp.

Shape suffixes: T tokens of the step, R rows whose output is wanted or drawn, U distinct hidden states, E model width,
H query heads, D2 half the head width, V vocabulary.
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


class Decoder:
    """Holds the tensors it was made of, so in-place updates of the weights need nothing; a tensor that *replaces* one
    is not seen. Make one per ``generate`` call: it costs some microseconds. Scratch memory goes with the object."""

    def __init__(self, weights: DecoderWeights, caches: Sequence[torch.Tensor]) -> None:
        """``caches``: key and value cache of each layer in turn, [num_blocks, kv heads, block_size, D]."""
        absent = weights.final_norm.new_empty(0)
        tensors = [weights.embedding, weights.final_norm, weights.head]
        for layer in weights.layers:
            values = (getattr(layer, name) for name in LayerWeights.__dataclass_fields__)
            tensors += [absent if value is None else value.detach() for value in values]
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
        return self._native.decoder_sample(self._handle, hidden_UE, index_R, uniform_R, temperature_R)


def has_decoder(device_type: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Whether the native decoder serves a model and a cache of these dtypes there."""
    is_native = resolve("decoder", device_type, dtype) == "native"
    return is_native and native_module().supports_cache(cache_dtype)
