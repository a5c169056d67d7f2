"""Put the splits of a decode row together by their log-sum-exps: those of the shared prompt and the private ones.

Memory bound: reads the splits' fp32 outputs once, writes the row in its dtype. Shape suffixes: T tokens, S sequences,
H query heads, D head width, P splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sagc_fast.kernels._launch import block_of

MAX_SPLITS = 32
"""Of both kinds together. One block for any number of them, or the number, which follows from the contexts, would be
compiled in; what is not there is not read."""


@triton.jit(do_not_specialize=["stride_ls", "stride_lh", "num_shared_splits", "num_splits"])
def merge_splits_kernel(
    part_ptr, lse_ptr, out_ptr, cu_query_ptr, shared_ptr,
    stride_ps, stride_ph, stride_ls, stride_lh, stride_ot, stride_oh, num_shared_splits, num_splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(cu_query_ptr + sequence)
    if tl.load(cu_query_ptr + sequence + 1) - row != 1:
        return
    first = tl.where(tl.load(shared_ptr + sequence) > 0, 0, num_shared_splits)
    offs_p = tl.arange(0, BLOCK_P)
    offs_d = tl.arange(0, BLOCK_D)
    is_split_P = (offs_p >= first) & (offs_p < num_splits)
    lse_P = tl.load(lse_ptr + sequence * stride_ls + head * stride_lh + offs_p, mask=is_split_P, other=float("-inf"))
    weights_P = tl.exp2(lse_P - tl.max(lse_P, 0))
    # Splits without weight were never written.
    is_in_PD = (weights_P > 0)[:, None] & (offs_d < D)[None, :]
    part_ptrs = part_ptr + sequence * stride_ps + head * stride_ph + offs_p[:, None] * D + offs_d[None, :]
    part_PD = tl.load(part_ptrs, mask=is_in_PD, other=0.0)
    out_D = tl.sum(part_PD * weights_P[:, None], 0) / tl.sum(weights_P, 0)
    out_ptrs = out_ptr + row.to(tl.int64) * stride_ot + head * stride_oh + offs_d
    tl.store(out_ptrs, out_D.to(out_ptr.dtype.element_ty), mask=offs_d < D)


def merge_splits(
    part_SHPD: torch.Tensor,
    lse_SHP: torch.Tensor,
    out_THD: torch.Tensor,
    cu_query_S1: torch.Tensor,
    shared_lens_S: torch.Tensor,
    num_shared_splits: int,
) -> None:
    """Write the rows of all sequences that bring one token into ``out_THD``.

    Args:
        part_SHPD, lse_SHP: fp32, contiguous; the first ``num_shared_splits`` from group_decode, the rest from
            paged_decode.
        shared_lens_S: int32; where it is 0 the shared splits are ignored.
    """
    num_sequences, num_heads, num_splits, head_dim = part_SHPD.shape
    if num_splits > MAX_SPLITS:
        raise ValueError(f"merge_splits was given {num_splits} splits and merges at most {MAX_SPLITS} of them.")
    if num_sequences:
        merge_splits_kernel[(num_sequences, num_heads)](
            part_SHPD, lse_SHP, out_THD, cu_query_S1, shared_lens_S, *part_SHPD.stride()[:2], *lse_SHP.stride()[:2],
            *out_THD.stride()[:2], num_shared_splits, num_splits,
            D=head_dim, BLOCK_D=block_of(head_dim, 32), BLOCK_P=MAX_SPLITS, num_warps=4,
        )  # fmt: skip
