"""Add the fp32 slots that several work items of varlen_backward_kv left for one block of keys, in a fixed order.

Memory bound: reads num_slots x 2 x TILE_KEYS x K x D x 4 bytes once. Shape suffixes as in varlen_forward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def reduce_kv_kernel(
    slots_ptr, grad_k_ptr, grad_v_ptr, sums_ptr, width,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sum_ptr = sums_ptr + 4 * tl.program_id(0)
    row = tl.program_id(1)
    first = tl.load(sum_ptr)
    if first + row >= tl.load(sum_ptr + 1):
        return
    first_slot = tl.load(sum_ptr + 2).to(tl.int64)
    num_slots = tl.load(sum_ptr + 3)
    for start in range(0, width, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        is_in = offs < width
        grad_k = tl.zeros([BLOCK], tl.float32)
        grad_v = tl.zeros([BLOCK], tl.float32)
        for index in range(num_slots):
            slot_ptr = slots_ptr + ((first_slot + index) * 2 * TILE + row) * width + offs
            grad_k += tl.load(slot_ptr, mask=is_in, other=0.0)
            grad_v += tl.load(slot_ptr + TILE * width, mask=is_in, other=0.0)
        out_offs = (first + row).to(tl.int64) * width + offs
        tl.store(grad_k_ptr + out_offs, grad_k.to(grad_k_ptr.dtype.element_ty), mask=is_in)
        tl.store(grad_v_ptr + out_offs, grad_v.to(grad_v_ptr.dtype.element_ty), mask=is_in)


def reduce_kv(slots: torch.Tensor, grad_k_TKD: torch.Tensor, grad_v_TKD: torch.Tensor, sums: torch.Tensor) -> None:
    """Fill the rows of ``grad_k_TKD`` and ``grad_v_TKD`` (contiguous) that ``sums`` names.

    Args:
        slots: fp32 [num_slots, 2, TILE_KEYS, K, D] from varlen_backward_kv.
        sums: int32 [num_sums, 4]: first key, end key, first slot, number of slots.
    """
    if len(sums):
        tile, width = slots.shape[2], grad_k_TKD.stride(0)
        reduce_kv_kernel[(len(sums), tile)](
            slots, grad_k_TKD, grad_v_TKD, sums, width, TILE=tile, BLOCK=1024, num_warps=4
        )
