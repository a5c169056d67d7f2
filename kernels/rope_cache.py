"""Rotary embedding of queries and keys, and the write of keys and values into the paged cache, in one pass.

One program per token: half-split rotation (Su et al. 2021, arXiv:2104.09864) in fp32, rounded once; the same
fused multiply-add as in newest, so that a key has the same bits whoever rotates it. Memory bound: reads
the token's q, k, v and one row of each table, writes q, k, v; nothing is read twice.

Shape suffixes: T tokens, H query heads, K kv heads, D head width, P positions, D2 half the head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sagc_fast.kernels._launch import block_of


@triton.jit
def rope_cache_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, out_ptr, k_cache_ptr, v_cache_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_table, stride_block, stride_kvh,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D2: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D2: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D2)
    is_d = offs_d < D2
    table_offs = tl.load(positions_ptr + token) * stride_table + offs_d
    cos = tl.load(cos_ptr + table_offs, mask=is_d, other=0.0)[None, :]
    sin = tl.load(sin_ptr + table_offs, mask=is_d, other=0.0)[None, :]

    offs_h = tl.arange(0, BLOCK_H)
    is_q = (offs_h < HEADS)[:, None] & is_d[None, :]
    q_ptrs = q_ptr + token * stride_qt + offs_h[:, None] * stride_qh + offs_d[None, :]
    first = tl.load(q_ptrs, mask=is_q, other=0.0).to(tl.float32)
    second = tl.load(q_ptrs + D2, mask=is_q, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + token * (HEADS * 2 * D2) + offs_h[:, None] * (2 * D2) + offs_d[None, :]
    tl.store(out_ptrs, tl.fma(first, cos, -(second * sin)).to(out_ptr.dtype.element_ty), mask=is_q)
    tl.store(out_ptrs + D2, tl.fma(second, cos, first * sin).to(out_ptr.dtype.element_ty), mask=is_q)

    offs_k = tl.arange(0, BLOCK_K)
    is_kv = (offs_k < KV_HEADS)[:, None] & is_d[None, :]
    slot = tl.load(slots_ptr + token)
    cache_offs = (slot // PAGE) * stride_block + (slot % PAGE) * (2 * D2)
    cache_offs = cache_offs + offs_k[:, None] * stride_kvh + offs_d[None, :]
    k_ptrs = k_ptr + token * stride_kt + offs_k[:, None] * stride_kh + offs_d[None, :]
    first = tl.load(k_ptrs, mask=is_kv, other=0.0).to(tl.float32)
    second = tl.load(k_ptrs + D2, mask=is_kv, other=0.0).to(tl.float32)
    k_rows = k_cache_ptr + cache_offs
    tl.store(k_rows, tl.fma(first, cos, -(second * sin)).to(k_cache_ptr.dtype.element_ty), mask=is_kv)
    tl.store(k_rows + D2, tl.fma(second, cos, first * sin).to(k_cache_ptr.dtype.element_ty), mask=is_kv)
    v_ptrs = v_ptr + token * stride_vt + offs_k[:, None] * stride_vh + offs_d[None, :]
    for half in tl.static_range(2):
        v = tl.load(v_ptrs + half * D2, mask=is_kv, other=0.0).to(tl.float32)
        tl.store(v_cache_ptr + cache_offs + half * D2, v.to(v_cache_ptr.dtype.element_ty), mask=is_kv)


def rope_cache(
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
    """The rotated q [T, H, D], contiguous; k (rotated) and v are written into the caches.

    Args:
        q_THD, k_TKD, v_TKD: slices of one projection will do; only the last axis has to be contiguous.
        cos_PD2, sin_PD2: fp32, contiguous.
        positions_T, slots_T: int64; slot = block * block_size + offset.
        k_cache, v_cache: [num_blocks, K, block_size, D], contiguous, of any float dtype.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads, page = k_cache.shape[1:3]
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if num_tokens:
        rope_cache_kernel[(num_tokens,)](
            q_THD, k_TKD, v_TKD, cos_PD2, sin_PD2, positions_T, slots_T, out_THD, k_cache, v_cache,
            *q_THD.stride()[:2], *k_TKD.stride()[:2], *v_TKD.stride()[:2], cos_PD2.stride(0), *k_cache.stride()[:2],
            HEADS=num_heads, KV_HEADS=num_kv_heads, PAGE=page, D2=head_dim // 2,
            BLOCK_H=block_of(num_heads, 1), BLOCK_K=block_of(num_kv_heads, 1), BLOCK_D2=block_of(head_dim // 2, 1),
            num_warps=4,
        )  # fmt: skip
    return out_THD
