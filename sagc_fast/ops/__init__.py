"""The operations of the model, each with one signature and a choice of backends.

``linear``, ``rms_norm``, ``add_rms_norm``, ``silu_mul``, ``rope_and_cache``, ``paged_attention`` and ``sample_tokens``
serve the rollout, without gradients; in fp32 on the CPU each computes a row the same way, bit for bit, whatever the
other rows. ``Decoder`` runs all of them for a whole step in native code. ``varlen_attention`` and ``token_logprobs``
serve training and are differentiable. The plain-torch functions of the same names (reference.py, paged.py, sampling.py,
varlen.py, logprobs.py) document shapes and serve as oracles.
"""

from __future__ import annotations

import torch

from sagc_fast.ops import logprobs, paged, reference, sampling, varlen
from sagc_fast.ops.backend import describe, native_module, resolve, set_backend, use_backend
from sagc_fast.ops.decoder import Decoder, DecoderWeights, LayerWeights, has_decoder
from sagc_fast.ops.layouts import PackedLayout, PagedLayout

__all__ = [
    "Decoder",
    "DecoderWeights",
    "LayerWeights",
    "PackedLayout",
    "PagedLayout",
    "add_rms_norm",
    "describe",
    "has_decoder",
    "linear",
    "paged_attention",
    "rms_norm",
    "rope_and_cache",
    "sample_tokens",
    "set_backend",
    "silu_mul",
    "token_logprobs",
    "use_backend",
    "varlen_attention",
]


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """See :func:`sagc_fast.ops.reference.linear`."""
    if resolve("linear", x_TK.device.type, x_TK.dtype) == "native":
        return native_module().linear(x_TK, weight_NK, bias_N)
    return reference.linear(x_TK, weight_NK, bias_N)


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`sagc_fast.ops.reference.rms_norm`."""
    if resolve("rms_norm", x_TE.device.type, x_TE.dtype) == "native":
        return native_module().rms_norm(x_TE, weight_E, eps)
    return reference.rms_norm(x_TE, weight_E, eps)


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`sagc_fast.ops.reference.add_rms_norm`."""
    if resolve("add_rms_norm", x_TE.device.type, x_TE.dtype) == "native":
        return native_module().add_rms_norm(x_TE, residual_TE, weight_E, eps)
    return reference.add_rms_norm(x_TE, residual_TE, weight_E, eps)


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """See :func:`sagc_fast.ops.reference.silu_mul`."""
    if resolve("silu_mul", gate_up_T2F.device.type, gate_up_T2F.dtype) == "native":
        return native_module().silu_mul(gate_up_T2F)
    return reference.silu_mul(gate_up_T2F)


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
    if _is_native_with_cache("rope_and_cache", q_THD, k_cache):
        return native_module().rope_and_cache(
            q_THD, k_TKD, v_TKD, cos_PD2, sin_PD2, positions_T, k_cache, v_cache, slots_T
        )
    return reference.rope_and_cache(q_THD, k_TKD, v_TKD, cos_PD2, sin_PD2, positions_T, k_cache, v_cache, slots_T)


def paged_attention(
    q_THD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: PagedLayout, scale: float
) -> torch.Tensor:
    """See :func:`sagc_fast.ops.paged.paged_attention`."""
    if _is_native_with_cache("paged_attention", q_THD, k_cache):
        return native_module().paged_attention(q_THD, k_cache, v_cache, layout, scale)
    return paged.paged_attention(q_THD, k_cache, v_cache, layout, scale)


def _is_native_with_cache(op: str, q_THD: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """The cache's dtype may differ from the model's; native only where both are served."""
    device = q_THD.device.type
    return resolve(op, device, q_THD.dtype) == resolve(op, device, k_cache.dtype) == "native"


def varlen_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layout: PackedLayout, scale: float
) -> torch.Tensor:
    """See :func:`sagc_fast.ops.varlen.varlen_attention`."""
    if resolve("varlen_attention", q_THD.device.type, q_THD.dtype) == "native":
        return native_module().varlen_attention(q_THD, k_TKD, v_TKD, layout, scale)
    return varlen.varlen_attention(q_THD, k_TKD, v_TKD, layout, scale)


def token_logprobs(
    hidden_NE: torch.Tensor,
    lm_head_VE: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`sagc_fast.ops.logprobs.token_logprobs`."""
    if resolve("token_logprobs", hidden_NE.device.type, hidden_NE.dtype) == "native":
        return native_module().token_logprobs(hidden_NE, lm_head_VE, targets_N, temperature, chunk)
    return logprobs.token_logprobs(hidden_NE, lm_head_VE, targets_N, temperature, chunk)


def sample_tokens(
    logits_RV: torch.Tensor,
    uniform_R: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor | None = None,
    top_p_R: torch.Tensor | None = None,
    min_p_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`sagc_fast.ops.sampling.sample_tokens`."""
    if resolve("sample_tokens", logits_RV.device.type, logits_RV.dtype) == "native":
        return native_module().sample_tokens(logits_RV, uniform_R, temperature_R, top_k_R, top_p_R, min_p_R)
    return sampling.sample_tokens(logits_RV, uniform_R, temperature_R, top_k_R, top_p_R, min_p_R)
