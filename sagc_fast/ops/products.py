"""Dense products of training, in the dtype of their factors, at a bearable speed on every CPU.

On a CPU without units for bf16 or fp16, torch multiplies such matrices element by element: at 8 GFLOP/s forward and 2
in the gradient of x, where the same core does 75 in fp32 (one core of an AMD EPYC, Zen 3, torch 2.13). There the
factors are widened to fp32 block by block, multiplied, and the result is rounded once. Everywhere else these functions
are torch's.

Shape suffixes: T rows, K input width, N output width.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear as torch_linear

BLOCK_BYTES = 2 * 2**20
"""Memory of the fp32 copy of one block of a weight: a head of 50,000 rows is not copied as a whole."""


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` [T, N], differentiable."""
    if is_widened(x_TK):
        return _WidenedLinear.apply(x_TK, weight_NK, bias_N)
    return torch_linear(x_TK, weight_NK, bias_N)


def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``a @ b``, written to ``out`` where one is given. Not differentiable."""
    if not is_widened(a):
        return torch.mm(a, b, out=out)
    product = a.float() @ b.float()
    return product.to(a.dtype) if out is None else out.copy_(product)


def add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b``; a total in fp32 takes the product of narrower factors. Not differentiable."""
    if is_widened(a):
        a, b = a.to(total.dtype), b.to(total.dtype)
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def is_widened(x: torch.Tensor) -> bool:
    """Whether torch has no fast product for this dtype on this CPU."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and not _has_units(x.dtype)


@functools.cache
def _has_units(dtype: torch.dtype) -> bool:
    """What oneDNN says of the CPU; where it is not there to be asked, torch is left to its own ways."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return not hasattr(torch.ops.mkldnn, name) or getattr(torch.ops.mkldnn, name)()


class _WidenedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        wide_TK = x_TK.float()
        y_TN = x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])
        for rows in _blocks(weight_NK):
            bias_n = None if bias_N is None else bias_N[rows].float()
            y_TN[:, rows] = torch_linear(wide_TK, weight_NK[rows].float(), bias_n)
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TK, weight_NK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx_TK = torch.zeros(x_TK.shape) if needs_x else None
        dw_NK = torch.empty_like(weight_NK) if needs_weight else None
        wide_TK = x_TK.float() if needs_weight else None
        for rows in _blocks(weight_NK):
            dy_Tn = dy_TN[:, rows].float()
            if dx_TK is not None:
                dx_TK.addmm_(dy_Tn, weight_NK[rows].float())
            if dw_NK is not None:
                dw_NK[rows] = dy_Tn.t() @ wide_TK
        dx_TK = None if dx_TK is None else dx_TK.to(x_TK.dtype)
        return dx_TK, dw_NK, dy_TN.sum(0, dtype=torch.float32).to(dy_TN.dtype) if needs_bias else None


def _blocks(weight_NK: torch.Tensor) -> list[slice]:
    """Rows of the weight that are widened together."""
    num_rows, width = weight_NK.shape
    step = max(1, BLOCK_BYTES // (4 * width))
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
