"""Attention of a packed batch of groups, backward: the gradients of keys and values.

A program owns a block of keys and walks the queries that see it: those of its own segments (causal, masked), then, for
keys of a prompt, the completions of the group (all of them). A prompt is seen by every completion of its group, far
more work than any other block has, so the plan cuts its queries into several work items whose sums go to fp32 slots
that reduce_kv adds in order. No atomics: the result repeats to the bit.

Work per key, query row and head: 8 x D operations. Traffic: k and v once per item; q, grad_out once per item and head.
Shape suffixes as in varlen_forward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sagc_fast.kernels._launch import LOG2E, block_config, block_of, tuned_by_width

TILE_KEYS = 128
"""Keys of a planned work item and rows of a slot; a kernel's own block divides it."""


@triton.jit(do_not_specialize=["stride_lh"])
def varlen_backward_kv_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, grad_k_ptr, grad_v_ptr, slots_ptr, items_ptr, own_start_ptr,
    scale, scale_log2,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh, stride_lh, stride_ot,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = TILE // BLOCK_N
    item_ptr = items_ptr + 8 * (tl.program_id(0) // parts)
    part = tl.program_id(0) % parts
    kv_head = tl.program_id(1)
    first = tl.load(item_ptr) + part * BLOCK_N
    end = tl.load(item_ptr + 1)
    if first >= end:
        return
    own_low = tl.load(item_ptr + 2)
    own_high = tl.load(item_ptr + 3)
    full_low = tl.load(item_ptr + 4)
    full_high = tl.load(item_ptr + 5)
    slot = tl.load(item_ptr + 6)
    own_low = tl.where(own_high > own_low, first, own_low)  # nobody before a key sees it
    keys_N = first + tl.arange(0, BLOCK_N)
    keys_N1 = keys_N.to(tl.int64)[:, None]
    offs_d = tl.arange(0, BLOCK_D)
    is_in_ND = (keys_N < end)[:, None] & (offs_d < D)[None, :]
    k_ND = tl.load(k_ptr + keys_N1 * stride_kt + kv_head * stride_kh + offs_d[None, :], mask=is_in_ND, other=0.0)
    v_ND = tl.load(v_ptr + keys_N1 * stride_vt + kv_head * stride_vh + offs_d[None, :], mask=is_in_ND, other=0.0)
    acc_k_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # One flat loop over the heads of the group and their blocks of queries: less code and fewer registers than a nest.
    num_own = tl.cdiv(own_high - own_low, BLOCK_M)
    num_blocks = num_own + tl.cdiv(full_high - full_low, BLOCK_M)
    for index in range(GROUP * num_blocks):
        head = kv_head * GROUP + index // num_blocks
        block = index % num_blocks
        is_own = block < num_own
        rows_M = tl.where(is_own, own_low + block * BLOCK_M, full_low + (block - num_own) * BLOCK_M)
        rows_M = rows_M + tl.arange(0, BLOCK_M)
        is_row_M = rows_M < tl.where(is_own, own_high, full_high)
        rows_M1 = rows_M.to(tl.int64)[:, None]
        is_in_MD = is_row_M[:, None] & (offs_d < D)[None, :]
        q_MD = tl.load(q_ptr + head * stride_qh + rows_M1 * stride_qt + offs_d[None, :], mask=is_in_MD, other=0.0)
        grad_ptrs = grad_ptr + head * stride_gh + rows_M1 * stride_gt + offs_d[None, :]
        grad_MD = tl.load(grad_ptrs, mask=is_in_MD, other=0.0)
        # An infinite log-sum-exp makes the weights of rows past the end nought.
        lse_M = tl.load(lse_ptr + head * stride_lh + rows_M, mask=is_row_M, other=float("inf"))
        delta_M = tl.load(delta_ptr + head * stride_lh + rows_M, mask=is_row_M, other=0.0)
        low_M = tl.where(is_own, tl.load(own_start_ptr + rows_M, mask=is_row_M, other=0), 0)
        high_M = tl.where(is_own, rows_M, 0x7FFFFFFF)
        scores_NM = tl.dot(k_ND, tl.trans(q_MD), input_precision="ieee") * scale_log2
        weights_NM = tl.exp2(scores_NM - lse_M[None, :])
        is_seen_NM = (keys_N[:, None] >= low_M[None, :]) & (keys_N[:, None] <= high_M[None, :])
        weights_NM = tl.where(is_seen_NM, weights_NM, 0.0)
        acc_v_ND = tl.dot(weights_NM.to(grad_MD.dtype), grad_MD, acc_v_ND, input_precision="ieee")
        grad_weights_NM = tl.dot(v_ND, tl.trans(grad_MD), input_precision="ieee")
        grad_scores_NM = weights_NM * (grad_weights_NM - delta_M[None, :])
        acc_k_ND = tl.dot(grad_scores_NM.to(q_MD.dtype), q_MD, acc_k_ND, input_precision="ieee")
    acc_k_ND *= scale
    if slot < 0:
        out_offs_ND = keys_N1 * stride_ot + kv_head * D + offs_d[None, :]
        tl.store(grad_k_ptr + out_offs_ND, acc_k_ND.to(grad_k_ptr.dtype.element_ty), mask=is_in_ND)
        tl.store(grad_v_ptr + out_offs_ND, acc_v_ND.to(grad_v_ptr.dtype.element_ty), mask=is_in_ND)
    else:
        # A slot is [2, TILE, K, D]: keys' part, then values'.
        places_N1 = (slot.to(tl.int64) * 2 * TILE + part * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
        slot_offs_ND = places_N1 * stride_ot + kv_head * D + offs_d[None, :]
        tl.store(slots_ptr + slot_offs_ND, acc_k_ND, mask=is_in_ND)
        tl.store(slots_ptr + TILE * stride_ot + slot_offs_ND, acc_v_ND, mask=is_in_ND)


CONFIGS = {
    32: [block_config(32, 64, 4, 3), block_config(32, 128, 8, 2)],
    64: [block_config(32, 128, 8, 2), block_config(32, 64, 4, 3)],
    128: [block_config(64, 64, 8, 2), block_config(32, 64, 8, 2)],
    256: [block_config(32, 32, 8, 1)],
}
"""By padded head width; the first of each is what interpreter and ahead-of-time compilation use."""
FP32_CONFIGS = {
    32: block_config(32, 32, 4, 1),
    64: block_config(32, 32, 8, 1),
    128: block_config(16, 32, 8, 1),
    256: block_config(16, 32, 8, 1),
}
_tuned = tuned_by_width(varlen_backward_kv_kernel, CONFIGS, FP32_CONFIGS)


def varlen_backward_kv(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    grad_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    delta_HT: torch.Tensor,
    items: torch.Tensor,
    num_slots: int,
    own_start_T: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gradient of k, gradient of v, both [T, K, D] in their dtype, fp32 slots [num_slots, 2, TILE_KEYS, K, D]).

    Keys whose items have slots come back as zeros, for reduce_kv to fill.

    Args:
        lse_HT, delta_HT: from varlen_forward and varlen_backward_q.
        items: int32 [num_items, 8]: first key, end key (at most TILE_KEYS further); query rows of the keys' own
            segments, first and end (equal: none; else from the first key on); query rows that see every key, first and
            end; slot or -1; unused.
    """
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads = k_TKD.shape[1]
    grad_k_TKD, grad_v_TKD = (torch.zeros(k_TKD.shape, dtype=k_TKD.dtype, device=k_TKD.device) for _ in "kv")
    slots = torch.empty(num_slots, 2, TILE_KEYS, num_kv_heads, head_dim, dtype=torch.float32, device=k_TKD.device)
    width = block_of(head_dim, 32)

    def grid(meta: dict) -> tuple[int, int]:
        return (len(items) * (TILE_KEYS // meta["BLOCK_N"]), num_kv_heads)

    if len(items):
        _tuned[width, q_THD.dtype == torch.float32][grid](
            q_THD, k_TKD, v_TKD, grad_THD, lse_HT, delta_HT, grad_k_TKD, grad_v_TKD, slots, items, own_start_T, scale,
            scale * LOG2E, *q_THD.stride()[:2], *k_TKD.stride()[:2], *v_TKD.stride()[:2], *grad_THD.stride()[:2],
            lse_HT.stride(0), grad_k_TKD.stride(0),
            GROUP=num_heads // num_kv_heads, D=head_dim, BLOCK_D=width, TILE=TILE_KEYS,
        )  # fmt: skip
    return grad_k_TKD, grad_v_TKD, slots
