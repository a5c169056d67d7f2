"""The next decode step's metadata, rows that are over left out: one program per row of the result.

Every program counts the live rows itself (a byte each, from L2), so that none waits for another, finds the slot that
comes to its place, and copies that slot's block table. Rows keep their order. The results must not overlap the inputs.
Shape suffixes: C places in row order, S slots, B block-table columns, R rows of the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 1024
BLOCK_COLUMNS = 256


@triton.jit(do_not_specialize=["capacity", "num_columns", "padding_slot"])
def pack_decode_rows_kernel(
    rows_ptr, num_rows_ptr, is_over_ptr, num_computed_ptr, tables_ptr, share_ptr, shared_ptr,
    out_rows_ptr, out_num_rows_ptr, out_positions_ptr, out_slots_ptr, out_context_ptr, out_cu_ptr, out_tables_ptr,
    out_share_ptr, out_shared_ptr, capacity, num_columns, padding_slot,
    PAGE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    num_rows = tl.minimum(tl.load(num_rows_ptr), capacity)
    num_live = tl.zeros([], tl.int32)
    slot = tl.zeros([], tl.int32)
    for start in range(0, num_rows, BLOCK_C):
        offs_c = start + tl.arange(0, BLOCK_C)
        slots = tl.load(rows_ptr + offs_c, mask=offs_c < num_rows, other=-1)
        is_over = tl.load(is_over_ptr + slots, mask=slots >= 0, other=1)
        is_live = (is_over == 0).to(tl.int32)
        rank = num_live + tl.cumsum(is_live, 0) - 1
        slot += tl.sum(tl.where((is_live > 0) & (rank == row), slots, 0), 0)
        num_live += tl.sum(is_live, 0)
    is_row = row < num_live
    slot = slot.to(tl.int64)
    position = tl.load(num_computed_ptr + slot, mask=is_row, other=0)
    used = tl.where(is_row, position // PAGE + 1, 0)
    for start in range(0, num_columns, BLOCK_B):
        columns = start + tl.arange(0, BLOCK_B)
        blocks = tl.load(tables_ptr + slot * num_columns + columns, mask=columns < used, other=0)
        tl.store(out_tables_ptr + row.to(tl.int64) * num_columns + columns, blocks, mask=columns < num_columns)
    block = tl.load(tables_ptr + slot * num_columns + used - 1, mask=is_row, other=0).to(tl.int64)
    tl.store(out_rows_ptr + row, tl.where(is_row, slot, -1).to(tl.int32))
    tl.store(out_positions_ptr + row, position)
    tl.store(out_slots_ptr + row, tl.where(is_row, block * PAGE + position % PAGE, padding_slot))
    tl.store(out_context_ptr + row, tl.where(is_row, position + 1, 0).to(tl.int32))
    tl.store(out_cu_ptr + row + 1, tl.minimum(row + 1, num_live))
    tl.store(out_share_ptr + row, tl.load(share_ptr + slot, mask=is_row, other=-1))
    tl.store(out_shared_ptr + row, tl.load(shared_ptr + slot, mask=is_row, other=0))
    if row == 0:
        tl.store(out_num_rows_ptr, num_live)
        tl.store(out_cu_ptr, 0)


def pack_decode_rows(
    table: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, ...], block_size: int, padding_slot: int
) -> None:
    """Fill ``out`` from ``table``, both in the order of their fields in sagc_fast/ops/pack_rows.py; all contiguous."""
    capacity, num_columns, bucket = len(table[0]), table[4].shape[1], len(out[0])
    if bucket:
        pack_decode_rows_kernel[(bucket,)](
            *table, *out, capacity, num_columns, padding_slot,
            PAGE=block_size, BLOCK_C=BLOCK_ROWS, BLOCK_B=BLOCK_COLUMNS, num_warps=4,
        )  # fmt: skip
