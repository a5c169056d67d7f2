"""Decode attention by Triton in as few launches as may be: rows rotate, write and merge where they are computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_steps import PAGE, SCALE, TOLERANCE, compare, make_step

from sagc_fast import ops
from sagc_fast.ops import paged, reference, triton_ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", [(3, 1, 32), (6, 2, 80)], ids=str)
def test_rows_with_one_private_split_are_merged_where_they_are_computed(
    heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device, monkeypatch
) -> None:
    """Five shared splits, of which a short prompt fills one, and memory that was never written holds NaN."""
    splits, empty = iter((5, 1)), torch.empty

    def poisoned(*size: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return empty(*size, dtype=dtype, device=device).fill_(float("nan") if dtype.is_floating_point else 0)

    monkeypatch.setattr(triton_ops, "_num_splits", lambda *_: next(splits))
    monkeypatch.setattr(triton_ops, "merge_splits", None)
    monkeypatch.setattr(torch, "empty", poisoned)
    rows = [(150, 1, 3, 9), (145, 1, 3, 9), (400, 1, 4, 20), (17, 1, 5, 1), (70, 1, -1, 0), (1, 1, -1, 0)]
    compare(make_step(rows, *heads, dtype), device)


OWN = {
    "one split": ([(1, 1, -1, 0), (33, 1, 7, 2), (40, 1, 7, 2), (65, 1, 7, 2), (130, 1, 8, 1), (17, 1, 9, 1)], (5, 1)),
    # Private positions of 64, 65 and 129: the newest closes a split, is one by itself, and leaves splits without any.
    "several": ([(80, 1, 3, 1), (81, 1, 3, 1), (145, 1, 4, 1), (2, 1, -1, 0), (0, 0, -1, 0), (32, 1, -1, 0)], (2, 4)),
    "more siblings than a tile": ([(20 + i % 14, 1, 5, 1) for i in range(45)] + [(18, 1, 6, 1)], (1, 1)),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("heads", [(3, 1, 32), (4, 2, 80)], ids=str)
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)], ids=str
)
def test_decode_rows_rotate_and_write_their_own(
    name: str, heads: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], device: torch.device, monkeypatch
) -> None:
    """As rotary embedding, write and attention one after the other; before, the newest positions are NaN."""
    rows, splits = OWN[name]
    _, k_cache, v_cache, layout = make_step(rows, *heads, dtypes[1])
    (num_heads, num_kv_heads, head_dim), generator = heads, torch.Generator().manual_seed(9)
    newest = [(s, context - 1) for s, (context, n, *_) in enumerate(rows) if n]
    tables = layout.block_tables_SB.long()
    slots = torch.tensor([int(tables[s, place // PAGE]) * PAGE + place % PAGE for s, place in newest])
    for cache in (k_cache, v_cache):
        cache[slots // PAGE, :, slots % PAGE] = float("nan")
    qkv = torch.randn(len(slots), num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtypes[0])
    own = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    angles = torch.randn(layout.max_context_len, head_dim // 2, generator=generator)
    tables = (angles.cos(), angles.sin())
    wanted_caches = (k_cache.clone(), v_cache.clone())
    q = reference.rope_and_cache(*own, *tables, layout.positions_T, *wanted_caches, slots)
    wanted = paged.paged_attention(q.float(), *(cache.float() for cache in wanted_caches), layout, SCALE)

    splits = iter(splits)
    monkeypatch.setattr(triton_ops, "_num_splits", lambda *_: next(splits))
    moved = {name: x.to(device) for name, x in layout.__dict__.items() if isinstance(x, torch.Tensor)}
    layout, caches = replace(layout, **moved | {"slots_T": slots.to(device)}), (k_cache.to(device), v_cache.to(device))
    own, tables = ([x.to(device) for x in part] for part in (own, tables))
    with ops.use_backend("triton"):
        found = ops.rope_and_attend(*own, *tables, *caches, layout, SCALE)
    assert (found.cpu().float() - wanted).abs().max() <= TOLERANCE[min(dtypes, key=lambda dtype: dtype.itemsize)]
    written = TOLERANCE[torch.float32] if dtypes[1] == torch.float32 else 2.0**-7
    torch.testing.assert_close(caches[0].cpu(), wanted_caches[0], rtol=written, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(caches[1].cpu(), wanted_caches[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_key_has_the_same_bits_whoever_rotates_it(dtype: torch.dtype, device: torch.device) -> None:
    """After a preemption a prefill writes the key that a decode step wrote before."""
    rows = [(1 + 3 * i, 1, -1, 0) for i in range(40)]
    _, k_cache, v_cache, layout = make_step(rows, 4, 2, 64, dtype)
    generator = torch.Generator().manual_seed(3)
    own = torch.randn(len(rows), 8, 64, generator=generator).to(dtype, copy=True).to(device).split((4, 2, 2), 1)
    angles = torch.randn(layout.max_context_len, 32, generator=generator)
    tables = (angles.cos().to(device), angles.sin().to(device))
    block = layout.block_tables_SB.long().gather(1, (layout.positions_T // PAGE).unsqueeze(1)).squeeze(1)
    slots = block * PAGE + layout.positions_T % PAGE
    moved = {name: x.to(device) for name, x in layout.__dict__.items() if isinstance(x, torch.Tensor)}
    layout = replace(layout, **moved | {"slots_T": slots.to(device)})
    by_decode, by_prefill = ([cache.to(device, copy=True) for cache in (k_cache, v_cache)] for _ in range(2))
    triton_ops.rope_and_attend(*own, *tables, *by_decode, layout, SCALE)
    triton_ops.rope_and_cache(*own, *tables, layout.positions_T, *by_prefill, layout.slots_T)
    for one, other, before in zip(by_decode, by_prefill, (k_cache, v_cache), strict=True):
        written, wanted, old = (cache.cpu()[slots // PAGE, :, slots % PAGE] for cache in (one, other, before))
        assert torch.equal(written, wanted)
        assert not torch.equal(written, old)
