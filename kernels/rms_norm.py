"""Root-mean-square norm of rows, with an optional residual added first; one row per program, one pass.

``weight * (x / rms(x)).to(dtype)`` with fp32 statistics and the rounding order of transformers (Zhang and Sennrich
2019, arXiv:1910.07467). Memory bound: a row is read once and written once (twice each with a residual).

Shape suffixes: T rows, E width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sagc_fast.kernels._launch import block_of


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, rstd_ptr, eps, stride_x, stride_r, width,
    HAS_RESIDUAL: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_E)
    is_in = offs < width
    x = tl.load(x_ptr + row * stride_x + offs, mask=is_in, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * stride_r + offs, mask=is_in, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + offs, rounded, mask=is_in)
        x = rounded.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    normed = (x * rstd).to(out_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + offs, (weight * normed).to(out_ptr.dtype.element_ty), mask=is_in)


def rms_norm(
    x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, residual_TE: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normed [T, E], ``residual + x`` or x itself, fp32 1 / rms [T] of what was normed).

    x and the residual have rows with a contiguous last axis and one dtype; E up to 16,384.
    """
    num_rows, width = x_TE.shape
    out_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    has_residual = residual_TE is not None
    sum_TE = torch.empty_like(out_TE) if has_residual else x_TE
    rstd_T = torch.empty(num_rows, dtype=torch.float32, device=x_TE.device)
    block = block_of(width)
    if num_rows:
        rms_norm_kernel[(num_rows,)](
            x_TE, residual_TE if has_residual else x_TE, weight_E, out_TE, sum_TE, rstd_T, eps, x_TE.stride(0),
            residual_TE.stride(0) if has_residual else 0, width,
            HAS_RESIDUAL=has_residual, BLOCK_E=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out_TE, sum_TE, rstd_T
