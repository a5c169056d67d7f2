"""Before a decode step on the device: how far each row attends and where its key and value go.

One thread per row; a handful of numbers each, so the launch is the cost and one launch is all there is. The state stays
on the device from step to step, so that a captured graph needs nothing from the host.

Shape suffixes: R rows, B block-table columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 64


@triton.jit(do_not_specialize=["stride_table", "num_rows", "scratch_slot"])
def place_rows_kernel(
    position_ptr, live_ptr, kept_ptr, shared_ptr, tables_ptr, context_ptr, slot_ptr, stride_table, num_rows,
    scratch_slot, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = rows < num_rows
    live = tl.load(live_ptr + rows, mask=is_in, other=0) * tl.load(kept_ptr + rows, mask=is_in, other=0)
    tl.store(live_ptr + rows, live, mask=is_in)
    position = tl.load(position_ptr + rows, mask=is_in, other=0)
    shared = tl.load(shared_ptr + rows, mask=is_in, other=0)
    context = tl.where(live > 0, (position + 1).to(tl.int32), shared * PAGE + 1)
    tl.store(context_ptr + rows, context, mask=is_in)
    table_ptrs = tables_ptr + rows.to(tl.int64) * stride_table + position // PAGE
    block = tl.load(table_ptrs, mask=is_in, other=0).to(tl.int64)
    slot = tl.where(live > 0, block * PAGE + position % PAGE, scratch_slot)
    tl.store(slot_ptr + rows, slot, mask=is_in)


def place_rows(
    position_R: torch.Tensor,
    is_live_R: torch.Tensor,
    is_kept_R: torch.Tensor,
    shared_blocks_R: torch.Tensor,
    block_tables_RB: torch.Tensor,
    context_R: torch.Tensor,
    slot_R: torch.Tensor,
    block_size: int,
    scratch_slot: int,
) -> None:
    """Write ``context_R`` (int32) and ``slot_R`` (int64), and take rows that are not kept out of ``is_live_R``.

    Args:
        position_R: int64, place of each row's newest token.
        is_live_R, is_kept_R, shared_blocks_R: int32.
        block_tables_RB: int32, the last axis contiguous.
        scratch_slot: where rows that are over write.
    """
    num_rows = len(position_R)
    if num_rows:
        place_rows_kernel[(triton.cdiv(num_rows, BLOCK_ROWS),)](
            position_R, is_live_R, is_kept_R, shared_blocks_R, block_tables_RB, context_R, slot_R,
            block_tables_RB.stride(0), num_rows, scratch_slot, PAGE=block_size, BLOCK=BLOCK_ROWS, num_warps=2,
        )  # fmt: skip
