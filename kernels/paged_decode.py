"""Decode attention over the part of its context that a row does not share: one query token, paged cache, split KV.

A program takes one row, one kv head and one split of the row's private positions; the query heads of the group go
through the tensor cores together, so k and v are read once. Each split leaves its output and log-sum-exp for
merge_splits (flash-decoding, Dao et al. 2023). The shared part comes from group_decode, which runs before. Where the
private positions are one split, its program folds the shared splits into its own sums and writes the row itself: one
launch less per layer, and the private output never leaves the registers.

Given the step's own projections (newest), the programs rotate their queries themselves, and the one whose positions end
with the row's newest writes its key and value to the cache and takes them from registers.

Memory bound: reads 2 x private positions x D x bytes per row and kv head, at about GROUP operations per byte. The grid
has rows x K x splits programs; the launcher's caller picks the splits to fill the device.

Shape suffixes: T tokens, S sequences, B block-table columns, H query heads, K kv heads, G heads of a group (padded),
D head width, N keys of a block, P splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sagc_fast.kernels._launch import LOG2E, block_of
from sagc_fast.kernels.newest import Newest, rotated


@triton.jit(do_not_specialize=["first_split", "stride_ls", "stride_lh", "stride_table"])
def paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, out_ptr, own_k_ptr, own_v_ptr, cos_ptr, sin_ptr, slots_ptr,
    cu_query_ptr, context_ptr, shared_ptr, tables_ptr, scale_log2,
    stride_qt, stride_qh, stride_block, stride_kvh, stride_ps, stride_ph, stride_ls, stride_lh, stride_ot, stride_oh,
    stride_kt, stride_kh, stride_vt, stride_vh, stride_angle, stride_table, first_split,
    ROTATES: tl.constexpr, MERGES: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    row = tl.load(cu_query_ptr + sequence)
    if tl.load(cu_query_ptr + sequence + 1) - row != 1:
        return
    context = tl.load(context_ptr + sequence)
    shared = tl.load(shared_ptr + sequence)
    share = tl.cdiv(tl.cdiv(context - shared, num_splits), BLOCK_N) * BLOCK_N
    low = shared + split * share
    high = tl.minimum(low + share, context)
    sequence = sequence.to(tl.int64)
    row = row.to(tl.int64)
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    is_d = offs_d < D
    heads_G = kv_head * GROUP + offs_g
    is_in_GD = (offs_g < GROUP)[:, None] & is_d[None, :]
    q_ptrs = q_ptr + row * stride_qt + heads_G[:, None] * stride_qh
    table_ptr = tables_ptr + sequence * stride_table
    k_head_ptr = k_ptr + kv_head * stride_kvh
    v_head_ptr = v_ptr + kv_head * stride_kvh
    lse_ptrs = lse_ptr + sequence * stride_ls + heads_G * stride_lh
    part_ptrs = part_ptr + sequence * stride_ps + heads_G[:, None] * stride_ph + offs_d[None, :]
    top_G = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total_G = tl.zeros([BLOCK_G], tl.float32)
    acc_GD = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    # The newest key and the shared splits come first: behind the loop they would cost registers throughout it.
    if ROTATES:
        angle = (context - 1).to(tl.int64) * stride_angle
        q_GD = rotated(q_ptrs, cos_ptr + angle, sin_ptr + angle, offs_d[None, :], is_in_GD, D)
        q_GD = q_GD.to(q_ptr.dtype.element_ty)
        cached = tl.minimum(high, context - 1)
        if (low < context) & (high == context):
            own_k_ptrs = own_k_ptr + row * stride_kt + kv_head * stride_kh
            k_D = rotated(own_k_ptrs, cos_ptr + angle, sin_ptr + angle, offs_d, is_d, D).to(k_ptr.dtype.element_ty)
            v_D = tl.load(own_v_ptr + row * stride_vt + kv_head * stride_vh + offs_d, mask=is_d, other=0.0)
            v_D = v_D.to(v_ptr.dtype.element_ty)
            slot = tl.load(slots_ptr + row)
            slot_offs = (slot // PAGE) * stride_block + (slot % PAGE) * D + offs_d
            tl.store(k_head_ptr + slot_offs, k_D, mask=is_d)
            tl.store(v_head_ptr + slot_offs, v_D, mask=is_d)
            k_D = k_D.to(q_GD.dtype).to(tl.float32)
            top_G = tl.sum(q_GD.to(tl.float32) * k_D[None, :], 1) * scale_log2
            total_G += 1.0
            acc_GD += v_D.to(q_GD.dtype).to(tl.float32)[None, :]
    else:
        q_GD = tl.load(q_ptrs + offs_d[None, :], mask=is_in_GD, other=0.0)
        cached = high
    if MERGES:
        for place in tl.range(0, tl.where(shared > 0, first_split, 0), num_stages=1):
            lse_G = tl.load(lse_ptrs + place, mask=offs_g < GROUP, other=float("-inf"))
            # The output of a split without positions was never written.
            is_there_GD = (lse_G > float("-inf"))[:, None] & is_in_GD
            part_GD = tl.load(part_ptrs + place * D, mask=is_there_GD, other=0.0)
            new_top_G = tl.maximum(top_G, lse_G)
            base_G = tl.where(new_top_G == float("-inf"), 0.0, new_top_G)
            weight_G = tl.exp2(lse_G - base_G)
            shrink_G = tl.exp2(top_G - base_G)
            total_G = total_G * shrink_G + weight_G
            acc_GD = acc_GD * shrink_G[:, None] + part_GD * weight_G[:, None]
            top_G = new_top_G
    for start in range(low, cached, BLOCK_N):
        keys_N = start + tl.arange(0, BLOCK_N)
        is_key_N = keys_N < cached
        pages_N = tl.load(table_ptr + keys_N // PAGE, mask=is_key_N, other=0).to(tl.int64)
        offs_ND = (pages_N * stride_block + (keys_N % PAGE) * D)[:, None] + offs_d[None, :]
        is_in_ND = is_key_N[:, None] & is_d[None, :]
        k_ND = tl.load(k_head_ptr + offs_ND, mask=is_in_ND, other=0.0).to(q_GD.dtype)
        v_ND = tl.load(v_head_ptr + offs_ND, mask=is_in_ND, other=0.0).to(q_GD.dtype)
        scores_GN = tl.dot(q_GD, tl.trans(k_ND), input_precision="ieee") * scale_log2
        scores_GN = tl.where(is_key_N[None, :], scores_GN, float("-inf"))
        new_top_G = tl.maximum(top_G, tl.max(scores_GN, 1))
        weights_GN = tl.exp2(scores_GN - new_top_G[:, None])
        shrink_G = tl.exp2(top_G - new_top_G)
        total_G = total_G * shrink_G + tl.sum(weights_GN, 1)
        acc_GD = acc_GD * shrink_G[:, None]
        acc_GD = tl.dot(weights_GN.to(q_GD.dtype), v_ND, acc_GD, input_precision="ieee")
        top_G = new_top_G
    if MERGES:
        out_ptrs = out_ptr + row * stride_ot + heads_G[:, None] * stride_oh + offs_d[None, :]
        tl.store(out_ptrs, (acc_GD / total_G[:, None]).to(out_ptr.dtype.element_ty), mask=is_in_GD)
    else:
        # An empty split says so by its log-sum-exp alone; merge_splits does not read its output.
        place = first_split + split
        lse_G = tl.where(high > low, top_G + tl.log2(total_G), float("-inf"))
        tl.store(lse_ptrs + place, lse_G, mask=offs_g < GROUP)
        if high > low:
            tl.store(part_ptrs + place * D, acc_GD / total_G[:, None], mask=is_in_GD)


def paged_decode(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    part_SHPD: torch.Tensor,
    lse_SHP: torch.Tensor,
    cu_query_S1: torch.Tensor,
    context_lens_S: torch.Tensor,
    shared_lens_S: torch.Tensor,
    block_tables_SB: torch.Tensor,
    first_split: int,
    num_splits: int,
    scale: float,
    out_THD: torch.Tensor | None = None,
    newest: Newest | None = None,
) -> None:
    """Fill splits ``first_split`` to ``first_split + num_splits`` for every sequence that brings one token.

    With ``out_THD``, which asks for one split: write these rows there instead, merged with the splits before
    ``first_split`` of those that share positions, so that merge_splits has nothing to do.

    With ``newest``, the queries are not rotated yet, and a row's newest position is not in the cache: it is written to
    its slot here.

    Args:
        q_THD: fp32, bf16 or fp16, the last axis contiguous; D up to 256.
        k_cache, v_cache: [num_blocks, K, block_size, D], contiguous.
        part_SHPD, lse_SHP: fp32, contiguous; outputs of the splits and their log-sum-exps to base 2.
        shared_lens_S: int32, leading positions that group_decode serves (0: none); below the context.
        cu_query_S1, context_lens_S, block_tables_SB: int32, as in sagc_fast.ops.layouts.PagedLayout.
    """
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, page = k_cache.shape[1:3]
    group, width, merges = num_heads // num_kv_heads, block_of(head_dim, 32), out_THD is not None
    if merges and num_splits != 1:
        raise ValueError(f"paged_decode was given {num_splits} splits and writes rows itself where there is one only.")
    own, own_strides = (None,) * 5, (0,) * 5
    if newest is not None:
        own = (newest.k_TKD, newest.v_TKD, newest.cos_PD2, newest.sin_PD2, newest.slots_T)
        own_strides = (*newest.k_TKD.stride()[:2], *newest.v_TKD.stride()[:2], newest.cos_PD2.stride(0))
    if len(context_lens_S):
        paged_decode_kernel[(len(context_lens_S), num_kv_heads, num_splits)](
            q_THD, k_cache, v_cache, part_SHPD, lse_SHP, out_THD, *own, cu_query_S1, context_lens_S, shared_lens_S,
            block_tables_SB, scale * LOG2E, *q_THD.stride()[:2], k_cache.stride(0), k_cache.stride(1),
            *part_SHPD.stride()[:2], *lse_SHP.stride()[:2], *(out_THD.stride()[:2] if merges else (0, 0)), *own_strides,
            block_tables_SB.stride(0), first_split,
            ROTATES=newest is not None, MERGES=merges, GROUP=group, BLOCK_G=block_of(group), PAGE=page, D=head_dim,
            BLOCK_D=width, BLOCK_N=32 if width > 128 else 64, num_warps=4, num_stages=3,
        )  # fmt: skip
