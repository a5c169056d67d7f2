"""Paged attention by Triton: prefill chunks, split decode rows and siblings over a shared prompt, in one step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sagc_fast.kernels.decode_plan import BLOCK_SEQUENCES, decode_plan
from sagc_fast.kernels.group_decode import group_decode

from sagc_fast import ops
from sagc_fast.ops import paged, reference, triton_ops
from sagc_fast.ops.layouts import PagedLayout

SCALE = 0.3
PAGE = 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _step(
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


def _compare(step: tuple, device: torch.device) -> None:
    q, k, v, layout = step
    wanted = paged.paged_attention(q.float(), k.float(), v.float(), layout, SCALE)
    fields = {name: x.to(device) for name, x in layout.__dict__.items() if isinstance(x, torch.Tensor)}
    moved = replace(layout, **fields)
    found = triton_ops.paged_attention(q.to(device), k.to(device), v.to(device), moved, SCALE)
    assert found.dtype == q.dtype
    assert (found.cpu().float() - wanted).abs().max() <= TOLERANCE[q.dtype]


MIXED = [
    (1, 1, -1, 0), (33, 1, 7, 2), (40, 1, 7, 2), (65, 1, 7, 2), (130, 1, 8, 1), (17, 17, -1, 0),
    (90, 70, -1, 0), (3, 2, -1, 0),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_decode_rows_siblings_and_chunks_in_one_step(dtype: torch.dtype, device: torch.device) -> None:
    _compare(_step(MIXED, 3, 1, 32, dtype), device)


WITHOUT_A_TOKEN = {
    "decode": [(5, 1, -1, 0), (9, 0, -1, 0), (4, 1, -1, 0)],
    "chunk": [(40, 6, -1, 0), (33, 0, -1, 0), (18, 1, 2, 1), (17, 1, 2, 1)],
    "no_context": [(0, 0, -1, 0), (3, 3, -1, 0)],
}


@pytest.mark.parametrize("name", WITHOUT_A_TOKEN)
def test_sequences_without_a_token(name: str, device: torch.device) -> None:
    _compare(_step(WITHOUT_A_TOKEN[name], 4, 2, 16, torch.float32), device)


@pytest.mark.parametrize("heads", [(4, 2, 8), (2, 1, 80), (1, 1, 256)], ids=str)
def test_heads_and_widths(heads: tuple[int, int, int], device: torch.device) -> None:
    _compare(_step([(20, 1, 0, 1), (18, 1, 0, 1), (9, 5, -1, 0)], *heads, torch.float32), device)


def test_long_contexts_are_split(device: torch.device, monkeypatch) -> None:
    monkeypatch.setattr(triton_ops, "KEYS_PER_SPLIT", 64)
    _compare(_step([(300, 1, 3, 9), (150, 1, 3, 9), (64, 1, -1, 0)], 2, 1, 16, torch.float32), device)


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
    _compare(_step(rows, *heads, dtype), device)


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
    _, k_cache, v_cache, layout = _step(rows, *heads, dtypes[1])
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


def test_more_siblings_than_a_tile_and_neighbours_with_other_prompts(device: torch.device) -> None:
    siblings = triton_ops.siblings_per_tile(48)  # 128 rows hold two
    rows = [(20 + i % 3, 1, 5, 1) for i in range(2 * siblings + 1)] + [(18, 1, 6, 1), (19, 1, 6, 1)]
    _compare(_step(rows, 48, 1, 16, torch.float32), device)


def test_the_cache_may_be_of_another_dtype(device: torch.device) -> None:
    q, k, v, layout = _step([(20, 1, 0, 1), (18, 1, 0, 1), (9, 5, -1, 0)], 2, 1, 16, torch.float32)
    k, v = k.bfloat16(), v.bfloat16()
    _compare((q, k, v, layout), device)


def test_a_tile_of_siblings_writes_nothing_for_the_row_behind_them(device: torch.device) -> None:
    """The neighbour's own program would repair it here, where programs run in turn; on a GPU they race."""
    q, k, v, layout = _step([(20, 1, 5, 1), (19, 1, 5, 1), (18, 1, -1, 0)], 2, 1, 16, torch.float32)
    plan = ([16, 16, 0], [0, 0, 2], [1, 0, 0, 0])
    integers = (layout.cu_query_S1, layout.context_lens_S, *(torch.tensor(column).int() for column in plan))
    part, lse = torch.full((3, 2, 1, 16), 7.0, device=device), torch.full((3, 2, 1), 7.0, device=device)
    q, k, v, *integers = (x.to(device) for x in (q, k, v, *integers, layout.block_tables_SB))
    group_decode(q, k, v, part, lse, *integers, 1, SCALE)
    assert (part[2] == 7.0).all()
    assert (lse[2] == 7.0).all()
    assert (lse[:2] != 7.0).all()


@pytest.mark.parametrize("num_sequences", [1, 5, BLOCK_SEQUENCES, 3 * BLOCK_SEQUENCES + 7])
def test_runs_of_siblings_are_those_found_one_by_one(num_sequences: int, device: torch.device) -> None:
    """Runs that cross the kernel's blocks included."""
    generator = torch.Generator().manual_seed(num_sequences)
    groups = torch.randint(-1, 3, (num_sequences,), generator=generator).repeat_interleave(5)[:num_sequences]
    shared = torch.randint(0, 3, (num_sequences,), generator=generator).repeat_interleave(5)[:num_sequences]
    if num_sequences > 3 * BLOCK_SEQUENCES:
        groups[40:180], shared[40:180] = 7, 2
    queries = (torch.rand(num_sequences, generator=generator) < 0.9).int() + 2 * (
        torch.rand(num_sequences, generator=generator) < 0.05
    )
    cu = torch.cat((torch.zeros(1), queries.cumsum(0)))
    lens, starts = [], []
    for i in range(num_sequences):
        lens.append(int(shared[i]) * PAGE if queries[i] == 1 and groups[i] >= 0 else 0)
        goes_on = i > 0 and lens[i] > 0 and lens[i] == lens[i - 1] and groups[i] == groups[i - 1]
        starts.append(starts[-1] if goes_on else i)
    found = decode_plan(*(x.int().to(device) for x in (cu, groups, shared)), PAGE, 3)
    assert [x.tolist() for x in found[:2]] == [lens, starts]
    num_leaders, *leaders = found[2].tolist()
    assert leaders[:num_leaders] == [i for i in range(num_sequences) if lens[i] > 0 and (i - starts[i]) % 3 == 0]
