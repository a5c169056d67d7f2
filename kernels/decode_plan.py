"""Who of a step's sequences decodes over a prompt that siblings share, and which sequences lead a tile of siblings.

One program walks all sequences in blocks, once per step for all layers. A handful of numbers each, so the launch is the
cost, and one launch is all there is (torch takes a dozen).

Shape suffixes: S sequences; M, N the sequences of a block, as rows and columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_SEQUENCES = 64


@triton.jit
def _shared_length(cu_query_ptr, group_ptr, shared_ptr, rows, is_in, PAGE: tl.constexpr):
    """Positions that a sequence reads together with its siblings: none unless it brings exactly one token."""
    start = tl.load(cu_query_ptr + rows, mask=is_in, other=0)
    num_queries = tl.load(cu_query_ptr + rows + 1, mask=is_in, other=0) - start
    group = tl.load(group_ptr + rows, mask=is_in, other=-1)
    shared = tl.load(shared_ptr + rows, mask=is_in, other=0)
    return tl.where((num_queries == 1) & (group >= 0), shared * PAGE, 0), group


@triton.jit(do_not_specialize=["num_sequences"])
def decode_plan_kernel(
    cu_query_ptr, group_ptr, shared_ptr, lens_ptr, starts_ptr, leaders_ptr, num_sequences,
    PAGE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, BLOCK)
    start_before = tl.zeros([], tl.int32)
    num_leaders = tl.zeros([], tl.int32)
    for begin in range(0, num_sequences, BLOCK):
        rows_N = begin + offs
        is_in_N = rows_N < num_sequences
        length_N, group_N = _shared_length(cu_query_ptr, group_ptr, shared_ptr, rows_N, is_in_N, PAGE)
        before_N, group_before_N = _shared_length(
            cu_query_ptr, group_ptr, shared_ptr, rows_N - 1, is_in_N & (rows_N > 0), PAGE
        )
        is_first_N = (rows_N == 0) | (group_N != group_before_N) | (length_N != before_N) | (length_N == 0)
        first_N = tl.where(is_first_N & is_in_N, rows_N, start_before)
        # The last first one up to each: rows rise, so the largest.
        start_M = tl.max(tl.where(offs[None, :] <= offs[:, None], first_N[None, :], 0), 1)
        tl.store(lens_ptr + rows_N, length_N, mask=is_in_N)
        rows_M = begin + offs
        tl.store(starts_ptr + rows_M, start_M, mask=rows_M < num_sequences)
        start_before = tl.max(start_M, 0)
        # The length once more, in the layout of the rows.
        length_M, _ = _shared_length(cu_query_ptr, group_ptr, shared_ptr, rows_M, rows_M < num_sequences, PAGE)
        is_leader_M = (length_M > 0) & ((rows_M - start_M) % TILE == 0)
        place_M = num_leaders + tl.cumsum(is_leader_M.to(tl.int32), 0)
        tl.store(leaders_ptr + place_M, rows_M, mask=is_leader_M)
        num_leaders += tl.sum(is_leader_M.to(tl.int32), 0)
    tl.store(leaders_ptr, num_leaders)


def decode_plan(
    cu_query_S1: torch.Tensor, share_group_S: torch.Tensor, shared_blocks_S: torch.Tensor, page: int, tile: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(leading positions that a sequence shares with its siblings or 0, first sequence of its run), both int32 [S], and
    int32 [S + 1]: the number of leaders and then the leaders, rising; what follows them is undefined.

    A run are neighbours of one share group and one shared length; a sequence without a shared part is one by itself.
    Every ``tile``-th sequence of a run with a shared part leads.

    Args:
        cu_query_S1, share_group_S, shared_blocks_S: int32, contiguous, as in sagc_fast.ops.layouts.PagedLayout.
        page: positions of a block.
    """
    num_sequences = len(share_group_S)
    lens_S, starts_S, leaders_S1 = (
        torch.empty(size, dtype=torch.int32, device=share_group_S.device)
        for size in (num_sequences, num_sequences, num_sequences + 1)
    )
    if num_sequences:
        decode_plan_kernel[(1,)](
            cu_query_S1, share_group_S, shared_blocks_S, lens_S, starts_S, leaders_S1, num_sequences, PAGE=page,
            TILE=tile, BLOCK=BLOCK_SEQUENCES, num_warps=4,
        )  # fmt: skip
    return lens_S, starts_S, leaders_S1
