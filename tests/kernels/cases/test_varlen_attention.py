"""Training attention by Triton: equals masked attention in float64, forward and backward."""

from __future__ import annotations

import pytest
import torch

from sagc_fast.ops import triton_varlen, varlen
from sagc_fast.ops.layouts import PackedLayout

SCALE = 0.3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}

GROUPS = {
    "one_token": [(1, ())],
    "lengths_1": [(1, (1, 1, 1))],
    "block_edges": [(64, (63, 65)), (128, (1, 128))],
    "empty_spans": [(0, (5, 0, 3)), (7, ()), (3, (0, 0))],
    "unequal_groups": [(5, (2, 40, 1, 9, 3)), (66, (30,)), (33, ())],
    "a_tile_crosses_from_a_long_completion": [(3, (140, 20))],
    "short_completions_share_a_tile": [(20, tuple(range(1, 24)))],
}


def _layout(groups: list[tuple[int, tuple[int, ...]]], gap: int = 0, shuffled: bool = False) -> PackedLayout:
    """Spans one after another with ``gap`` unused rows between them; shuffled: completions of all groups mixed."""
    lengths = [(g, c, n) for g, (p, completions) in enumerate(groups) for c, n in enumerate((p, *completions))]
    if shuffled:
        lengths = lengths[::2] + lengths[1::2][::-1]
    spans, place = {}, 0
    for g, c, n in lengths:
        spans[g, c] = (place, n)
        place += n + gap
    prompts = tuple(spans[g, 0] for g in range(len(groups)))
    completions = tuple(tuple(spans[g, c + 1] for c in range(len(cs))) for g, (_, cs) in enumerate(groups))
    return PackedLayout(torch.zeros(place, dtype=torch.int64), prompts, completions)


def _compare(layout: PackedLayout, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(num_heads * 1000 + head_dim)
    num_rows = len(layout.positions_T)
    q, grad = (torch.randn(num_rows, num_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
    # k and v as the model has them: slices of one projection.
    kv = torch.randn(num_rows, 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
    exact = [x.double().requires_grad_() for x in (q, *kv.split(num_kv_heads, 1))]
    varlen.masked_attention(*exact, layout, SCALE).backward(grad.double())

    layout = PackedLayout(layout.positions_T.to(device), layout.prompt_spans, layout.completion_spans)
    q, kv = q.to(device).requires_grad_(), kv.to(device).requires_grad_()
    out = triton_varlen.varlen_attention(q, *kv.split(num_kv_heads, 1), layout, SCALE)
    out.backward(grad.to(device))
    wanted_out = varlen.masked_attention(*(x.detach() for x in exact), layout, SCALE)
    found = (out, q.grad, *kv.grad.split(num_kv_heads, 1))
    for name, value, wanted in zip("oqkv", found, (wanted_out, *(x.grad for x in exact)), strict=True):
        assert value.dtype == dtype
        bound = TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()) if wanted.numel() else 1.0)
        assert (value.cpu().double() - wanted).abs().max() <= bound, name


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_masked_attention(name: str, dtype: torch.dtype, device: torch.device) -> None:
    _compare(_layout(GROUPS[name], gap=3), (2, 1, 32), dtype, device)


@pytest.mark.parametrize("heads", [(4, 2, 8), (2, 2, 80), (1, 1, 64), (1, 1, 128), (2, 1, 256)], ids=str)
def test_heads_and_widths(heads: tuple[int, int, int], device: torch.device) -> None:
    _compare(_layout([(9, (30, 2))]), heads, torch.float32, device)


def test_completions_that_do_not_follow_each_other(device: torch.device) -> None:
    _compare(_layout(GROUPS["unequal_groups"], gap=1, shuffled=True), (2, 1, 32), torch.float32, device)


def test_a_prompt_seen_by_more_queries_than_an_item_takes(device: torch.device, monkeypatch) -> None:
    monkeypatch.setattr(triton_varlen, "QUERIES_PER_ITEM", 32)
    layout = _layout([(130, (20, 30, 9)), (3, (40,)), (4, (2,))])
    assert triton_varlen.plan_of(layout).num_slots == 2 * 2 + 1 * 2
    _compare(layout, (2, 1, 32), torch.float32, device)
