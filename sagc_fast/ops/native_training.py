"""What the native operators need for training: gradients, fake registrations, and the operators that only training has.

Imported by :mod:`sagc_fast.ops.native` once the library is loaded. ``rms_norm``, ``add_rms_norm``, ``silu_mul``,
``rotary_split`` and ``varlen_attention`` are differentiable as registered operators, once; their backward operators
have no gradient of their own. Sums over tokens are made of parts cut by the sizes alone, so gradients repeat to the bit
with any number of threads.

Shape suffixes as in reference.py and varlen.py; S spans, G groups.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from sagc_fast.ops.layouts import PackedLayout

_ops = torch.ops.sagc_fast
_Grad = torch.Tensor | None


def rotary_split(
    qkv_TX: torch.Tensor, cos_TD2: torch.Tensor, sin_TD2: torch.Tensor, num_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _ops.rotary_split(qkv_TX.contiguous(), cos_TD2, sin_TD2, num_heads, num_kv_heads)


def varlen_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layout: PackedLayout, scale: float
) -> torch.Tensor:
    """q, k and v may be slices of one fused projection; no copy is made of the prompt, and no row is padded."""
    return _ops.varlen_attention(q_THD, k_TKD, v_TKD, *_span_tensors(layout), scale)[0]


def _span_tensors(layout: PackedLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 spans [S, 2], prompt before completions group by group, and the first span of each group [G + 1]; the same
    for every layer, so they are kept with the layout."""
    tensors = layout.__dict__.get("_span_tensors")
    if tensors is None:
        groups = [(p, *c) for p, c in zip(layout.prompt_spans, layout.completion_spans, strict=True)]
        spans_S2 = torch.tensor([span for group in groups for span in group], dtype=torch.int64).view(-1, 2)
        groups_G1 = torch.tensor([0, *accumulate(map(len, groups))], dtype=torch.int64)
        tensors = layout.__dict__["_span_tensors"] = (spans_S2, groups_G1)
    return tensors


def logits_stats(
    logits_nV: torch.Tensor, targets_n: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-prob of the target, log-sum-exp, entropy) of each row of logits / temperature, fp32."""
    return _ops.logits_stats(logits_nV, targets_n, temperature)


def logits_grad_(
    logits_nv: torch.Tensor,
    targets_n: torch.Tensor,
    lse_n: torch.Tensor,
    entropy_n: torch.Tensor,
    grad_logprob_n: torch.Tensor,
    grad_entropy_n: torch.Tensor,
    temperature: float,
    first_column: int,
) -> None:
    """Logits of the columns from ``first_column`` on -> their gradient, in place."""
    _ops.logits_grad_(logits_nv, targets_n, lse_n, entropy_n, grad_logprob_n, grad_entropy_n, temperature, first_column)


# Gradients.


def _save_norm(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x_TE, weight_E, ctx.eps = inputs
    ctx.save_for_backward(x_TE, weight_E)


def _norm_backward(ctx: Any, grad_TE: torch.Tensor) -> tuple[_Grad, ...]:
    x_TE, weight_E = ctx.saved_tensors
    return *_ops.rms_norm_backward(grad_TE.contiguous(), x_TE, weight_E, ctx.eps, None), None


def _save_add_norm(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, _, weight_E, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight_E)


def _add_norm_backward(ctx: Any, grad_TE: torch.Tensor, grad_sum_TE: torch.Tensor) -> tuple[_Grad, ...]:
    sum_TE, weight_E = ctx.saved_tensors
    grad_x_TE, grad_weight_E = _ops.rms_norm_backward(
        grad_TE.contiguous(), sum_TE, weight_E, ctx.eps, grad_sum_TE.contiguous()
    )
    return grad_x_TE, grad_x_TE, grad_weight_E, None


def _save_silu_mul(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _silu_mul_backward(ctx: Any, grad_TF: torch.Tensor) -> torch.Tensor:
    return _ops.silu_mul_backward(grad_TF.contiguous(), *ctx.saved_tensors)


def _save_rotary(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _rotary_backward(ctx: Any, *grads: torch.Tensor) -> tuple[_Grad, ...]:
    return _ops.rotary_merge(*(g.contiguous() for g in grads), *ctx.saved_tensors), None, None, None, None


def _save_varlen(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _varlen_backward(ctx: Any, grad_THD: torch.Tensor, _: _Grad) -> tuple[_Grad, ...]:
    grads = _ops.varlen_attention_backward(grad_THD.contiguous(), *ctx.saved_tensors, ctx.scale)
    return *grads, None, None, None


for _name, _backward, _setup in (
    ("rms_norm", _norm_backward, _save_norm),
    ("add_rms_norm", _add_norm_backward, _save_add_norm),
    ("silu_mul", _silu_mul_backward, _save_silu_mul),
    ("rotary_split", _rotary_backward, _save_rotary),
    ("varlen_attention", _varlen_backward, _save_varlen),
):
    torch.library.register_autograd(f"sagc_fast::{_name}", _backward, setup_context=_setup)


# Shapes and dtypes for torch.compile and torch.export.


@torch.library.register_fake("sagc_fast::rotary_split")
def _(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_heads: int, num_kv_heads: int):
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    return tuple(qkv.new_empty(qkv.shape[0], n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads))


@torch.library.register_fake("sagc_fast::rotary_merge")
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[0], (q.shape[1] + 2 * k.shape[1]) * q.shape[2])


@torch.library.register_fake("sagc_fast::varlen_attention")
def _(q: torch.Tensor, *others: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.register_fake("sagc_fast::varlen_attention_backward")
def _(grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor | float):
    return q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(k.shape)


@torch.library.register_fake("sagc_fast::rms_norm_backward")
def _(grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, grad_sum: _Grad):
    return torch.empty_like(x), torch.empty_like(weight)


@torch.library.register_fake("sagc_fast::silu_mul_backward")
def _(grad_y: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate_up)


@torch.library.register_fake("sagc_fast::logits_stats")
def _(logits: torch.Tensor, targets: torch.Tensor, temperature: float):
    return tuple(logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(3))


@torch.library.register_fake("sagc_fast::logits_grad_")
def _(logits: torch.Tensor, *others: torch.Tensor | float | int) -> None:
    return None
