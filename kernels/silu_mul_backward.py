"""Backward of silu_mul; the gate's sigmoid is computed again, so the forward pass keeps its input alone.

With s = sigmoid(gate): grad_gate = grad * up * s * (1 + gate * (1 - s)), grad_up = grad * silu(gate). Memory bound:
5 x F elements per token. Shape suffixes: T tokens, F half of the fused width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def silu_mul_backward_kernel(gate_up_ptr, grad_ptr, out_ptr, stride, stride_g, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = offs < width
    gate = tl.load(gate_up_ptr + row * stride + offs, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + offs, mask=is_in, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * stride_g + offs, mask=is_in, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(out_ptr + row * 2 * width + offs, grad_gate.to(out_ptr.dtype.element_ty), mask=is_in)
    grad_up = grad * gate * sigmoid
    tl.store(out_ptr + row * 2 * width + width + offs, grad_up.to(out_ptr.dtype.element_ty), mask=is_in)


def silu_mul_backward(gate_up_T2F: torch.Tensor, grad_TF: torch.Tensor) -> torch.Tensor:
    """Gradient [T, 2F] of the fused projection; both arguments have a contiguous last axis."""
    num_rows, width = grad_TF.shape
    out_T2F = torch.empty(num_rows, 2 * width, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if num_rows:
        silu_mul_backward_kernel[(num_rows, triton.cdiv(width, 1024))](
            gate_up_T2F, grad_TF, out_T2F, gate_up_T2F.stride(0), grad_TF.stride(0), width, BLOCK=1024, num_warps=4
        )
    return out_T2F
