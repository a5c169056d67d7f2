"""Rotary embedding in training: a fused projection into turned q, turned k and v, and the gradients back into one.

One program per token: half-split rotation (Su et al. 2021, arXiv:2104.09864) in fp32, rounded once. The gradient of a
rotation is the rotation by the negative angle, so one kernel serves both ways. Memory bound: every element is read once
and written once.

Shape suffixes: T tokens, X = (H + 2 K) D, H query heads, K kv heads, D head width, D2 half of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sagc_fast.kernels._launch import block_of


@triton.jit
def _move_heads(
    source, target, token, stride_st, stride_sh, stride_tt, stride_th, cos, sin,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, D2: tl.constexpr, BLOCK_D2: tl.constexpr,
):  # fmt: skip
    offs_h = tl.arange(0, BLOCK)[:, None]
    offs_d = tl.arange(0, BLOCK_D2)[None, :]
    is_in = (offs_h < HEADS) & (offs_d < D2)
    sources = source + token * stride_st + offs_h * stride_sh + offs_d
    targets = target + token * stride_tt + offs_h * stride_th + offs_d
    first = tl.load(sources, mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(sources + D2, mask=is_in, other=0.0).to(tl.float32)
    tl.store(targets, tl.fma(first, cos, -(second * sin)).to(target.dtype.element_ty), mask=is_in)
    tl.store(targets + D2, tl.fma(second, cos, first * sin).to(target.dtype.element_ty), mask=is_in)


@triton.jit
def rotary_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, out_q_ptr, out_k_ptr, out_v_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_table,
    out_qt, out_qh, out_kt, out_kh, out_vt, out_vh,
    IS_BACKWARD: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D2: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D2: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D2)
    cos = tl.load(cos_ptr + token * stride_table + offs_d, mask=offs_d < D2, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * stride_table + offs_d, mask=offs_d < D2, other=0.0)[None, :]
    if IS_BACKWARD:
        sin = -sin
    _move_heads(q_ptr, out_q_ptr, token, stride_qt, stride_qh, out_qt, out_qh, cos, sin, HEADS, BLOCK_H, D2, BLOCK_D2)
    _move_heads(
        k_ptr, out_k_ptr, token, stride_kt, stride_kh, out_kt, out_kh, cos, sin, KV_HEADS, BLOCK_K, D2, BLOCK_D2
    )
    unmoved = tl.zeros([1, BLOCK_D2], tl.float32)
    _move_heads(
        v_ptr, out_v_ptr, token, stride_vt, stride_vh, out_vt, out_vh, unmoved + 1.0, unmoved,
        KV_HEADS, BLOCK_K, D2, BLOCK_D2,
    )  # fmt: skip


def rotary_split(
    qkv_TX: torch.Tensor, cos_TD2: torch.Tensor, sin_TD2: torch.Tensor, num_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q [T, H, D] and k [T, K, D] turned by the tokens' angles, v [T, K, D]), each contiguous, in the dtype of qkv.

    Args:
        qkv_TX: rows with a contiguous last axis.
        cos_TD2, sin_TD2: fp32, with a contiguous last axis and equal strides.
    """
    num_tokens = len(qkv_TX)
    qkv = qkv_TX.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    parts = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    out = tuple(
        torch.empty(num_tokens, part.shape[1], part.shape[2], dtype=qkv.dtype, device=qkv.device) for part in parts
    )
    _launch(parts, out, cos_TD2, sin_TD2, is_backward=False)
    return out


def rotary_merge(
    grad_q_THD: torch.Tensor,
    grad_k_TKD: torch.Tensor,
    grad_v_TKD: torch.Tensor,
    cos_TD2: torch.Tensor,
    sin_TD2: torch.Tensor,
) -> torch.Tensor:
    """The gradient of rotary_split's projection [T, X], contiguous, from those of its results.

    The gradients need a contiguous last axis; the tables are those of rotary_split.
    """
    num_tokens, num_heads, head_dim = grad_q_THD.shape
    num_kv_heads = grad_k_TKD.shape[1]
    merged_TX = torch.empty(
        num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=grad_q_THD.dtype, device=grad_q_THD.device
    )
    merged = merged_TX.unflatten(1, (-1, head_dim))
    out = merged.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    _launch((grad_q_THD, grad_k_TKD, grad_v_TKD), out, cos_TD2, sin_TD2, is_backward=True)
    return merged_TX


def _launch(
    parts: tuple[torch.Tensor, ...],
    out: tuple[torch.Tensor, ...],
    cos_TD2: torch.Tensor,
    sin_TD2: torch.Tensor,
    is_backward: bool,
) -> None:
    (num_tokens, num_heads, head_dim), num_kv_heads = parts[0].shape, parts[1].shape[1]
    if num_tokens == 0:
        return
    rotary_kernel[(num_tokens,)](
        *parts, cos_TD2, sin_TD2, *out,
        *(stride for part in parts for stride in part.stride()[:2]), cos_TD2.stride(0),
        *(stride for part in out for stride in part.stride()[:2]),
        IS_BACKWARD=is_backward, HEADS=num_heads, KV_HEADS=num_kv_heads, D2=head_dim // 2,
        BLOCK_H=block_of(num_heads, 1), BLOCK_K=block_of(num_kv_heads, 1), BLOCK_D2=block_of(head_dim // 2, 1),
        num_warps=4,
    )  # fmt: skip
