"""Packing: every completion once, no padding, within the budget, balanced, laid out as the model reads it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast.algo.config import FilterConfig
from sagc_fast.errors import ConfigError
from sagc_fast.train.packing import (
    PackItem,
    balance,
    build_micro_batch,
    pack,
    pack_group,
    predicted_cost,
    split_group,
)
from sagc_fast.types import Completion, Group


def item(prompt_length: int, lengths: list[int], first_row: int = 0) -> PackItem:
    """Token ids tell where they come from: prompts count down from -1, completions are 1000 * row + position."""
    rows = list(range(first_row, first_row + len(lengths)))
    completions = [[1000 * row + t for t in range(n)] for row, n in zip(rows, lengths, strict=True)]
    return PackItem([-1 - p for p in range(prompt_length)], completions, rows)


def items_of(shapes: list[tuple[int, list[int]]]) -> list[PackItem]:
    out, row = [], 0
    for prompt_length, lengths in shapes:
        out.append(item(prompt_length, lengths, row))
        row += len(lengths)
    return out


shapes = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 30), min_size=1, max_size=9)), min_size=1, max_size=8
)


@settings(max_examples=200, deadline=None)
@given(shapes=shapes, budget=st.integers(1, 120))
def test_every_completion_once_and_the_budget_kept(shapes, budget):
    items = items_of(shapes)
    batches = pack(items, budget, model_width=8)
    assert sorted(row for b in batches for row in b.rows) == list(range(sum(len(i.rows) for i in items)))
    lengths = {row: len(c) for i in items for row, c in zip(i.rows, i.completions, strict=True)}
    for batch in batches:
        assert batch.num_tokens <= budget or len(batch.rows) == 1
        assert len(batch.targets_N) == sum(lengths[row] for row in batch.rows)
        spans = [*batch.layout.prompt_spans, *(s for group in batch.layout.completion_spans for s in group)]
        covered = sorted(t for start, length in spans for t in range(start, start + length))
        assert covered == list(range(batch.num_tokens)), "a token outside every span is padding"


@settings(max_examples=100, deadline=None)
@given(shapes=shapes, budget=st.integers(1, 120))
def test_each_target_is_predicted_by_the_token_before_it_in_its_own_sequence(shapes, budget):
    for batch in pack(items_of(shapes), budget, model_width=8):
        tokens = batch.token_ids_T.tolist()
        positions = batch.layout.positions_T.tolist()
        for source, target, c in zip(
            batch.source_rows_N.tolist(), batch.targets_N.tolist(), batch.completion_index_N.tolist(), strict=True
        ):
            row, t = divmod(target, 1000)
            assert batch.rows[c] == row
            if t == 0:
                assert tokens[source] < 0
                assert positions[source] == -1 - tokens[source], "the last prompt token stands at its own position"
            else:
                assert tokens[source] == target - 1


def test_a_hand_laid_batch():
    batch = build_micro_batch([PackItem([5, 6], [[7, 8], [9]], [3, 1])])
    assert batch.token_ids_T.tolist() == [5, 6, 7, 8, 9]
    assert batch.layout.positions_T.tolist() == [0, 1, 2, 3, 2]
    assert batch.layout.prompt_spans == ((0, 2),)
    assert batch.layout.completion_spans == (((2, 2), (4, 1)),)
    assert batch.source_rows_N.tolist() == [1, 2, 1]
    assert batch.targets_N.tolist() == [7, 8, 9]
    assert batch.completion_index_N.tolist() == [0, 0, 1]
    assert batch.rows == [3, 1]


def test_a_group_laid_out_early_is_the_one_laid_out_late():
    """What is done while others are still generated is kept when the group gets its place in the step."""
    completions = [Completion(0, [7, 8], [-0.5, -1.0], "stop"), Completion(1, [9], [-2.0], "length")]
    packed = pack_group(Group(0, [5, 6], completions, 0), FilterConfig())
    assert "tensors" in packed.item.__dict__, "laid out at once"
    assert (packed.lengths, packed.is_valid) == ([2, 1], [True, True])
    assert packed.logprobs_N.tolist() == [-0.5, -1.0, -2.0]
    early, late = packed.item.moved(3), PackItem([5, 6], [[7, 8], [9]], [3, 4])
    assert early.tensors is packed.item.tensors
    assert early.rows == late.rows
    for a, b in zip(
        build_micro_batch([early]).__dict__.values(), build_micro_batch([late]).__dict__.values(), strict=True
    ):
        assert str(a) == str(b)
    masked = pack_group(Group(0, [5, 6], completions, 0), FilterConfig(mask_truncated=True))
    assert (list(masked.item.rows), masked.is_valid, masked.lengths) == ([0], [True, False], [2, 1])
    assert masked.logprobs_N.tolist() == [-0.5, -1.0, -2.0], "statistics of log-probs are by row, masked ones too"
    nothing = pack_group(Group(0, [5, 6], completions[1:], 0), FilterConfig(mask_truncated=True))
    assert not nothing.item.rows


def test_a_group_that_fits_stays_whole_and_a_large_one_repeats_its_prompt():
    assert len(split_group(item(4, [3, 3]), 10)) == 1
    parts = split_group(item(4, [6, 5, 3, 2]), 12)
    assert [list(p.rows) for p in parts] == [[0, 3], [1, 2]]
    assert all(list(p.prompt) == [-1, -2, -3, -4] for p in parts)
    assert [list(p.rows) for p in split_group(item(4, [50, 2]), 12)] == [[0], [1]]


def test_micro_batches_are_balanced_by_cost():
    items = items_of([(4, [40]), (4, [40]), (4, [4]), (4, [4])])
    bins = balance(items, 60, model_width=8)
    costs = [sum(predicted_cost(i, 8) for i in b) for b in bins]
    assert len(bins) == 2
    assert max(costs) < 1.1 * min(costs)


def test_sixteen_completions_on_one_prompt_are_a_third_of_the_work():
    """Counted on what the model computes: tokens through the dense products, and query-key pairs of attention."""
    group = item(140, [60] * 16)
    (batch,) = pack([group], 4096, model_width=288)
    assert batch.num_tokens == 140 + 16 * 60
    assert 16 * (140 + 60) / batch.num_tokens > 2.9
    alone = sum(predicted_cost(item(140, [60]), 288) for _ in range(16))
    assert alone / predicted_cost(group, 288) > 2.8


def test_nothing_to_pack_and_empty_sequences():
    assert pack([], 100, model_width=8) == []
    with pytest.raises(ConfigError, match="no tokens"):
        build_micro_batch([PackItem([], [[1]], [0])])
    with pytest.raises(ConfigError, match="no tokens"):
        build_micro_batch([PackItem([1], [[]], [0])])
