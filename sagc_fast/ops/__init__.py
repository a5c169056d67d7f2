"""The operations of the model, each with one signature and a choice of backends.

``linear``, ``rms_norm``, ``add_rms_norm``, ``silu_mul``, ``rope_and_cache``, ``paged_attention`` (both of them:
``rope_and_attend``), ``sample_tokens`` and ``sample_keyed_tokens`` serve the rollout, ``place_rows`` and
``advance_rows`` its bursts on a GPU; in fp32 on the CPU each computes a row the same way, bit for bit, whatever the
other rows. ``Decoder`` runs all of them for a whole step in native code. ``trained_linear``, ``rms_norm``,
``add_rms_norm``, ``silu_mul``, ``rotary_split``, ``varlen_attention`` and ``token_logprobs`` serve training and are
differentiable, once; ``mm`` serves backward passes.

The plain-torch functions of the same names (reference.py, products.py, paged.py, sampling.py, varlen.py, logprobs.py)
document shapes and serve as oracles.
"""

from __future__ import annotations

from typing import Any

import torch

from sagc_fast.ops import decode_rows, logprobs, noise, paged, reference, sampling, varlen
from sagc_fast.ops.backend import (
    cuda_module,
    describe,
    flash_module,
    native_module,
    resolve,
    set_backend,
    triton_module,
    use_backend,
)
from sagc_fast.ops.decode_rows import DecodeRows
from sagc_fast.ops.decoder import BoundRows, Decoder, DecoderWeights, LayerWeights, has_decoder
from sagc_fast.ops.layouts import PackedLayout, PagedLayout
from sagc_fast.ops.products import linear as trained_linear
from sagc_fast.ops.products import mm
from sagc_fast.profiling import annotate, ranged

__all__ = [
    "BoundRows",
    "DecodeRows",
    "Decoder",
    "DecoderWeights",
    "LayerWeights",
    "PackedLayout",
    "PagedLayout",
    "add_rms_norm",
    "advance_rows",
    "describe",
    "has_decoder",
    "linear",
    "mm",
    "paged_attention",
    "place_rows",
    "rms_norm",
    "rope_and_attend",
    "rope_and_cache",
    "rotary_split",
    "sample_keyed_tokens",
    "sample_tokens",
    "set_backend",
    "silu_mul",
    "token_logprobs",
    "trained_linear",
    "use_backend",
    "varlen_attention",
]


@ranged("dense")
def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """See :func:`sagc_fast.ops.reference.linear`."""
    if resolve("linear", x_TK.device.type, x_TK.dtype) == "native":
        return native_module().linear(x_TK, weight_NK, bias_N)
    return reference.linear(x_TK, weight_NK, bias_N)


@ranged("norm")
def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`sagc_fast.ops.reference.rms_norm`."""
    backend = resolve("rms_norm", x_TE.device.type, x_TE.dtype)
    if backend == "native":
        return native_module().rms_norm(x_TE, weight_E, eps)
    if backend == "triton":
        return triton_module().rms_norm(x_TE, weight_E, eps)
    return reference.rms_norm(x_TE, weight_E, eps)


@ranged("norm")
def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`sagc_fast.ops.reference.add_rms_norm`."""
    backend = resolve("add_rms_norm", x_TE.device.type, x_TE.dtype)
    if backend == "native":
        return native_module().add_rms_norm(x_TE, residual_TE, weight_E, eps)
    if backend == "triton":
        return triton_module().add_rms_norm(x_TE, residual_TE, weight_E, eps)
    return reference.add_rms_norm(x_TE, residual_TE, weight_E, eps)


@ranged("gate")
def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """See :func:`sagc_fast.ops.reference.silu_mul`."""
    backend = resolve("silu_mul", gate_up_T2F.device.type, gate_up_T2F.dtype)
    if backend == "native":
        return native_module().silu_mul(gate_up_T2F)
    if backend == "triton":
        return triton_module().silu_mul(gate_up_T2F)
    return reference.silu_mul(gate_up_T2F)


@ranged("rope")
def rotary_split(
    qkv_TX: torch.Tensor, cos_TD2: torch.Tensor, sin_TD2: torch.Tensor, num_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`sagc_fast.ops.reference.rotary_split`."""
    backend = resolve("rotary_split", qkv_TX.device.type, qkv_TX.dtype)
    if backend == "native":
        return native_module().rotary_split(qkv_TX, cos_TD2, sin_TD2, num_heads, num_kv_heads)
    if backend == "triton":
        return triton_module().rotary_split(qkv_TX, cos_TD2, sin_TD2, num_heads, num_kv_heads)
    return reference.rotary_split(qkv_TX, cos_TD2, sin_TD2, num_heads, num_kv_heads)


@ranged("rope")
def rope_and_cache(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cos_PD2: torch.Tensor,
    sin_PD2: torch.Tensor,
    positions_T: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """See :func:`sagc_fast.ops.reference.rope_and_cache`."""
    arguments = (q_THD, k_TKD, v_TKD, cos_PD2, sin_PD2, positions_T, k_cache, v_cache, slots_T)
    backend = _resolve_with_cache("rope_and_cache", q_THD, k_cache)
    if backend == "native":
        return native_module().rope_and_cache(*arguments)
    if backend == "triton":
        return triton_module().rope_and_cache(*arguments)
    return reference.rope_and_cache(*arguments)


@ranged("attention")
def paged_attention(
    q_THD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: PagedLayout, scale: float
) -> torch.Tensor:
    """See :func:`sagc_fast.ops.paged.paged_attention`."""
    backend = _resolve_with_cache("paged_attention", q_THD, k_cache)
    if backend == "native":
        return native_module().paged_attention(q_THD, k_cache, v_cache, layout, scale)
    if backend == "triton":
        return triton_module().paged_attention(q_THD, k_cache, v_cache, layout, scale)
    return paged.paged_attention(q_THD, k_cache, v_cache, layout, scale)


def rope_and_attend(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cos_PD2: torch.Tensor,
    sin_PD2: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: PagedLayout,
    scale: float,
) -> torch.Tensor:
    """:func:`rope_and_cache` of the step's tokens, then :func:`paged_attention` of the rotated queries; by Triton in
    the same kernels where no sequence brings more than one token."""
    own, angles, caches = (q_THD, k_TKD, v_TKD), (cos_PD2, sin_PD2), (k_cache, v_cache)
    if layout.max_query_len <= 1 and _resolve_with_cache("paged_attention", q_THD, k_cache) == "triton":
        with annotate("attention"):
            return triton_module().rope_and_attend(*own, *angles, *caches, layout, scale)
    q_THD = rope_and_cache(*own, *angles, layout.positions_T, *caches, layout.slots_T)
    return paged_attention(q_THD, *caches, layout, scale)


def _resolve_with_cache(op: str, q_THD: torch.Tensor, k_cache: torch.Tensor) -> str:
    """The cache's dtype may differ from the model's; a fast backend only where both are served."""
    device = q_THD.device.type
    backend = resolve(op, device, q_THD.dtype)
    if backend == "native":
        return backend if native_module().supports_cache(k_cache.dtype) else "torch"
    return backend if backend == resolve(op, device, k_cache.dtype) else "torch"


@ranged("attention")
def varlen_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layout: PackedLayout, scale: float
) -> torch.Tensor:
    """See :func:`sagc_fast.ops.varlen.varlen_attention`."""
    backend = resolve("varlen_attention", q_THD.device.type, q_THD.dtype)
    if backend == "native":
        return native_module().varlen_attention(q_THD, k_TKD, v_TKD, layout, scale)
    if backend == "flash" and q_THD.shape[-1] <= flash_module().MAX_HEAD_DIM:
        return flash_module().varlen_attention(q_THD, k_TKD, v_TKD, layout, scale)
    if backend == "triton":
        return triton_module().varlen_attention(q_THD, k_TKD, v_TKD, layout, scale)
    return varlen.varlen_attention(q_THD, k_TKD, v_TKD, layout, scale)


@ranged("log-probs")
def token_logprobs(
    hidden_NE: torch.Tensor,
    lm_head_VE: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`sagc_fast.ops.logprobs.token_logprobs`."""
    backend = resolve("token_logprobs", hidden_NE.device.type, hidden_NE.dtype)
    if backend == "triton":
        return triton_module().token_logprobs(hidden_NE, lm_head_VE, targets_N, temperature, chunk)
    rows = native_module() if backend == "native" else logprobs.TorchRows
    return logprobs.token_logprobs(hidden_NE, lm_head_VE, targets_N, temperature, chunk, rows)


@ranged("draw")
def sample_tokens(
    logits_RV: torch.Tensor,
    uniform_R: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor | None = None,
    top_p_R: torch.Tensor | None = None,
    min_p_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`sagc_fast.ops.sampling.sample_tokens`."""
    backend = resolve("sample_tokens", logits_RV.device.type, logits_RV.dtype)
    if backend == "native":
        return native_module().sample_tokens(logits_RV, uniform_R, temperature_R, top_k_R, top_p_R, min_p_R)
    if backend == "triton":
        return triton_module().sample_tokens(logits_RV, uniform_R, temperature_R, top_k_R, top_p_R, min_p_R)
    return sampling.sample_tokens(logits_RV, uniform_R, temperature_R, top_k_R, top_p_R, min_p_R)


@ranged("draw")
def sample_keyed_tokens(
    logits_RV: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor | None = None,
    top_p_R: torch.Tensor | None = None,
    min_p_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`sample_tokens` whose uniform numbers are made on the device.

    ``keys`` are int64 [R]: seed, prompt id (both the bits of unsigned numbers), sample index, position; the numbers are
    those of :mod:`sagc_fast.rollout.noise`. Nothing waits for the device: a row whose logits are not finite is marked
    by log-prob NaN, token 0. (The native operator of the CPU raises instead.)
    """
    filters = (top_k_R, top_p_R, min_p_R)
    has_filters = any(x is not None for x in filters)
    backend = resolve("sample_keyed_tokens", logits_RV.device.type, logits_RV.dtype)
    if backend == "cuda":
        if not has_filters and logits_RV.shape[1] <= cuda_module().MAX_VOCAB:
            return cuda_module().sample_keyed_tokens(logits_RV, keys, temperature_R)
        backend = "torch" if triton_module() is None else "triton"
    if backend == "triton":
        return triton_module().sample_keyed_tokens(logits_RV, keys, temperature_R, *filters)
    uniform_R = noise.uniforms(*keys)
    if not has_filters and resolve("sample_tokens", logits_RV.device.type, logits_RV.dtype) == "native":
        return native_module().sample_tokens(logits_RV, uniform_R, temperature_R)
    return sampling.sample_marked_tokens(logits_RV, uniform_R, temperature_R, *filters)


def place_rows(rows: DecodeRows, block_size: int, scratch_slot: int) -> None:
    """See :func:`sagc_fast.ops.decode_rows.place_rows`."""
    _row_module("place_rows", rows).place_rows(rows, block_size, scratch_slot)


def advance_rows(rows: DecodeRows, token_R: torch.Tensor, logprob_R: torch.Tensor) -> None:
    """See :func:`sagc_fast.ops.decode_rows.advance_rows`."""
    _row_module("advance_rows", rows).advance_rows(rows, token_R, logprob_R)


def _row_module(op: str, rows: DecodeRows) -> Any:
    backend = resolve(op, rows.token_R.device.type, torch.float32)
    return {"cuda": cuda_module, "triton": triton_module}.get(backend, lambda: decode_rows)()
