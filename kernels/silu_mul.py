"""SwiGLU's gate: ``silu(gate) * up`` of a fused [T, 2F] projection (Shazeer 2020, arXiv:2002.05202).

fp32 inside, silu rounded before the product as in the plain version. Memory bound: 3 x F elements per token.
Shape suffixes: T tokens, F half of the fused width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = offs < width
    gate = tl.load(gate_up_ptr + row * stride + offs, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + offs, mask=is_in, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + offs, (silu * up).to(out_ptr.dtype.element_ty), mask=is_in)


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """[T, F] in the dtype of the argument, whose last axis is contiguous."""
    num_rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = torch.empty(num_rows, width, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if num_rows:
        silu_mul_kernel[(num_rows, triton.cdiv(width, 1024))](
            gate_up_T2F, out_TF, gate_up_T2F.stride(0), width, BLOCK=1024, num_warps=4
        )
    return out_TF
