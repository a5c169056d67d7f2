"""Training attention by the ``flash-attn`` package, where it is installed.

One call of its public variable-length function: every prompt is a sequence, and every completion is one whose queries
are its own tokens and whose keys are the prompt's followed by its own. flash-attn aligns the causal mask to the end of
the keys, which is exactly what a completion sees. So the prompt's keys and values are copied once per completion; they
are a small part of the traffic, and the work is what the completions need anyway. (Two calls merged by their
log-sum-exps would save the copies, but the merged backward pass exists only behind private functions whose arguments
change between releases.) The gradients of the copies are added in fp32.

Shape suffixes: T packed tokens, H query heads, K kv heads, D head width, Q query rows, C key rows after copying.
"""

# ruff: noqa: N815 (shape suffixes in field names)

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from flash_attn import flash_attn_varlen_func
from torch.autograd.function import once_differentiable

from sagc_fast.ops.layouts import PackedLayout, Span
from sagc_fast.ops.rows import add_rows

MAX_HEAD_DIM = 256


def available_ops() -> set[str]:
    return {"varlen_attention"}


def supports(op: str, device_type: str, dtype: torch.dtype) -> bool:
    """Whether ``op`` serves this device and dtype."""
    return op == "varlen_attention" and device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class _Plan:
    query_rows_Q: torch.Tensor | None
    """int64; None: all rows of the batch in their order."""
    key_rows_C: torch.Tensor
    cu_query: torch.Tensor
    cu_key: torch.Tensor
    max_query: int
    max_key: int


def varlen_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layout: PackedLayout, scale: float
) -> torch.Tensor:
    """See :func:`sagc_fast.ops.varlen.varlen_attention`. Head widths up to 256."""
    plan = layout.__dict__.get("_flash_plan")
    if plan is None:
        plan = layout.__dict__["_flash_plan"] = _make_plan(layout)
    if plan.max_query == 0:
        return torch.zeros_like(q_THD)
    k_CKD, v_CKD = (_CopyRows.apply(x, plan.key_rows_C) for x in (k_TKD, v_TKD))
    q_QHD = q_THD if plan.query_rows_Q is None else q_THD.index_select(0, plan.query_rows_Q)
    out_QHD = flash_attn_varlen_func(
        q_QHD, k_CKD, v_CKD, plan.cu_query, plan.cu_key, plan.max_query, plan.max_key, dropout_p=0.0,
        softmax_scale=scale, causal=True,
    )  # fmt: skip
    if plan.query_rows_Q is None:
        return out_QHD
    return torch.zeros_like(q_THD).index_copy(0, plan.query_rows_Q, out_QHD)


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TKD: torch.Tensor, rows_C: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows_C)
        ctx.num_rows = len(x_TKD)
        return x_TKD.index_select(0, rows_C)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_CKD: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows_C,) = ctx.saved_tensors
        return add_rows(grad_CKD.float(), rows_C, ctx.num_rows).to(grad_CKD.dtype), None


def _make_plan(layout: PackedLayout) -> _Plan:
    """(query span, key spans) of every sequence, then their rows."""
    sequences: list[tuple[Span, tuple[Span, ...]]] = []
    for prompt, completions in zip(layout.prompt_spans, layout.completion_spans, strict=True):
        sequences.append((prompt, (prompt,)))
        sequences += [(span, (prompt, span)) for span in completions]
    sequences = [sequence for sequence in sequences if sequence[0][1] > 0]
    query_lengths = [query[1] for query, _ in sequences]
    key_lengths = [sum(length for _, length in keys) for _, keys in sequences]
    device, num_rows = layout.positions_T.device, len(layout.positions_T)

    def rows(spans: list[Span]) -> torch.Tensor:
        parts = [torch.arange(start, start + length) for start, length in spans]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def offsets(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    query_rows = rows([query for query, _ in sequences])
    is_everything = torch.equal(query_rows, torch.arange(num_rows))
    return _Plan(
        query_rows_Q=None if is_everything else query_rows.to(device),
        key_rows_C=rows([span for _, keys in sequences for span in keys]).to(device),
        cu_query=offsets(query_lengths),
        cu_key=offsets(key_lengths),
        max_query=max(query_lengths, default=0),
        max_key=max(key_lengths, default=0),
    )
