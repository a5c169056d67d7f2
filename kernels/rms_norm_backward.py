"""Backward of rms_norm: the gradient of the rows, and of the weight in one partial sum per program.

With n = x * rstd and g = grad * weight: grad_x = rstd * (g - n * mean(g * n)), to which the gradient that reaches the
residual stream directly is added. Programs walk rows in strides and keep the weight's gradient in fp32 registers; the
partial sums are added in a fixed order, so the result repeats to the bit. Memory bound: x and grad are read once,
grad_x is written once. Shape suffixes: T rows, E width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sagc_fast.kernels._launch import block_of, num_processors


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_backward_kernel(
    x_ptr, weight_ptr, rstd_ptr, grad_ptr, grad_sum_ptr, grad_x_ptr, parts_ptr, num_rows, stride_x, stride_g, stride_s,
    width,
    HAS_GRAD_SUM: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, BLOCK_E)
    is_in = offs < width
    weight = tl.load(weight_ptr + offs, mask=is_in, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK_E], tl.float32)
    for index in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.zeros([], tl.int64) + index
        rstd = tl.load(rstd_ptr + row)
        n = tl.load(x_ptr + row * stride_x + offs, mask=is_in, other=0.0).to(tl.float32) * rstd
        grad = tl.load(grad_ptr + row * stride_g + offs, mask=is_in, other=0.0).to(tl.float32)
        grad_weight += grad * n.to(grad_x_ptr.dtype.element_ty).to(tl.float32)
        g = grad * weight
        grad_x = rstd * (g - n * (tl.sum(g * n, 0) / width))
        if HAS_GRAD_SUM:
            grad_x += tl.load(grad_sum_ptr + row * stride_s + offs, mask=is_in, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + row * width + offs, grad_x.to(grad_x_ptr.dtype.element_ty), mask=is_in)
    tl.store(parts_ptr + tl.program_id(0).to(tl.int64) * width + offs, grad_weight, mask=is_in)


def rms_norm_backward(
    x_TE: torch.Tensor,
    weight_E: torch.Tensor,
    rstd_T: torch.Tensor,
    grad_TE: torch.Tensor,
    grad_sum_TE: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of x [T, E] in its dtype, gradient of the weight [E] in its dtype).

    Args:
        x_TE: what was normed (with a residual: the sum).
        rstd_T: from rms_norm.
        grad_sum_TE: gradient of the sum by other ways than the norm; with a residual, x and residual both get the
            result.
    """
    num_rows, width = x_TE.shape
    grad_x_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    num_programs = max(1, min(num_rows, 2 * num_processors(x_TE.device)))
    parts = torch.empty(num_programs, width, dtype=torch.float32, device=x_TE.device)
    has_grad_sum = grad_sum_TE is not None
    block = block_of(width)
    rms_norm_backward_kernel[(num_programs,)](
        x_TE, weight_E, rstd_T, grad_TE, grad_sum_TE if has_grad_sum else grad_TE, grad_x_TE, parts, num_rows,
        x_TE.stride(0), grad_TE.stride(0), grad_sum_TE.stride(0) if has_grad_sum else 0, width,
        HAS_GRAD_SUM=has_grad_sum, BLOCK_E=block, num_warps=min(16, max(1, block // 128)),
    )  # fmt: skip
    return grad_x_TE, parts.sum(0).to(weight_E.dtype)
