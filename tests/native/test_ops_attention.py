"""paged_attention: right against float64, the same bits for a token however the step was put together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sagc_fast.ops.layouts import PagedLayout

SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True, eq=False)
class Cache:
    """A cache whose unused slots hold NaN, so that a position read by mistake shows in the result."""

    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor


def make_cache(context_lens: list[int], num_kv_heads: int, block_size: int, head_dim: int, shared: int = 0) -> Cache:
    """Sequences over scattered blocks; the first ``shared`` blocks are the same ones for all of them."""
    num_columns = max(-(-length // block_size) for length in context_lens) + 1
    num_blocks = len(context_lens) * num_columns + 3
    ids = torch.randperm(num_blocks)
    tables = ids[: len(context_lens) * num_columns].view(len(context_lens), num_columns).to(torch.int32)
    tables[:, :shared] = tables[0, :shared]
    k = torch.full((num_blocks, num_kv_heads, block_size, head_dim), float("nan"))
    v = k.clone()
    for table, length in zip(tables, context_lens, strict=True):
        for position in range(length):
            place = (table[position // block_size], slice(None), position % block_size)
            if k[place].isnan().any():
                k[place], v[place] = torch.randn(num_kv_heads, head_dim), torch.randn(num_kv_heads, head_dim)
    return Cache(k, v, tables)


def make_layout(
    cache: Cache, rows: list[int], context_lens: list[int], query_lens: list[int], groups: list[int], shared: int
) -> PagedLayout:
    """The layout of a step with sequences ``rows`` of the cache; only what attention reads is filled."""
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    positions = [range(c - q, c) for c, q in zip(context_lens, query_lens, strict=True)]
    return PagedLayout(
        positions_T=torch.tensor([p for span in positions for p in span], dtype=torch.int64),
        cu_query_S1=torch.tensor(starts, dtype=torch.int32),
        context_lens_S=torch.tensor(context_lens, dtype=torch.int32),
        block_tables_SB=cache.tables[rows].contiguous(),
        slots_T=torch.empty(0, dtype=torch.int64),
        logits_rows_R=torch.empty(0, dtype=torch.int64),
        share_group_S=torch.tensor(groups, dtype=torch.int32),
        shared_blocks_S=torch.tensor([shared if g >= 0 else 0 for g in groups], dtype=torch.int32),
        max_query_len=max(query_lens, default=0),
        max_context_len=max(context_lens, default=0),
    )


def plain_layout(cache: Cache, rows: list[int], context_lens: list[int], query_lens: list[int]) -> PagedLayout:
    return make_layout(cache, rows, context_lens, query_lens, [-1] * len(rows), 0)


def exact(q: torch.Tensor, cache: Cache, layout: PagedLayout, scale: float) -> torch.Tensor:
    """Softmax attention in float64, one token at a time."""
    num_kv_heads, block_size = cache.k.shape[1:3]
    out = torch.empty(q.shape, dtype=torch.float64)
    lengths = layout.cu_query_S1.diff().tolist()
    sequences = [s for s, length in enumerate(lengths) for _ in range(length)]
    for t, (s, position) in enumerate(zip(sequences, layout.positions_T.tolist(), strict=True)):
        p = torch.arange(position + 1)
        blocks = layout.block_tables_SB[s][p // block_size].long()
        k, v = (x[blocks, :, p % block_size].double() for x in (cache.k, cache.v))  # [positions, kv heads, D]
        q_KGD = q[t].double().view(num_kv_heads, -1, q.shape[2])
        weights = torch.softmax(torch.einsum("kgd,pkd->kgp", q_KGD, k) * scale, -1)
        out[t] = torch.einsum("kgp,pkd->kgd", weights, v).reshape(q.shape[1:])
    return out


@SETTINGS
@given(
    head_dim=st.sampled_from([8, 32, 48, 64, 80, 128, 256, 20, 7]),
    heads=st.sampled_from([(1, 1), (6, 6), (9, 3), (8, 1), (40, 1)]),
    block_size=st.sampled_from([1, 5, 16, 64, 100]),
    lengths=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 40)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_attention_equals_float64_softmax_within_rounding(
    native: ModuleType,
    head_dim: int,
    heads: tuple[int, int],
    block_size: int,
    lengths: list[tuple[int, int]],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    context_lens, query_lens = [c for c, _ in lengths], [min(c, q) for c, q in lengths]
    cache = make_cache(context_lens, heads[1], block_size, head_dim)
    layout = plain_layout(cache, list(range(len(lengths))), context_lens, query_lens)
    q = torch.randn(sum(query_lens), heads[0], head_dim) * 2
    out = native.paged_attention(q, cache.k, cache.v, layout, head_dim**-0.5)
    torch.testing.assert_close(out.double(), exact(q, cache, layout, head_dim**-0.5), rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize("head_dim", [48, 64, 36])
@pytest.mark.parametrize("block_size", [16, 10])
def test_prefill_chunks_and_decode_steps_give_a_token_the_same_bits(
    native: ModuleType, head_dim: int, block_size: int
) -> None:
    length = 150
    cache = make_cache([length], 2, block_size, head_dim)
    q = torch.randn(length, 6, head_dim)
    whole = native.paged_attention(q, cache.k, cache.v, plain_layout(cache, [0], [length], [length]), 0.2)
    for cuts in ([37, 64, 65, 128, 150], [1, 2, 3, 149, 150]):
        start = 0
        for end in cuts:
            layout = plain_layout(cache, [0], [end], [end - start])
            assert torch.equal(native.paged_attention(q[start:end], cache.k, cache.v, layout, 0.2), whole[start:end])
            start = end
    for position in (0, 7, 63, 64, 100, 149):
        layout = plain_layout(cache, [0], [position + 1], [1])
        row = native.paged_attention(q[position : position + 1], cache.k, cache.v, layout, 0.2)
        assert torch.equal(row, whole[position : position + 1])


def test_block_size_does_not_change_the_bits(native: ModuleType) -> None:
    q, keys, values = torch.randn(1, 4, 64), torch.randn(170, 2, 64), torch.randn(170, 2, 64)
    results = []
    for block_size in (1, 16, 48, 200):
        cache = make_cache([170], 2, block_size, 64)
        p = torch.arange(170)
        blocks = cache.tables[0][p // block_size].long()
        cache.k[blocks, :, p % block_size], cache.v[blocks, :, p % block_size] = keys, values
        results.append(native.paged_attention(q, cache.k, cache.v, plain_layout(cache, [0], [170], [1]), 0.1))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("heads", [(6, 6), (9, 3), (70, 1)])
@pytest.mark.parametrize(("block_size", "shared"), [(16, 10), (16, 4), (32, 5), (10, 13), (64, 1)])
def test_walking_shared_blocks_together_does_not_change_the_bits(
    native: ModuleType, heads: tuple[int, int], block_size: int, shared: int
) -> None:
    """Two groups of siblings and a loner in one step, with sharing announced, against each sequence alone. The shared
    positions end within a chunk and at its end, and where the block size does not divide a chunk."""
    torch.manual_seed(1)
    context_lens = [161, 200, 170, 190, 175, 161, 300]
    one = make_cache(context_lens, heads[1], block_size, 48, shared=shared)
    layout = make_layout(one, list(range(7)), context_lens, [1, 1, 2, 1, 1, 1, 5], [4, 4, -1, 0, 4, 0, 4], shared)
    q = torch.randn(12, heads[0], 48)
    together = native.paged_attention(q, one.k, one.v, layout, 0.15)
    torch.testing.assert_close(together.double(), exact(q, one, layout, 0.15), rtol=1e-4, atol=3e-6)
    starts = layout.cu_query_S1.tolist()
    for s in range(7):
        alone = plain_layout(one, [s], [context_lens[s]], [starts[s + 1] - starts[s]])
        rows = slice(starts[s], starts[s + 1])
        assert torch.equal(native.paged_attention(q[rows], one.k, one.v, alone, 0.15), together[rows])


def test_order_of_the_sequences_does_not_change_the_bits(native: ModuleType) -> None:
    context_lens = [5, 64, 65, 130, 1, 99, 128]
    cache = make_cache(context_lens, 3, 16, 64)
    q = torch.randn(7, 9, 64)
    out = native.paged_attention(q, cache.k, cache.v, plain_layout(cache, list(range(7)), context_lens, [1] * 7), 0.125)
    for _ in range(3):
        order = torch.randperm(7).tolist()
        layout = plain_layout(cache, order, [context_lens[s] for s in order], [1] * 7)
        assert torch.equal(native.paged_attention(q[order], cache.k, cache.v, layout, 0.125), out[order])


@pytest.mark.usefixtures("two_threads")
def test_bits_do_not_depend_on_the_number_of_threads(native: ModuleType) -> None:
    context_lens = [300] * 8
    cache = make_cache(context_lens, 3, 16, 64)
    layout = plain_layout(cache, list(range(8)), context_lens, [20] * 8)
    q = torch.randn(160, 9, 64)
    out = native.paged_attention(q, cache.k, cache.v, layout, 0.125)
    torch.set_num_threads(1)
    assert torch.equal(native.paged_attention(q, cache.k, cache.v, layout, 0.125), out)


def test_queries_may_be_a_slice_of_a_fused_projection(native: ModuleType) -> None:
    cache = make_cache([20, 30], 2, 16, 32)
    layout = plain_layout(cache, [0, 1], [20, 30], [3, 1])
    qkv = torch.randn(4, (6 + 2 + 2) * 32)
    q = qkv[:, : 6 * 32].view(4, 6, 32)
    expected = native.paged_attention(q.contiguous(), cache.k, cache.v, layout, 0.1)
    assert torch.equal(native.paged_attention(q, cache.k, cache.v, layout, 0.1), expected)


@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_cache_and_bf16_queries_are_computed_in_fp32(
    native: ModuleType, dtype: torch.dtype, head_dim: int
) -> None:
    cache = make_cache([150, 90], 3, 16, head_dim)
    half = replace(cache, k=cache.k.to(dtype), v=cache.v.to(dtype))
    layout = plain_layout(cache, [0, 1], [150, 90], [1, 4])
    q = torch.randn(5, 9, head_dim).bfloat16()
    wide = native.paged_attention(q.float(), half.k.float(), half.v.float(), layout, 0.125)
    assert torch.equal(native.paged_attention(q.float(), half.k, half.v, layout, 0.125), wide)
    assert torch.equal(native.paged_attention(q, half.k, half.v, layout, 0.125), wide.bfloat16())


def test_large_scores_do_not_overflow(native: ModuleType) -> None:
    cache = make_cache([130], 1, 16, 32)
    cache.k.mul_(100)
    layout = plain_layout(cache, [0], [130], [1])
    q = torch.randn(1, 2, 32) * 100
    out = native.paged_attention(q, cache.k, cache.v, layout, 1.0)
    torch.testing.assert_close(out.double(), exact(q, cache, layout, 1.0), rtol=1e-4, atol=1e-4)


def test_nan_in_one_sequence_stays_there(native: ModuleType) -> None:
    cache = make_cache([70, 70], 2, 16, 32)
    layout = plain_layout(cache, [0, 1], [70, 70], [1, 1])
    q = torch.randn(2, 2, 32)
    clean = native.paged_attention(q, cache.k, cache.v, layout, 0.2)
    cache.k[cache.tables[0, 0].long(), :, 3] = float("nan")
    out = native.paged_attention(q, cache.k, cache.v, layout, 0.2)
    assert out[0].isnan().all()
    assert torch.equal(out[1], clean[1])


def test_no_tokens_and_no_sequences_give_an_empty_result(native: ModuleType) -> None:
    cache = make_cache([8], 2, 16, 32)
    for rows, context, queries in (([], [], []), ([0], [8], [0])):
        layout = plain_layout(cache, rows, context, queries)
        assert native.paged_attention(torch.empty(0, 4, 32), cache.k, cache.v, layout, 0.1).shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("context_lens_S", torch.tensor([100000], dtype=torch.int32), "blocks but its table has"),
        ("block_tables_SB", torch.tensor([[99, 0, 0]], dtype=torch.int32), "names block 99"),
        ("block_tables_SB", torch.tensor([[-1, 0, 0]], dtype=torch.int32), "names block -1"),
        ("cu_query_S1", torch.tensor([0, 2], dtype=torch.int32), "number of query tokens"),
        ("context_lens_S", torch.tensor([0], dtype=torch.int32), "positions of context"),
        ("context_lens_S", torch.tensor([20]), "must be int32"),
    ],
)
def test_a_broken_layout_is_an_error_and_not_a_crash(
    native: ModuleType, field: str, value: torch.Tensor, message: str
) -> None:
    cache = make_cache([20], 1, 16, 8)
    layout = replace(plain_layout(cache, [0], [20], [1]), **{field: value})
    with pytest.raises(RuntimeError, match=message):
        native.paged_attention(torch.randn(1, 1, 8), cache.k, cache.v, layout, 1.0)
