"""Made-up steps of paged attention, for tests of its kernels, and the comparison with plain torch."""

from __future__ import annotations

from dataclasses import replace

import torch

from sagc_fast.ops import paged, triton_ops
from sagc_fast.ops.layouts import PagedLayout

SCALE = 0.3
PAGE = 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_step(
    sequences: list[tuple[int, int, int, int]], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedLayout]:
    """q, caches, layout of sequences (context, query tokens, share group or -1, shared blocks). Slots past a context
    hold NaN, and so do the blocks of nobody."""
    generator = torch.Generator().manual_seed(heads + head_dim)
    columns = max(-(-context // PAGE) for context, *_ in sequences)
    num_blocks = len(sequences) * columns + 1
    order = torch.randperm(num_blocks, generator=generator).int()
    tables = order[: len(sequences) * columns].view(len(sequences), columns).clone()
    caches = [torch.full((num_blocks, kv_heads, PAGE, head_dim), float("nan")) for _ in "kv"]
    leaders: dict[int, int] = {}
    for s, (context, _, group, shared) in enumerate(sequences):
        if group >= 0:
            tables[s, :shared] = tables[leaders.setdefault(group, s), :shared]
        for block in range(-(-context // PAGE)):
            filled = min(PAGE, context - block * PAGE)
            for cache in caches:
                cache[tables[s, block].long(), :, :filled] = torch.randn(
                    kv_heads, filled, head_dim, generator=generator
                )
    positions = torch.cat([torch.arange(context - n, context) for context, n, *_ in sequences])
    lengths = torch.tensor([n for _, n, *_ in sequences])
    q = torch.randn(len(positions), heads, head_dim, generator=generator)
    layout = PagedLayout(
        positions_T=positions,
        cu_query_S1=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        context_lens_S=torch.tensor([context for context, *_ in sequences]).int(),
        block_tables_SB=tables,
        slots_T=torch.zeros(0, dtype=torch.int64),
        logits_rows_R=torch.zeros(0, dtype=torch.int64),
        share_group_S=torch.tensor([group for *_, group, _ in sequences]).int(),
        shared_blocks_S=torch.tensor([shared for *_, shared in sequences]).int(),
        max_query_len=int(lengths.max()),
        max_context_len=max(context for context, *_ in sequences),
    )
    return q.to(dtype), *(cache.to(dtype) for cache in caches), layout


def compare(step: tuple, device: torch.device) -> None:
    q, k, v, layout = step
    wanted = paged.paged_attention(q.float(), k.float(), v.float(), layout, SCALE)
    fields = {name: x.to(device) for name, x in layout.__dict__.items() if isinstance(x, torch.Tensor)}
    moved = replace(layout, **fields)
    found = triton_ops.paged_attention(q.to(device), k.to(device), v.to(device), moved, SCALE)
    assert found.dtype == q.dtype
    assert (found.cpu().float() - wanted).abs().max() <= TOLERANCE[q.dtype]
