"""Attention of prefill chunks against the paged KV cache: several query tokens of a sequence at once, causal, GQA.

The chunk's own keys and values are in the cache already, so every query walks blocks of the cache from position 0 to
its own. Blocks of positions that the whole tile sees skip the mask.

Work per query token and head: 4 x D operations per key. Traffic: k and v of the context once per tile and head, and
the heads of a group meet in L2. Compute bound for chunks of a few hundred tokens.

Shape suffixes: T tokens of the step, S sequences, B block-table columns, H query heads, K kv heads, D head width,
M query tokens of a tile, N keys of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sagc_fast.kernels._launch import LOG2E, block_config, block_of, tuned_by_width


@triton.jit
def _walk(
    q_MD, k_ptr, v_ptr, table_ptr, acc_MD, top_M, total_M, low, high, context, positions_M, scale_log2, stride_block,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold cache positions [low, high) into the online softmax. MASKED: a row sees those up to its own position."""
    offs_d = tl.arange(0, BLOCK_D)
    for start in range(low, high, BLOCK_N):
        keys_N = start + tl.arange(0, BLOCK_N)
        # What lies past the context may hold anything, NaN included, so it is not read at all.
        is_key_N = keys_N < context
        pages_N = tl.load(table_ptr + keys_N // PAGE, mask=is_key_N, other=0).to(tl.int64)
        offs_ND = (pages_N * stride_block + (keys_N % PAGE) * D)[:, None] + offs_d[None, :]
        is_in_ND = is_key_N[:, None] & (offs_d < D)[None, :]
        k_ND = tl.load(k_ptr + offs_ND, mask=is_in_ND, other=0.0).to(q_MD.dtype)
        scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale_log2
        if MASKED:
            scores_MN = tl.where(keys_N[None, :] <= positions_M[:, None], scores_MN, float("-inf"))
        new_top_M = tl.maximum(top_M, tl.max(scores_MN, 1))  # finite: every row sees position 0
        weights_MN = tl.exp2(scores_MN - new_top_M[:, None])
        shrink_M = tl.exp2(top_M - new_top_M)
        v_ND = tl.load(v_ptr + offs_ND, mask=is_in_ND, other=0.0).to(q_MD.dtype)
        total_M = total_M * shrink_M + tl.sum(weights_MN, 1)
        acc_MD = acc_MD * shrink_M[:, None]
        acc_MD = tl.dot(weights_MN.to(q_MD.dtype), v_ND, acc_MD, input_precision="ieee")
        top_M = new_top_M
    return acc_MD, top_M, total_M


@triton.jit(do_not_specialize=["min_queries", "first_sequence", "stride_table"])
def paged_prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_query_ptr, context_ptr, tables_ptr, scale_log2,
    stride_qt, stride_qh, stride_block, stride_kvh, stride_ot, stride_oh, stride_table, min_queries,
    first_sequence,
    GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence = first_sequence + tl.program_id(1)
    head = tl.program_id(2)
    query_start = tl.load(cu_query_ptr + sequence)
    num_queries = tl.load(cu_query_ptr + sequence + 1) - query_start
    first = tl.program_id(0) * BLOCK_M
    if (num_queries < min_queries) | (first >= num_queries):
        return
    context = tl.load(context_ptr + sequence)
    cached = context - num_queries
    offs_m = first + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    rows_M1 = (query_start + offs_m).to(tl.int64)[:, None]
    is_in_MD = (offs_m < num_queries)[:, None] & (offs_d < D)[None, :]
    q_MD = tl.load(q_ptr + rows_M1 * stride_qt + head * stride_qh + offs_d[None, :], mask=is_in_MD, other=0.0)
    k_head_ptr = k_ptr + (head // GROUP) * stride_kvh
    v_head_ptr = v_ptr + (head // GROUP) * stride_kvh
    table_ptr = tables_ptr + sequence.to(tl.int64) * stride_table
    positions_M = cached + offs_m
    high = tl.minimum(cached + first + BLOCK_M, context)
    middle = (cached + first + 1) // BLOCK_N * BLOCK_N
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_MD, top_M, total_M = _walk(
        q_MD, k_head_ptr, v_head_ptr, table_ptr, acc_MD, top_M, total_M, 0, middle, context, positions_M, scale_log2,
        stride_block, PAGE, D, BLOCK_D, BLOCK_N, False,
    )  # fmt: skip
    acc_MD, top_M, total_M = _walk(
        q_MD, k_head_ptr, v_head_ptr, table_ptr, acc_MD, top_M, total_M, middle, high, context, positions_M, scale_log2,
        stride_block, PAGE, D, BLOCK_D, BLOCK_N, True,
    )  # fmt: skip
    out_MD = acc_MD / total_M[:, None]
    out_ptrs = out_ptr + rows_M1 * stride_ot + head * stride_oh + offs_d[None, :]
    tl.store(out_ptrs, out_MD.to(out_ptr.dtype.element_ty), mask=is_in_MD)


CONFIGS = {
    32: [block_config(128, 64, 8, 3), block_config(64, 64, 4, 3)],
    64: [block_config(128, 64, 8, 3), block_config(64, 64, 4, 3)],
    128: [block_config(128, 64, 8, 2), block_config(64, 64, 8, 2)],
    256: [block_config(64, 32, 8, 2)],
}
"""By padded head width; the first of each is what interpreter and ahead-of-time compilation use."""
FP32_CONFIGS = {
    32: block_config(32, 32, 4, 1),
    64: block_config(32, 32, 4, 1),
    128: block_config(32, 32, 8, 1),
    256: block_config(16, 32, 8, 1),
}
_tuned = tuned_by_width(paged_prefill_kernel, CONFIGS, FP32_CONFIGS)


def paged_prefill(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_THD: torch.Tensor,
    cu_query_S1: torch.Tensor,
    context_lens_S: torch.Tensor,
    block_tables_SB: torch.Tensor,
    max_query_len: int,
    scale: float,
    min_queries: int = 1,
    first_sequence: int = 0,
) -> None:
    """Write into ``out_THD`` the attention of every sequence that brings at least ``min_queries`` tokens.

    Args:
        q_THD: fp32, bf16 or fp16, the last axis contiguous; D up to 256.
        k_cache, v_cache: [num_blocks, K, block_size, D], contiguous; already hold this step's keys and values.
        cu_query_S1, context_lens_S, block_tables_SB: int32, as in sagc_fast.ops.layouts.PagedLayout.
        max_query_len: at least the longest query; it sizes the grid.
        first_sequence: those before it bring fewer than ``min_queries``. Each would have programs that return at once,
            as many as the longest query has tiles: with a chunk of 2,048 tokens beside 128 decode rows 50,000 a layer.
    """
    num_heads, head_dim = q_THD.shape[1:]
    num_sequences = len(context_lens_S) - first_sequence
    width = block_of(head_dim, 32)

    def grid(meta: dict) -> tuple[int, int, int]:
        return (triton.cdiv(max_query_len, meta["BLOCK_M"]), num_sequences, num_heads)

    if num_sequences > 0 and max_query_len:
        _tuned[width, q_THD.dtype == torch.float32][grid](
            q_THD, k_cache, v_cache, out_THD, cu_query_S1, context_lens_S, block_tables_SB, scale * LOG2E,
            *q_THD.stride()[:2], k_cache.stride(0), k_cache.stride(1), *out_THD.stride()[:2], block_tables_SB.stride(0),
            min_queries, first_sequence,
            GROUP=num_heads // k_cache.shape[1], PAGE=k_cache.shape[2], D=head_dim, BLOCK_D=width,
        )  # fmt: skip
