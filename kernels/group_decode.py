"""Decode attention over the prompt that siblings share: its keys and values are read once for all of them.

The queries of up to TILE siblings, all heads of one kv head's group, form the rows of one tensor-core product, so the
reads are divided by the number of live siblings (Juravsky et al. 2024, Hydragen, arXiv:2402.05099). Siblings stand side
by side in the batch; the first of every TILE of them leads. decode_plan lists the leaders, and the programs walk the
list: how many there are is known on the device alone, and a program for every row would mostly be one that returns.
paged_decode takes the rest of each row's context and merge_splits puts the two together.

Memory bound up to about 10 siblings x heads per byte's worth of reads, tensor-core work beyond: 4 x D operations per
query, head and key; traffic 2 x prompt x D x bytes per group and kv head.

Shape suffixes: T tokens, S sequences, B block-table columns, H query heads, K kv heads, D head width, M rows of the
product (sibling-major: sibling x GROUP + head of the group), N keys of a block, P splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sagc_fast.kernels._launch import LOG2E, block_of
from sagc_fast.kernels.newest import Newest, rotated


@triton.jit(do_not_specialize=["num_sequences", "stride_ls", "stride_lh", "stride_table"])
def group_decode_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, cos_ptr, sin_ptr, cu_query_ptr, context_ptr, shared_ptr, run_start_ptr,
    leaders_ptr, tables_ptr, num_sequences, scale_log2,
    stride_qt, stride_qh, stride_block, stride_kvh, stride_ps, stride_ph, stride_ls, stride_lh, stride_table,
    stride_angle,
    ROTATES: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    heads_M = kv_head * GROUP + offs_m % GROUP
    k_head_ptr = k_ptr + kv_head * stride_kvh
    v_head_ptr = v_ptr + kv_head * stride_kvh
    for index in range(tl.program_id(0), tl.load(leaders_ptr), tl.num_programs(0)):
        leader = tl.load(leaders_ptr + 1 + index)
        shared = tl.load(shared_ptr + leader)
        run_start = tl.load(run_start_ptr + leader)
        share = tl.cdiv(tl.cdiv(shared, num_splits), BLOCK_N) * BLOCK_N
        low = split * share
        high = tl.minimum(low + share, shared)
        siblings_M = leader + offs_m // GROUP
        is_row_M = (offs_m < TILE * GROUP) & (siblings_M < num_sequences)
        is_row_M = is_row_M & (tl.load(run_start_ptr + siblings_M, mask=is_row_M, other=-1) == run_start)
        rows_M = tl.load(cu_query_ptr + siblings_M, mask=is_row_M, other=0)
        is_in_MD = is_row_M[:, None] & (offs_d < D)[None, :]
        q_offs_M = rows_M.to(tl.int64) * stride_qt + heads_M * stride_qh
        if ROTATES:
            position_M = tl.load(context_ptr + siblings_M, mask=is_row_M, other=1).to(tl.int64) - 1
            angle_M1 = (position_M * stride_angle)[:, None]
            q_M1 = q_ptr + q_offs_M[:, None]
            q_MD = rotated(q_M1, cos_ptr + angle_M1, sin_ptr + angle_M1, offs_d[None, :], is_in_MD, D)
            q_MD = q_MD.to(q_ptr.dtype.element_ty)
        else:
            q_MD = tl.load(q_ptr + q_offs_M[:, None] + offs_d[None, :], mask=is_in_MD, other=0.0)
        table_ptr = tables_ptr + leader.to(tl.int64) * stride_table
        top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total_M = tl.zeros([BLOCK_M], tl.float32)
        acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(low, high, BLOCK_N):
            keys_N = start + tl.arange(0, BLOCK_N)
            is_key_N = keys_N < high
            pages_N = tl.load(table_ptr + keys_N // PAGE, mask=is_key_N, other=0).to(tl.int64)
            offs_ND = (pages_N * stride_block + (keys_N % PAGE) * D)[:, None] + offs_d[None, :]
            is_in_ND = is_key_N[:, None] & (offs_d < D)[None, :]
            k_ND = tl.load(k_head_ptr + offs_ND, mask=is_in_ND, other=0.0).to(q_MD.dtype)
            v_ND = tl.load(v_head_ptr + offs_ND, mask=is_in_ND, other=0.0).to(q_MD.dtype)
            scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale_log2
            scores_MN = tl.where(is_key_N[None, :], scores_MN, float("-inf"))
            new_top_M = tl.maximum(top_M, tl.max(scores_MN, 1))
            weights_MN = tl.exp2(scores_MN - new_top_M[:, None])
            shrink_M = tl.exp2(top_M - new_top_M)
            total_M = total_M * shrink_M + tl.sum(weights_MN, 1)
            acc_MD = acc_MD * shrink_M[:, None]
            acc_MD = tl.dot(weights_MN.to(q_MD.dtype), v_ND, acc_MD, input_precision="ieee")
            top_M = new_top_M
        lse_M = tl.where(high > low, top_M + tl.log2(total_M), float("-inf"))
        siblings_M = siblings_M.to(tl.int64)
        tl.store(lse_ptr + siblings_M * stride_ls + heads_M * stride_lh + split, lse_M, mask=is_row_M)
        if high > low:
            part_offs_M = siblings_M * stride_ps + heads_M * stride_ph + split * D
            tl.store(part_ptr + part_offs_M[:, None] + offs_d[None, :], acc_MD / total_M[:, None], mask=is_in_MD)


def siblings_per_tile(group: int) -> int:
    """Siblings that one program serves: at least 16 for groups of up to 8 heads."""
    return _block_rows(group) // group


def num_walkers(num_sequences: int, group: int) -> int:
    """Programs that share the list of leaders: as many as full tiles make of the sequences, twice over for runs that
    fill their tiles by half; of shorter ones a program takes several."""
    return min(num_sequences, 2 * -(-num_sequences // siblings_per_tile(group)))


def _block_rows(group: int) -> int:
    return 64 if group <= 4 else max(128, block_of(group))


def group_decode(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    part_SHPD: torch.Tensor,
    lse_SHP: torch.Tensor,
    cu_query_S1: torch.Tensor,
    context_lens_S: torch.Tensor,
    shared_lens_S: torch.Tensor,
    run_starts_S: torch.Tensor,
    leaders_S1: torch.Tensor,
    block_tables_SB: torch.Tensor,
    num_splits: int,
    scale: float,
    newest: Newest | None = None,
) -> None:
    """Fill splits 0 to ``num_splits`` for every sequence with a shared part.

    Args:
        q_THD: fp32, bf16 or fp16, the last axis contiguous; D up to 256.
        k_cache, v_cache: [num_blocks, K, block_size, D], contiguous.
        part_SHPD, lse_SHP: fp32, contiguous; outputs of the splits and their log-sum-exps to base 2.
        shared_lens_S: int32, leading positions that a sequence shares with its siblings (0: none); the sequence brings
            one token then.
        run_starts_S: int32, the first of the siblings that stand side by side and share the same length.
        leaders_S1: int32, the number of sequences that lead a tile of siblings_per_tile(H / K) siblings, then these.
        cu_query_S1, context_lens_S, block_tables_SB: int32, as in sagc_fast.ops.layouts.PagedLayout.
        newest: given when the queries are not rotated yet; they are of the contexts' last positions.
    """
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, page = k_cache.shape[1:3]
    num_sequences, group, width = len(shared_lens_S), num_heads // num_kv_heads, block_of(head_dim, 32)
    block_m = _block_rows(group)
    # Exact fp32 products run without tensor cores and keep their operands in registers.
    is_fp32 = q_THD.dtype == torch.float32
    block_n = 16 if is_fp32 else 32 if width * block_m > 128 * 64 else 64
    num_warps = 8 if is_fp32 or width > 64 or block_m > 64 else 4
    angles = (None, None) if newest is None else (newest.cos_PD2, newest.sin_PD2)
    if num_sequences:
        group_decode_kernel[(num_walkers(num_sequences, group), num_kv_heads, num_splits)](
            q_THD, k_cache, v_cache, part_SHPD, lse_SHP, *angles, cu_query_S1, context_lens_S, shared_lens_S,
            run_starts_S, leaders_S1, block_tables_SB, num_sequences, scale * LOG2E, *q_THD.stride()[:2],
            k_cache.stride(0), k_cache.stride(1), *part_SHPD.stride()[:2], *lse_SHP.stride()[:2],
            block_tables_SB.stride(0), 0 if newest is None else newest.cos_PD2.stride(0),
            ROTATES=newest is not None, GROUP=group, TILE=siblings_per_tile(group), PAGE=page, D=head_dim,
            BLOCK_D=width, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps, num_stages=1 if is_fp32 else 2,
        )  # fmt: skip
