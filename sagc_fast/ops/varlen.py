"""Training attention over a packed batch of groups: each prompt stands once and its completions share it, exactly.

The keys of a completion token are its group's prompt and its own completion so far. The two parts are computed apart,
the second as causal batches over segments of like length from all groups (prompts are such segments too), and merged by
their log-sum-exps. In backward each part's kernel gets the *merged* output and log-sum-exp, which makes its
probabilities those of the whole softmax; the gradients then simply add (Liu et al. 2023, Ring Attention,
arXiv:2310.01889; prompt sharing as in Juravsky et al. 2024, Hydragen, arXiv:2402.05099).

Shape suffixes: T packed tokens, H query heads, K kv heads, D head width, S segments of a batch, L tokens of its
longest, P prompt tokens, N completion tokens of a group.
"""

# ruff: noqa: N815 (shape suffixes in field names)

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from sagc_fast.ops.layouts import PackedLayout, Span

LENGTH_SLACK = (0.8, 8)
"""A segment joins a batch whose longest has L tokens if it has at least 0.8 L - 8: little padding, few calls."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Rows = slice | torch.Tensor
"""Consecutive rows of the packed batch, or int64 row numbers."""


def varlen_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layout: PackedLayout, scale: float
) -> torch.Tensor:
    """Attention of a packed batch, [T, H, D]: a prompt is causal in itself, a completion token sees its group's whole
    prompt and its own completion up to itself. Differentiable; equals the unshared computation. Rows outside every span
    come back as zeros."""
    if q_THD.device.type == "cpu":
        return _SharedPromptAttention.apply(q_THD, k_TKD, v_TKD, _plan(layout), scale)
    return masked_attention(q_THD, k_TKD, v_TKD, layout, scale)


def masked_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layout: PackedLayout, scale: float
) -> torch.Tensor:
    """The same through masked SDPA and autograd, on any device: the completions of a group padded to the longest."""
    rows, parts = [], []
    for prompt, completions in zip(layout.prompt_spans, layout.completion_spans, strict=True):
        rows += [torch.arange(start, start + length, device=q_THD.device) for start, length in (prompt, *completions)]
        own = [x.narrow(0, *prompt) for x in (q_THD, k_TKD, v_TKD)]
        parts.append(_sdpa(*(x.unsqueeze(0) for x in own), None, scale)[0])
        if completions:
            padded = (
                pad_sequence([x.narrow(0, *span) for span in completions], batch_first=True)
                for x in (q_THD, k_TKD, v_TKD)
            )
            out_SLHD = _attend_group(own[1], own[2], *padded, scale)
            parts += [out_SLHD[index, :length] for index, (_, length) in enumerate(completions)]
    out_THD = torch.zeros_like(q_THD)
    return out_THD.index_copy(0, torch.cat(rows), torch.cat(parts)) if rows else out_THD


def _attend_group(
    k_PKD: torch.Tensor,
    v_PKD: torch.Tensor,
    q_SLHD: torch.Tensor,
    k_SLKD: torch.Tensor,
    v_SLKD: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    k, v = (
        torch.cat((shared.unsqueeze(0).expand(len(own), -1, -1, -1), own), dim=1)
        for shared, own in ((k_PKD, k_SLKD), (v_PKD, v_SLKD))
    )
    mask = torch.ones(q_SLHD.shape[1], k.shape[1], dtype=torch.bool, device=k.device).tril(len(k_PKD))
    return _sdpa(q_SLHD, k, v, mask, scale)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """[S, L, heads, D] in and out; causal when there is no mask."""
    out = functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


@dataclass(frozen=True, eq=False)
class _SegmentBatch:
    """Segments of like length, padded to the longest by repeating a segment's first row."""

    gather_SL: torch.Tensor
    """int64 rows of T."""
    is_padding_SL: torch.Tensor
    valid: torch.Tensor
    """int64 places of the real rows within the flattened [S * L]."""
    rows: torch.Tensor
    """int64 rows of T they are, in the same order."""


@dataclass(frozen=True, eq=False)
class _Plan:
    segment_batches: tuple[_SegmentBatch, ...]
    shared: tuple[tuple[Rows, Rows], ...]
    """(rows of all completions, rows of the prompt) of each group that has completions."""


class _SharedPromptAttention(torch.autograd.Function):
    """CPU path. Saves q, k, v, the output and one log-sum-exp per row and head; backward recomputes the weights."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, plan: _Plan, scale: float
    ) -> torch.Tensor:
        out_THD = torch.zeros_like(q_THD)
        lse_TH = out_THD.new_zeros(q_THD.shape[:2], dtype=torch.promote_types(q_THD.dtype, torch.float32))
        for batch in plan.segment_batches:
            q, k, v = (x[batch.gather_SL].transpose(1, 2) for x in (q_THD, k_TKD, v_TKD))
            out, lse = _flash(q, k, v, 0.0, True, scale=scale)
            out_THD[batch.rows] = out.transpose(1, 2).flatten(0, 1)[batch.valid]
            lse_TH[batch.rows] = lse.transpose(1, 2).flatten(0, 1)[batch.valid]
        for rows, prompt in plan.shared:
            out, lse = _flash(
                _heads(q_THD[rows]), _heads(k_TKD[prompt]), _heads(v_TKD[prompt]), 0.0, False, scale=scale
            )
            _merge(out_THD, lse_TH, rows, out[0].transpose(0, 1), lse[0].transpose(0, 1))
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, lse_TH)
        ctx.plan, ctx.scale = plan, scale
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, out_THD, lse_TH = ctx.saved_tensors
        grads = grad_q, grad_k, grad_v = tuple(torch.zeros_like(x) for x in (q_THD, k_TKD, v_TKD))
        for batch in ctx.plan.segment_batches:
            grad, q, k, v, out = (x[batch.gather_SL].transpose(1, 2) for x in (grad_THD, q_THD, k_TKD, v_TKD, out_THD))
            lse = lse_TH[batch.gather_SL].transpose(1, 2)
            # An infinite log-sum-exp makes the probabilities of padding nought, and with them all its gradients.
            lse.masked_fill_(batch.is_padding_SL[:, None, :], float("inf"))
            parts = _flash_backward(grad, q, k, v, out, lse, 0.0, True, scale=ctx.scale)
            for total, part in zip(grads, parts, strict=True):
                total[batch.rows] = part.transpose(1, 2).flatten(0, 1)[batch.valid]
        for rows, prompt in ctx.plan.shared:
            grad, q, out = (_heads(x[rows]) for x in (grad_THD, q_THD, out_THD))
            lse = lse_TH[rows].t().unsqueeze(0)
            parts = _flash_backward(
                grad, q, _heads(k_TKD[prompt]), _heads(v_TKD[prompt]), out, lse, 0.0, False, scale=ctx.scale
            )
            grad_q[rows] += parts[0][0].transpose(0, 1)
            grad_k[prompt] += parts[1][0].transpose(0, 1)
            grad_v[prompt] += parts[2][0].transpose(0, 1)
        return *grads, None, None


def _heads(x: torch.Tensor) -> torch.Tensor:
    """[N, heads, D] -> [1, heads, N, D], a view."""
    return x.transpose(0, 1).unsqueeze(0)


def _merge(
    out_THD: torch.Tensor, lse_TH: torch.Tensor, rows: Rows, other_NHD: torch.Tensor, other_lse_NH: torch.Tensor
) -> None:
    """Fold a second set of keys into the rows' output and log-sum-exp, in place."""
    lse_NH = lse_TH[rows]
    merged_NH = torch.logaddexp(lse_NH, other_lse_NH)
    own, other = (lse_NH - merged_NH).exp().unsqueeze(-1), (other_lse_NH - merged_NH).exp().unsqueeze(-1)
    out_THD[rows] = (out_THD[rows] * own + other_NHD * other).to(out_THD.dtype)
    lse_TH[rows] = merged_NH


def _plan(layout: PackedLayout) -> _Plan:
    """Batches of a layout; the same for every layer, so they are kept with it."""
    plan = layout.__dict__.get("_varlen_plan")
    if plan is None:
        plan = layout.__dict__["_varlen_plan"] = _make_plan(layout)
    return plan


def _make_plan(layout: PackedLayout) -> _Plan:
    spans = [*layout.prompt_spans, *(span for spans in layout.completion_spans for span in spans)]
    spans = sorted((span for span in spans if span[1] > 0), key=lambda span: -span[1])
    batches: list[list[Span]] = []
    share, slack = LENGTH_SLACK
    for span in spans:
        if not batches or span[1] < share * batches[-1][0][1] - slack:
            batches.append([])
        batches[-1].append(span)
    shared = [
        (_rows(completions), _rows([prompt]))
        for prompt, completions in zip(layout.prompt_spans, layout.completion_spans, strict=True)
        if prompt[1] > 0 and any(length > 0 for _, length in completions)
    ]
    return _Plan(tuple(_segment_batch(batch) for batch in batches), tuple(shared))


def _segment_batch(spans: list[Span]) -> _SegmentBatch:
    starts_S1, lengths_S1 = torch.tensor(spans).unsqueeze(-1).unbind(1)
    offsets_L = torch.arange(spans[0][1])
    is_padding_SL = offsets_L >= lengths_S1
    gather_SL = starts_S1 + offsets_L.masked_fill(is_padding_SL, 0)
    valid = (~is_padding_SL).flatten().nonzero().squeeze(1)
    return _SegmentBatch(gather_SL, is_padding_SL, valid, gather_SL.flatten()[valid])


def _rows(spans: tuple[Span, ...] | list[Span]) -> Rows:
    """The rows of spans: a slice (no copy) when they follow each other, as the packer lays them."""
    if all(start + length == after for (start, length), (after, _) in pairwise(spans)):
        return slice(spans[0][0], sum(spans[-1]))
    return torch.cat([torch.arange(start, start + length) for start, length in spans])
