"""Attention of a packed batch of groups, backward: the gradient of the queries.

The mirror of varlen_forward: the same tiles, walks and masks. Weights are recomputed from the saved log-sum-exps (Dao
2023, arXiv:2307.08691, algorithm 2); on the way the kernel writes delta, the row sums of grad_out x out, which the
kernel for keys and values needs, so it is launched first. Every sum has one order: the result repeats to the bit.

Work per query row, head and key: 6 x D operations. Shape suffixes as in varlen_forward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sagc_fast.kernels._launch import LOG2E, block_config, block_of, tuned_by_width

TILE_ROWS = 128
"""Rows of a planned tile, as in varlen_forward."""


@triton.jit
def _walk(
    q_MD, grad_MD, k_ptr, v_ptr, acc_MD, lse_M, delta_M, low, high, low_M, high_M, scale_log2, stride_kt, stride_vt,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the share of keys [low, high) to the queries' gradient (before the scale)."""
    offs_d = tl.arange(0, BLOCK_D)
    for start in range(low, high, BLOCK_N):
        keys_N = start + tl.arange(0, BLOCK_N)
        is_in_ND = (keys_N < high)[:, None] & (offs_d < D)[None, :]
        rows_N1 = keys_N.to(tl.int64)[:, None]
        if MASKED or D != BLOCK_D:
            k_ND = tl.load(k_ptr + rows_N1 * stride_kt + offs_d[None, :], mask=is_in_ND, other=0.0)
            v_ND = tl.load(v_ptr + rows_N1 * stride_vt + offs_d[None, :], mask=is_in_ND, other=0.0)
        else:
            k_ND = tl.load(k_ptr + rows_N1 * stride_kt + offs_d[None, :])
            v_ND = tl.load(v_ptr + rows_N1 * stride_vt + offs_d[None, :])
        scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale_log2
        weights_MN = tl.exp2(scores_MN - lse_M[:, None])
        if MASKED:
            is_seen_MN = (keys_N[None, :] >= low_M[:, None]) & (keys_N[None, :] < high_M[:, None])
            weights_MN = tl.where(is_seen_MN, weights_MN, 0.0)
        grad_weights_MN = tl.dot(grad_MD, tl.trans(v_ND), input_precision="ieee")
        grad_scores_MN = weights_MN * (grad_weights_MN - delta_M[:, None])
        acc_MD = tl.dot(grad_scores_MN.to(k_ND.dtype), k_ND, acc_MD, input_precision="ieee")
    return acc_MD


@triton.jit(do_not_specialize=["stride_lh"])
def varlen_backward_q_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, lse_ptr, delta_ptr, grad_q_ptr, tiles_ptr, own_start_ptr, scale, scale_log2,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh, stride_gt, stride_gh,
    stride_lh,
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
    is_row_M = rows_M < end
    rows_M1 = rows_M.to(tl.int64)[:, None]
    offs_d = tl.arange(0, BLOCK_D)
    is_in_MD = is_row_M[:, None] & (offs_d < D)[None, :]
    last = tl.minimum(first + BLOCK_M, end) - 1
    own_low = tl.load(own_start_ptr + first)
    is_one_segment = tl.load(own_start_ptr + last) == own_low
    own_start_M = tl.load(own_start_ptr + rows_M, mask=is_row_M, other=0)

    out_offs_MD = rows_M1 * stride_ot + head * stride_oh + offs_d[None, :]
    grad_MD = tl.load(grad_ptr + rows_M1 * stride_gt + head * stride_gh + offs_d[None, :], mask=is_in_MD, other=0.0)
    out_MD = tl.load(out_ptr + out_offs_MD, mask=is_in_MD, other=0.0)
    delta_M = tl.sum(grad_MD.to(tl.float32) * out_MD.to(tl.float32), 1)
    tl.store(delta_ptr + head * stride_lh + rows_M, delta_M, mask=is_row_M)
    q_MD = tl.load(q_ptr + rows_M1 * stride_qt + head * stride_qh + offs_d[None, :], mask=is_in_MD, other=0.0)
    lse_M = tl.load(lse_ptr + head * stride_lh + rows_M, mask=is_row_M, other=float("inf"))
    k_head_ptr = k_ptr + (head // GROUP) * stride_kh
    v_head_ptr = v_ptr + (head // GROUP) * stride_vh
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for phase in range(2):  # the shared prompt, then the rows' own segments
        is_own = phase == 1
        low = tl.where(is_own, own_low, prompt_start)
        high = tl.where(is_own, last + 1, prompt_end)
        num_unmasked = tl.where(is_own, tl.where(is_one_segment, first - own_low, 0), prompt_end - prompt_start)
        middle = low + num_unmasked // BLOCK_N * BLOCK_N
        low_M = tl.where(is_own, own_start_M, prompt_start)
        high_M = tl.where(is_own, rows_M + 1, prompt_end)
        acc_MD = _walk(
            q_MD, grad_MD, k_head_ptr, v_head_ptr, acc_MD, lse_M, delta_M, low, middle, low_M, high_M, scale_log2,
            stride_kt, stride_vt, D, BLOCK_D, BLOCK_N, False,
        )  # fmt: skip
        acc_MD = _walk(
            q_MD, grad_MD, k_head_ptr, v_head_ptr, acc_MD, lse_M, delta_M, middle, high, low_M, high_M, scale_log2,
            stride_kt, stride_vt, D, BLOCK_D, BLOCK_N, True,
        )  # fmt: skip
    tl.store(grad_q_ptr + out_offs_MD, (acc_MD * scale).to(grad_q_ptr.dtype.element_ty), mask=is_in_MD)


CONFIGS = {
    32: [block_config(64, 64, 4, 3), block_config(128, 64, 8, 3)],
    64: [block_config(64, 64, 4, 3), block_config(128, 64, 8, 3)],
    128: [block_config(64, 64, 8, 2), block_config(64, 32, 4, 3)],
    256: [block_config(64, 32, 8, 2)],
}
"""By padded head width; the first of each is what interpreter and ahead-of-time compilation use."""
FP32_CONFIGS = {
    32: block_config(32, 32, 4, 1),
    64: block_config(32, 32, 8, 1),
    128: block_config(16, 32, 8, 1),
    256: block_config(16, 16, 8, 1),
}
_tuned = tuned_by_width(varlen_backward_q_kernel, CONFIGS, FP32_CONFIGS)


def varlen_backward_q(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    out_THD: torch.Tensor,
    grad_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    tiles: torch.Tensor,
    own_start_T: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of q [T, H, D] in its dtype, fp32 delta [H, T]); zero for rows that no tile names.

    Args:
        out_THD, lse_HT: contiguous, from :func:`sagc_fast.kernels.varlen_forward.varlen_forward`, like the other
            arguments.
        grad_THD: gradient of the output, the last axis contiguous.
    """
    num_heads, head_dim = q_THD.shape[1:]
    grad_q_THD = torch.zeros_like(out_THD)
    delta_HT = torch.zeros_like(lse_HT)
    width = block_of(head_dim, 32)

    def grid(meta: dict) -> tuple[int, int]:
        return (len(tiles) * (TILE_ROWS // meta["BLOCK_M"]), num_heads)

    if len(tiles):
        _tuned[width, q_THD.dtype == torch.float32][grid](
            q_THD, k_TKD, v_TKD, out_THD, grad_THD, lse_HT, delta_HT, grad_q_THD, tiles, own_start_T, scale,
            scale * LOG2E, *q_THD.stride()[:2], *k_TKD.stride()[:2], *v_TKD.stride()[:2], *out_THD.stride()[:2],
            *grad_THD.stride()[:2], lse_HT.stride(0),
            GROUP=num_heads // k_TKD.shape[1], D=head_dim, BLOCK_D=width, TILE=TILE_ROWS,
        )  # fmt: skip
    return grad_q_THD, delta_HT
