"""Accounting, by examples worked out by hand."""

from __future__ import annotations

import pytest

from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.rollout.stats import StatsRecorder, idle_fraction, straggler_ratio, tail_fraction
from sagc_fast.rollout.step_cost import StepCost
from sagc_fast.types import SamplingParams


def forced(*lengths):
    return [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lengths]


def test_one_step_of_prefill_then_rows_that_end_one_by_one(helpers):
    """Prompts of 5 and 3 tokens; lengths (1, 2, 8) and (2): rows per step 4, 3, 1, 1, 1, 1, 1, 1."""
    engine = RolloutEngine(helpers.Model(), block_size=4, speculation="off")
    groups = engine.generate([[1] * 5, [2] * 3], [3, 1], [forced(1, 2, 8), forced(2)])
    stats = engine.stats
    assert stats.active_rows == [4, 3, 1, 1, 1, 1, 1, 1]
    assert stats.capacity_rows == 4
    assert stats.num_steps == 8
    assert stats.idle_fraction == pytest.approx(1 - 13 / 32)
    assert stats.tail_fraction == pytest.approx(6 / 8)  # at most one of four rows
    assert (stats.num_prompts, stats.num_completions) == (2, 4)
    assert (stats.num_prompt_tokens, stats.num_prefill_tokens, stats.num_recomputed_tokens) == (8, 8, 0)
    assert stats.num_output_tokens == 13
    assert stats.mean_length == pytest.approx(13 / 4)
    assert stats.max_length == 8
    assert stats.straggler_ratio_max == pytest.approx(8 / 2)
    assert stats.straggler_ratio_mean == pytest.approx((8 / 2 + 1) / 2)
    assert stats.clipped_ratio == 1.0
    assert stats.num_preemptions == 0
    # Prompt blocks 2 + 1; in step 2 two of three rows of the first group write (one of them into the original).
    assert stats.kv_blocks_peak == 4
    assert stats.kv_bytes_total == stats.kv_blocks_total * engine.bytes_per_block()
    assert not stats.is_filtered
    assert [(c.first_step, c.last_step) for group in groups for c in group.completions] == [
        (0, 0),
        (0, 1),
        (0, 7),
        (0, 1),
    ]


def test_seconds_add_up(helpers):
    engine = RolloutEngine(helpers.Model())
    engine.generate([[1] * 5], 3, SamplingParams(max_new_tokens=9))
    stats = engine.stats
    parts = stats.prefill_seconds + stats.decode_seconds + stats.sample_seconds + stats.host_seconds
    assert parts == pytest.approx(stats.total_seconds)
    assert min(stats.prefill_seconds, stats.decode_seconds, stats.sample_seconds, stats.host_seconds) > 0
    assert stats.output_tokens_per_second == pytest.approx(stats.num_output_tokens / stats.total_seconds)


def test_chunked_prefill_samples_nothing_until_the_prompt_ends(helpers):
    engine = RolloutEngine(helpers.Model(), max_batch_tokens=4, speculation="off")
    engine.generate([[1] * 10], 2, [forced(2, 2)])
    assert engine.stats.active_rows == [0, 0, 2, 2]
    assert engine.stats.idle_fraction == pytest.approx(0.5)
    assert engine.stats.tail_fraction == 0.0
    assert engine.stats.num_prefill_tokens == 10


def test_waves_fill_the_rows_again(helpers):
    """Six completions of three tokens on two rows. Late siblings start from the saved logits row, without prefill."""
    engine = RolloutEngine(helpers.Model(), max_num_seqs=2, speculation="off")
    groups = engine.generate([[1] * 4], 6, [forced(3, 3, 3, 3, 3, 3)])
    assert engine.stats.active_rows == [2] * 9
    assert engine.stats.idle_fraction == 0.0
    assert engine.stats.num_prefill_tokens == 4
    assert [c.first_step for c in groups[0].completions] == [0, 0, 3, 3, 6, 6]


def test_recomputation_is_counted_apart(helpers, engine_with_blocks):
    model = helpers.Model()
    engine = engine_with_blocks(model, 8, block_size=4, speculation="off")
    engine.generate([[1] * 4, [2] * 4], [2, 2], [forced(20, 20), forced(20, 20)])
    stats = engine.stats
    assert stats.num_preemptions > 0
    assert stats.num_recomputed_tokens == stats.num_prefill_tokens - 8 > 0
    assert model.num_tokens == stats.num_prefill_tokens + 80 - 4
    assert stats.kv_blocks_peak <= 8


def test_model_time_is_divided_by_tokens():
    recorder = StatsRecorder(capacity_rows=4)
    recorder.add_steps([1], 30, 5, 10, model_seconds=4.0, sample_seconds=0.5)
    recorder.add_steps([2, 2], 0, 0, 4, model_seconds=1.0, sample_seconds=0.25)
    recorder.add_steps([2], 0, 0, 0, model_seconds=0.5, sample_seconds=0.25)
    stats = recorder.result([], 10.0, 0, 0, 0, 0, StepCost(10.0), is_filtered=False)
    assert (stats.prefill_seconds, stats.decode_seconds, stats.sample_seconds) == (3.0, 2.5, 1.0)
    assert stats.host_seconds == pytest.approx(3.5)
    assert (stats.num_prefill_tokens, stats.num_recomputed_tokens) == (30, 5)


def test_steps_saved_and_their_seconds_follow_from_the_ends_of_the_rows():
    """Three rows end in steps 9, 7 and 7, by drafts 1, 3 and 0 steps earlier: without them in 10, 10 and 7."""
    cost = StepCost(10.0, is_learnt=False)
    cost.observe(1, 1e-2)
    recorder = StatsRecorder(capacity_rows=3)
    assert recorder.draft_gain_seconds(cost) == recorder.num_steps_saved() == 0
    recorder.add_drafts(6, 4, 3, is_short_of_blocks=False, cost=cost)
    for last_step, num_steps_ahead in ((9, 1), (7, 3), (7, 0)):
        recorder.add_end(0, last_step, num_steps_ahead)
    assert recorder.num_steps_saved() == 1
    price = cost.seconds(9) - cost.seconds(3) + cost.draft_seconds(3)
    without = 8 * cost.seconds(3) + 3 * cost.seconds(2)
    with_drafts = 8 * cost.seconds(3) + 2 * cost.seconds(1)
    assert recorder.draft_gain_seconds(cost) == pytest.approx(without - with_drafts - price)
    recorder.add_drafts(5, 3, 2, is_short_of_blocks=True, cost=cost)
    assert recorder.num_steps_saved() == 1 + 3 / 2
    assert (recorder.num_draft_tokens, recorder.num_accepted_tokens) == (11, 7)


def test_who_waits_for_a_row_starts_as_much_later_as_the_row_would_have_been_over():
    """Two rows, four completions: the third waits for the first, the fourth for the third. Without drafts the first two
    end in step 9 both, so that the other two begin in step 10 instead of 6 and 9."""
    cost = StepCost(10.0, is_learnt=False)
    cost.observe(1, 1e-2)
    recorder = StatsRecorder(capacity_rows=2)
    recorder.add_drafts(6, 5, 2, is_short_of_blocks=False, cost=cost)
    for span in ((0, 5, 4), (0, 9, 0), (6, 8, 0), (9, 20, 1)):
        recorder.add_end(*span)
    assert recorder.num_steps_saved() == 1 + 1  # of the last one's own, and as it began
    price = cost.seconds(8) - cost.seconds(2) + cost.draft_seconds(2)
    without = 13 * cost.seconds(2) + 10 * cost.seconds(1)
    with_drafts = 10 * cost.seconds(2) + 11 * cost.seconds(1)
    assert recorder.draft_gain_seconds(cost) == pytest.approx(without - with_drafts - price)


def test_fractions_and_ratio_of_plain_lists():
    assert idle_fraction([4, 4, 2], 4) == pytest.approx(1 / 6)
    assert tail_fraction([0, 8, 8, 2, 1], 8) == pytest.approx(2 / 5)
    assert straggler_ratio([1, 2, 3, 10]) == 4.0
    assert idle_fraction([], 4) == tail_fraction([], 4) == 0.0


def test_filters_are_flagged_unless_greedy(helpers):
    engine = RolloutEngine(helpers.Model())
    engine.generate([[1]], 2, SamplingParams(max_new_tokens=2, top_k=3))
    assert engine.stats.is_filtered
    engine.generate([[1]], 2, SamplingParams(max_new_tokens=2, top_k=3, temperature=0))
    assert not engine.stats.is_filtered
