"""Attention of a packed batch of groups, forward: causal, GQA, each prompt held once and seen by all its completions.

FlashAttention-2 (Dao 2023, arXiv:2307.08691) with one change: a program first walks the shared prompt of its rows, then
the rows' own segment, in one online softmax, so sharing needs no merge. A tile may cross from one completion into the
next of the same group (short completions would waste most of it otherwise): each row carries the row at which its own
segment begins, and blocks that all rows see whole skip the mask.

Work per query row and head: 4 x D operations for each key seen. Traffic: q, out once; k and v once per tile and head,
mostly from L2. Compute bound from about 300 rows per segment on.

Shape suffixes: T packed rows, H query heads, K kv heads, D head width, M rows of a tile, N keys of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sagc_fast.kernels._launch import LOG2E, block_config, block_of, tuned_by_width

TILE_ROWS = 128
"""Rows of a planned tile; a kernel's own tile divides it."""


@triton.jit
def _walk(
    q_MD, k_ptr, v_ptr, acc_MD, top_M, total_M, low, high, low_M, high_M, scale_log2, stride_kt, stride_vt,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold keys [low, high) into the online softmax. MASKED: row m sees keys [low_M, high_M) of them."""
    offs_d = tl.arange(0, BLOCK_D)
    for start in range(low, high, BLOCK_N):
        keys_N = start + tl.arange(0, BLOCK_N)
        is_in_ND = (keys_N < high)[:, None] & (offs_d < D)[None, :]
        rows_N1 = keys_N.to(tl.int64)[:, None]
        if MASKED or D != BLOCK_D:
            k_ND = tl.load(k_ptr + rows_N1 * stride_kt + offs_d[None, :], mask=is_in_ND, other=0.0)
        else:
            k_ND = tl.load(k_ptr + rows_N1 * stride_kt + offs_d[None, :])
        scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale_log2
        if MASKED:
            is_seen_MN = (keys_N[None, :] >= low_M[:, None]) & (keys_N[None, :] < high_M[:, None])
            scores_MN = tl.where(is_seen_MN, scores_MN, float("-inf"))
        new_top_M = tl.maximum(top_M, tl.max(scores_MN, 1))
        # A row that has seen no key yet would give inf - inf.
        base_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M) if MASKED else new_top_M
        weights_MN = tl.exp2(scores_MN - base_M[:, None])
        shrink_M = tl.exp2(top_M - base_M)
        if MASKED or D != BLOCK_D:
            v_ND = tl.load(v_ptr + rows_N1 * stride_vt + offs_d[None, :], mask=is_in_ND, other=0.0)
        else:
            v_ND = tl.load(v_ptr + rows_N1 * stride_vt + offs_d[None, :])
        total_M = total_M * shrink_M + tl.sum(weights_MN, 1)
        acc_MD = acc_MD * shrink_M[:, None]
        acc_MD = tl.dot(weights_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision="ieee")
        top_M = new_top_M
    return acc_MD, top_M, total_M


@triton.jit(do_not_specialize=["stride_lh"])
def varlen_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, tiles_ptr, own_start_ptr, scale_log2,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh, stride_lh,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = TILE // BLOCK_M
    tile = tl.program_id(0) // parts
    head = tl.program_id(1)
    first = tl.load(tiles_ptr + 4 * tile) + (tl.program_id(0) % parts) * BLOCK_M
    end = tl.load(tiles_ptr + 4 * tile + 1)
    if first >= end:
        return
    prompt_start = tl.load(tiles_ptr + 4 * tile + 2)
    prompt_end = tl.load(tiles_ptr + 4 * tile + 3)
    rows_M = first + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    is_in_MD = (rows_M < end)[:, None] & (offs_d < D)[None, :]
    last = tl.minimum(first + BLOCK_M, end) - 1
    own_low = tl.load(own_start_ptr + first)
    is_one_segment = tl.load(own_start_ptr + last) == own_low
    own_start_M = tl.load(own_start_ptr + rows_M, mask=rows_M < end, other=0)

    q_MD = tl.load(
        q_ptr + rows_M.to(tl.int64)[:, None] * stride_qt + head * stride_qh + offs_d[None, :], mask=is_in_MD, other=0.0
    )
    k_head_ptr = k_ptr + (head // GROUP) * stride_kh
    v_head_ptr = v_ptr + (head // GROUP) * stride_vh
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for phase in range(2):  # the shared prompt, then the rows' own segments
        is_own = phase == 1
        low = tl.where(is_own, own_low, prompt_start)
        high = tl.where(is_own, last + 1, prompt_end)
        num_unmasked = tl.where(is_own, tl.where(is_one_segment, first - own_low, 0), prompt_end - prompt_start)
        middle = low + num_unmasked // BLOCK_N * BLOCK_N
        low_M = tl.where(is_own, own_start_M, prompt_start)
        high_M = tl.where(is_own, rows_M + 1, prompt_end)
        acc_MD, top_M, total_M = _walk(
            q_MD, k_head_ptr, v_head_ptr, acc_MD, top_M, total_M, low, middle, low_M, high_M, scale_log2,
            stride_kt, stride_vt, D, BLOCK_D, BLOCK_N, False,
        )  # fmt: skip
        acc_MD, top_M, total_M = _walk(
            q_MD, k_head_ptr, v_head_ptr, acc_MD, top_M, total_M, middle, high, low_M, high_M, scale_log2,
            stride_kt, stride_vt, D, BLOCK_D, BLOCK_N, True,
        )  # fmt: skip
    out_MD = acc_MD / total_M[:, None]
    out_ptrs = out_ptr + rows_M.to(tl.int64)[:, None] * stride_ot + head * stride_oh + offs_d[None, :]
    tl.store(out_ptrs, out_MD.to(out_ptr.dtype.element_ty), mask=is_in_MD)
    tl.store(lse_ptr + head * stride_lh + rows_M, top_M + tl.log2(total_M), mask=rows_M < end)


CONFIGS = {
    32: [block_config(128, 64, 4, 3), block_config(64, 64, 4, 3)],
    64: [block_config(128, 64, 8, 3), block_config(64, 64, 4, 3)],
    128: [block_config(128, 64, 8, 3), block_config(64, 64, 4, 2)],
    256: [block_config(64, 32, 8, 2), block_config(64, 64, 8, 2)],
}
"""By padded head width; the first of each is what interpreter and ahead-of-time compilation use."""
FP32_CONFIGS = {
    32: block_config(32, 32, 4, 1),
    64: block_config(32, 32, 4, 1),
    128: block_config(32, 32, 8, 1),
    256: block_config(16, 32, 8, 1),
}
_tuned = tuned_by_width(varlen_forward_kernel, CONFIGS, FP32_CONFIGS)


def varlen_forward(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    tiles: torch.Tensor,
    own_start_T: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention output [T, H, D], fp32 log-sum-exps [H, T] to base 2) of the rows that tiles name; others are zero.

    Args:
        q_THD, k_TKD, v_TKD: one dtype, fp32, bf16 or fp16; the last axis contiguous; D up to 256.
        tiles: int32 [num_tiles, 4]: first row, end row (at most TILE_ROWS further), and the rows of the prompt that all
            of them see in whole, first and end (equal: none).
        own_start_T: int32, the row at which each row's own segment begins; segments follow each other within a tile.
    """
    num_rows, num_heads, head_dim = q_THD.shape
    out_THD = torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    lse_HT = torch.zeros(num_heads, num_rows, dtype=torch.float32, device=q_THD.device)
    width = block_of(head_dim, 32)

    def grid(meta: dict) -> tuple[int, int]:
        return (len(tiles) * (TILE_ROWS // meta["BLOCK_M"]), num_heads)

    if len(tiles):
        _tuned[width, q_THD.dtype == torch.float32][grid](
            q_THD, k_TKD, v_TKD, out_THD, lse_HT, tiles, own_start_T, scale * LOG2E,
            *q_THD.stride()[:2], *k_TKD.stride()[:2], *v_TKD.stride()[:2], *out_THD.stride()[:2], lse_HT.stride(0),
            GROUP=num_heads // k_TKD.shape[1], D=head_dim, BLOCK_D=width, TILE=TILE_ROWS,
        )  # fmt: skip
    return out_THD, lse_HT
