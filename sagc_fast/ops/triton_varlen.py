"""Training attention by the Triton kernels: the plan of a packed batch, and the autograd function around them.

Shape suffixes: T packed tokens, H query heads, K kv heads, D head width.
"""

# ruff: noqa: N815 (shape suffixes in field names)

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from sagc_fast.kernels.reduce_kv import reduce_kv
from sagc_fast.kernels.varlen_backward_kv import TILE_KEYS, varlen_backward_kv
from sagc_fast.kernels.varlen_backward_q import varlen_backward_q
from sagc_fast.kernels.varlen_forward import TILE_ROWS, varlen_forward
from sagc_fast.ops.layouts import PackedLayout, Span

QUERIES_PER_ITEM = 2048
"""Query rows of completions that one program walks for a block of prompt keys; more are shared out between programs,
so that a few prompts with many completions still fill the device."""


@dataclass(frozen=True, eq=False)
class VarlenPlan:
    """Work lists of the kernels (see their docstrings for the columns), the longest work first."""

    tiles: torch.Tensor
    own_start_T: torch.Tensor
    items: torch.Tensor
    sums: torch.Tensor
    num_slots: int
    order_T: torch.Tensor | None
    """int64, rows to gather so that each group's completions follow each other; None: they do already."""


def varlen_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layout: PackedLayout, scale: float
) -> torch.Tensor:
    """See :func:`sagc_fast.ops.varlen.varlen_attention`. The backward pass repeats to the bit."""
    plan = plan_of(layout)
    if plan.order_T is None:
        return _VarlenAttention.apply(q_THD, k_TKD, v_TKD, plan, scale)
    gathered = (x.index_select(0, plan.order_T) for x in (q_THD, k_TKD, v_TKD))
    return torch.zeros_like(q_THD).index_copy(0, plan.order_T, _VarlenAttention.apply(*gathered, plan, scale))


class _VarlenAttention(torch.autograd.Function):
    """Saves q, k, v, the output and one log-sum-exp per row and head."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, plan: VarlenPlan, scale: float
    ) -> torch.Tensor:
        q_THD, k_TKD, v_TKD = (_with_contiguous_heads(x) for x in (q_THD, k_TKD, v_TKD))
        out_THD, lse_HT = varlen_forward(q_THD, k_TKD, v_TKD, plan.tiles, plan.own_start_T, scale)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, lse_HT)
        ctx.plan, ctx.scale = plan, scale
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, out_THD, lse_HT = ctx.saved_tensors
        plan, scale, grad_THD = ctx.plan, ctx.scale, _with_contiguous_heads(grad_THD)
        grad_q_THD, delta_HT = varlen_backward_q(
            q_THD, k_TKD, v_TKD, out_THD, grad_THD, lse_HT, plan.tiles, plan.own_start_T, scale
        )
        grad_k_TKD, grad_v_TKD, slots = varlen_backward_kv(
            q_THD, k_TKD, v_TKD, grad_THD, lse_HT, delta_HT, plan.items, plan.num_slots, plan.own_start_T, scale
        )
        reduce_kv(slots, grad_k_TKD, grad_v_TKD, plan.sums)
        return grad_q_THD, grad_k_TKD, grad_v_TKD, None, None


def _with_contiguous_heads(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


def plan_of(layout: PackedLayout) -> VarlenPlan:
    """Work lists of a layout; the same for every layer, so they are kept with it."""
    plan = layout.__dict__.get("_triton_plan")
    if plan is None:
        plan = layout.__dict__["_triton_plan"] = _make_plan(layout)
    return plan


def _make_plan(layout: PackedLayout) -> VarlenPlan:
    groups = list(zip(layout.prompt_spans, layout.completion_spans, strict=True))
    order = None
    if not all(_follow_each_other(spans) for _, spans in groups):
        order = np.concatenate(
            [np.arange(start, start + n) for prompt, spans in groups for start, n in (prompt, *spans)]
        )
        groups = _laid_out(groups)
    own_start_T = np.zeros(len(layout.positions_T) if order is None else len(order), np.int32)
    tiles: list[tuple[int, ...]] = []
    items: list[tuple[int, ...]] = []
    sums: list[tuple[int, ...]] = []
    num_slots = 0
    for (prompt_start, prompt_length), spans in groups:
        spans = [span for span in spans if span[1] > 0]
        prompt_end = prompt_start + prompt_length
        own_start_T[prompt_start:prompt_end] = prompt_start
        first, end = (spans[0][0], sum(spans[-1])) if spans else (0, 0)
        own_end_T = np.empty(end - first, np.int64)
        for start, length in spans:
            own_start_T[start : start + length] = start
            own_end_T[start - first : start - first + length] = start + length
        for low in range(first, end, TILE_ROWS):
            tiles.append((low, min(low + TILE_ROWS, end), prompt_start, prompt_end))
        for low in range(first, end, TILE_KEYS):
            high = min(low + TILE_KEYS, end)
            items.append((low, high, low, int(own_end_T[high - 1 - first]), 0, 0, -1, 0))
        for low in range(prompt_start, prompt_end, TILE_ROWS):
            tiles.append((low, min(low + TILE_ROWS, prompt_end), prompt_start, prompt_start))
        cuts = [*range(first, end, QUERIES_PER_ITEM), end] if spans else [0, 0]
        for low in range(prompt_start, prompt_end, TILE_KEYS):
            high = min(low + TILE_KEYS, prompt_end)
            is_split = len(cuts) > 2
            if is_split:
                sums.append((low, high, num_slots, len(cuts) - 1))
            for index, (query_low, query_high) in enumerate(pairwise(cuts)):
                own = (low, prompt_end) if index == 0 else (0, 0)
                items.append((low, high, *own, query_low, query_high, num_slots if is_split else -1, 0))
                num_slots += is_split
    tiles.sort(key=lambda tile: -(tile[3] - tile[2] + tile[1] - int(own_start_T[tile[0]])))
    items.sort(key=lambda item: -(item[3] - item[2] + item[5] - item[4]))
    device = layout.positions_T.device

    def table(rows: list[tuple[int, ...]], width: int) -> torch.Tensor:
        return torch.from_numpy(np.array(rows, np.int32).reshape(-1, width)).to(device)

    return VarlenPlan(
        tiles=table(tiles, 4),
        own_start_T=torch.from_numpy(own_start_T).to(device),
        items=table(items, 8),
        sums=table(sums, 4),
        num_slots=num_slots,
        order_T=None if order is None else torch.from_numpy(order).to(device),
    )


def _follow_each_other(spans: tuple[Span, ...]) -> bool:
    present = [span for span in spans if span[1] > 0]
    return all(sum(one) == other[0] for one, other in pairwise(present))


def _laid_out(groups: list[tuple[Span, tuple[Span, ...]]]) -> list[tuple[Span, tuple[Span, ...]]]:
    """The same spans, one behind the other."""
    laid_out, place = [], 0
    for prompt, spans in groups:
        moved = []
        for _, length in (prompt, *spans):
            moved.append((place, length))
            place += length
        laid_out.append((moved[0], tuple(moved[1:])))
    return laid_out
