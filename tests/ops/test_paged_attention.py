"""Paged attention in plain torch: equals dense attention, and a token's bits depend on its own context alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast.ops import paged

SCALE = 0.3
heads_and_widths = st.sampled_from([(4, 2, 8), (3, 1, 16), (9, 3, 64), (2, 2, 6), (1, 1, 2), (14, 2, 32)])


@st.composite
def steps(draw: st.DrawFn, max_sequences: int = 12, max_context: int = 200):
    contexts = draw(st.lists(st.integers(1, max_context), min_size=1, max_size=max_sequences))
    query_lens = [draw(st.integers(1, min(context, 20))) for context in contexts]
    return contexts, query_lens


def _expected(case) -> torch.Tensor:
    """fp64 softmax over each token's own context, head by head."""
    rows = []
    for sequence, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        begin, end = case.layout.cu_query_S1[sequence : sequence + 2].tolist()
        group = case.q_THD.shape[1] // keys.shape[1]
        k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
        for row in range(begin, end):
            length = int(case.layout.positions_T[row]) + 1
            scores = torch.einsum("hd,lhd->hl", case.q_THD[row].double(), k[:length]) * SCALE
            rows.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v[:length]))
    return torch.stack(rows)


@settings(max_examples=30, deadline=None)
@given(steps(), heads_and_widths, st.integers(0, 10**6))
def test_equals_dense_attention(paged_case, step, shape, seed: int) -> None:
    case = paged_case(*step, *shape, seed=seed)
    out = paged.paged_attention(case.q_THD, case.k_cache, case.v_cache, case.layout, SCALE)
    torch.testing.assert_close(out.double(), _expected(case), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("num_threads")
@settings(max_examples=30, deadline=None)
@given(steps(), heads_and_widths, st.integers(0, 10**6))
def test_a_token_alone_and_in_any_chunk_has_the_same_bits(paged_case, step, shape, seed: int) -> None:
    case = paged_case(*step, *shape, seed=seed)
    whole = paged.paged_attention(case.q_THD, case.k_cache, case.v_cache, case.layout, SCALE)
    for sequence, length in enumerate(step[1]):
        begin, cut = int(case.layout.cu_query_S1[sequence]), seed % length
        for first, count in ((0, 1), (length - 1, 1), (0, cut), (cut, length - cut)):
            if count == 0:
                continue
            q, layout = case.rows(sequence, first, count)
            alone = paged.paged_attention(q, case.k_cache, case.v_cache, layout, SCALE)
            assert torch.equal(alone, whole[begin + first : begin + first + count])


def test_many_rows_worked_in_several_passes_keep_their_bits(paged_case, monkeypatch: pytest.MonkeyPatch) -> None:
    case = paged_case([150, 3, 64, 65, 128, 129, 20, 16], [60, 3, 1, 65, 2, 40, 20, 16], 9, 3, 64)
    whole = paged.paged_attention(case.q_THD, case.k_cache, case.v_cache, case.layout, SCALE)
    monkeypatch.setattr(paged, "GATHER_BYTES", 1)
    case.layout.__dict__.pop("_reference_plans")
    one_by_one = paged.paged_attention(case.q_THD, case.k_cache, case.v_cache, case.layout, SCALE)
    assert torch.equal(whole, one_by_one)


def test_block_size_that_does_not_divide_the_chunk(paged_case) -> None:
    """Chunks are whole blocks: 16-slot blocks seen as blocks of 48, whose chunk is 96 positions."""
    case = paged_case([48 * 3], [10])
    blocks = case.layout.block_tables_SB[0].long()
    k, v = (x[blocks].view(3, 3, 2, 16, 8).transpose(1, 2).reshape(3, 2, 48, 8) for x in (case.k_cache, case.v_cache))
    table = torch.arange(3, dtype=torch.int32).unsqueeze(0)
    layout = type(case.layout)(**{**case.layout.__dict__, "block_tables_SB": table})
    out = paged.paged_attention(case.q_THD, k, v, layout, SCALE)
    torch.testing.assert_close(out.double(), _expected(case), rtol=1e-5, atol=1e-5)


def test_half_precision_sums_in_fp32(paged_case) -> None:
    case = paged_case([100, 7], [2, 7], 4, 2, 16)
    q, k, v = (x.bfloat16() for x in (case.q_THD, case.k_cache, case.v_cache))
    out = paged.paged_attention(q, k, v, case.layout, SCALE)
    assert out.dtype == torch.bfloat16
    exact = paged.paged_attention(q.float(), k.float(), v.float(), case.layout, SCALE)
    assert torch.equal(out, exact.bfloat16())
