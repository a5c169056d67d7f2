"""Which tokens are drafted, how many, for which rows and how often the text is looked at; which drafts count."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sagc_fast.rollout import speculation, step_cost
from sagc_fast.rollout.drafts import HitRates
from sagc_fast.rollout.speculation import Drafts, chances_of_last, num_accepted, values, worthwhile

# ---- which drafts count ----------------------------------------------------------------------------------------------

rows_of_drafts = st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5), max_size=6)


def drafts_of(rows):
    """A row is a list of (drafted, drawn) pairs."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return Drafts(lengths, np.array([drafted for row in rows for drafted, _ in row], dtype=np.int64))


@given(rows=rows_of_drafts)
def test_drafts_count_up_to_the_first_that_was_not_drawn(rows):
    drawn = [token for row in rows for token in (*(drawn for _, drawn in row), 7)]
    hits = [next((i for i, (a, b) in enumerate(row) if a != b), len(row)) for row in rows]
    assert num_accepted(drafts_of(rows), np.array(drawn, dtype=np.int64)).tolist() == hits


@given(rows=rows_of_drafts, most=st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_cutting_keeps_the_first_of_every_row(rows, most):
    cut = drafts_of(rows).cut(np.array(most[: len(rows)], dtype=np.int64))
    expected = drafts_of([row[:limit] for row, limit in zip(rows, most, strict=False)])
    assert (cut.lengths.tolist(), cut.tokens.tolist()) == (expected.lengths.tolist(), expected.tokens.tolist())


# ---- how many are drafted --------------------------------------------------------------------------------------------


def rates_of(probability):
    rates = HitRates()
    rates.trials = [1_000_000] * len(rates.trials)
    rates.hits = [round(1_000_000 * probability)] * len(rates.hits)
    return rates


def drafted(match_lengths, rates, fixed_tokens, most=100, budget=1000):
    lengths = np.array(match_lengths)
    return worthwhile(lengths, np.full(lengths.size, most), budget, rates, fixed_tokens).tolist()


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.6, 0.9, 0.97])
@pytest.mark.parametrize(("num_rows", "fixed_tokens"), [(1, 12), (4, 12), (10, 12), (3, 60), (30, 60)])
def test_the_draft_length_is_the_one_with_the_cheapest_tokens(monkeypatch, probability, num_rows, fixed_tokens):
    monkeypatch.setattr(speculation, "MARGIN", 1.0)

    def cost_per_token(drafted):
        accepted = sum(probability**i for i in range(1, drafted + 1))
        return np.hypot(fixed_tokens, num_rows * (1 + drafted)) / (num_rows * (1 + accepted))

    best = min(range(speculation.MOST_DRAFTED + 1), key=cost_per_token)
    chosen = drafted([8] * num_rows, rates_of(probability), fixed_tokens)
    assert len(set(chosen)) == 1
    assert cost_per_token(chosen[0]) == pytest.approx(cost_per_token(best), rel=1e-2)


@given(
    rates=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=7, max_size=7),
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3),
    fixed_tokens=st.floats(0.5, 40),
    budget=st.integers(0, 12),
    luck=st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3),
    last=st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3),
)
@example([(0, 0)] * 7, [(1, 3), (1, 3), (1, 1)], 17.0, 6, [1.0] * 3, [1.0] * 3)  # equal chances, not all fit
def test_no_other_choice_of_drafts_is_worth_more(rates, rows, fixed_tokens, budget, luck, last):
    """Against every choice of up to 6 drafts a row, each a prefix; and none at all where they cost more than they are
    worth."""
    hits = HitRates()
    hits.hits, hits.trials = [a for a, _ in rates], [a + b for a, b in rates]
    matches = np.array([match for match, _ in rows])
    most = np.array([min(limit, 6) for _, limit in rows])
    luck, last = np.array(luck[: len(rows)]), np.array(last[: len(rows)])
    last /= last.sum()
    worth_of_row = values(last, fixed_tokens).tolist()
    step = np.hypot(fixed_tokens, len(rows))
    assert sum(worth_of_row) == pytest.approx(step)

    def worth(lengths):
        gain = 0.0
        for row, (match, length) in enumerate(zip(matches.tolist(), lengths, strict=True)):
            chance = 1.0
            for place in range(length):
                level = min((match + place).bit_length(), 6)
                chance *= (hits.hits[level] + 1) / (hits.trials[level] + 2) * luck[row]
                gain += chance * worth_of_row[row]
        return (step + gain) / np.hypot(fixed_tokens, len(rows) + sum(lengths))

    chosen = worthwhile(matches, most, budget, hits, fixed_tokens, luck=luck, last_chances=last).tolist()
    assert sum(chosen) <= budget
    assert not sum(chosen) or worth(chosen) > speculation.MARGIN * 0.999
    assert all(n <= limit and (n == 0 or match) for n, limit, match in zip(chosen, most, matches, strict=True))
    allowed = [range(limit + 1 if match else 1) for limit, match in zip(most.tolist(), matches, strict=True)]
    best = max(worth(c) for c in itertools.product(*allowed) if sum(c) <= budget)
    assert worth(chosen) >= best / speculation.MARGIN * 0.99


def test_drafts_grow_with_acceptance_and_with_the_step_s_own_cost_and_shrink_with_rows():
    lengths = [drafted([4] * 4, rates_of(p), 12)[0] for p in (0.01, 0.5, 0.8, 0.95)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0 < lengths[1] < lengths[-1]
    assert drafted([4] * 2, rates_of(0.8), 12)[0] > drafted([4] * 8, rates_of(0.8), 12)[0]
    assert drafted([4] * 4, rates_of(0.8), 60)[0] > drafted([4] * 4, rates_of(0.8), 12)[0]


def test_small_models_look_at_fewer_rows_and_none_where_the_host_would_do_all_the_work(monkeypatch):
    monkeypatch.setattr(step_cost, "DRAFT_SECONDS", 200e-6)
    monkeypatch.setattr(step_cost, "DRAFT_SECONDS_PER_ROW", 15e-6)
    assert speculation.most_rows(45, 330e-6) == 9
    assert speculation.most_rows(12, 2.4e-3) == 12
    assert speculation.most_rows(45, 100e-6) == 0


@pytest.mark.parametrize(("has_bursts", "first", "longest"), [(False, 1, 1), (True, 6, 16)])
def test_a_look_in_vain_costs_a_hundredth_of_its_steps_the_burst_it_cuts_short_included(
    monkeypatch, has_bursts, first, longest
):
    """One row of an 8M-parameter Llama on random text was a quarter slower with drafts on: every look ended a burst."""
    monkeypatch.setattr(step_cost, "PLAN_SECONDS", 290e-6)
    speculator = speculation.Speculator(None, speculation.Speculation("fixed", 9.4, 1.9e-3, has_bursts=has_bursts))
    speculator._plan_pause(1, is_drafting=False)
    assert speculator.num_quiet_steps(1) == first  # three hundredths of the steps up to the second look
    for _ in range(8):
        speculator._plan_pause(1, is_drafting=False)
    assert speculator.num_quiet_steps(1) == longest


def test_looks_are_spaced_by_what_steps_take_on_this_machine(monkeypatch):
    """A first estimate of twice the time made looks twice as dear as they were meant to be."""
    monkeypatch.setattr(step_cost, "PLAN_SECONDS", 1e-3)

    def pause(mode, seconds):
        settings = speculation.Speculation(mode, 20, 1e-3, has_bursts=True)
        settings.cost.observe(1, seconds)
        speculator = speculation.Speculator(None, settings)
        speculator._plan_pause(1, is_drafting=False)
        return speculator.num_quiet_steps(1)

    assert pause("auto", 0.5e-3) == pytest.approx(2 * pause("auto", 1e-3), rel=0.05)
    assert pause("fixed", 0.5e-3) == pause("fixed", 4e-3)  # no clock has a say


def test_behind_drafts_the_next_look_comes_soon(monkeypatch):
    monkeypatch.setattr(step_cost, "PLAN_SECONDS", 1e-3)
    speculator = speculation.Speculator(None, speculation.Speculation("fixed", 20, 1e-3, has_bursts=True))
    speculator._plan_pause(1, is_drafting=False)
    before = speculator.num_quiet_steps(1)
    speculator._plan_pause(1, is_drafting=True)
    assert speculator.num_quiet_steps(1) == 0
    speculator._plan_pause(1, is_drafting=False)
    assert 0 < speculator.num_quiet_steps(1) < before / 4


def test_rows_that_can_be_foreseen_get_the_drafts():
    rates = HitRates()
    rates.trials = [1000] * len(rates.trials)
    rates.hits = [0, 100, 200, 300, 900, 950, 990]
    lengths = drafted([40, 2, 0, 9], rates, 16)
    assert lengths[0] > lengths[3] > lengths[1] >= lengths[2] == 0
    assert sum(drafted([40, 2, 0, 9], rates, 16, budget=5)) == 5
    assert max(drafted([40, 2, 0, 9], rates, 16, most=3)) == 3


# ---- which row is the last -------------------------------------------------------------------------------------------


@given(
    rows=st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), min_size=1, max_size=6),
    end_rate=st.floats(0, 0.05),
)
def test_one_row_is_the_last(rows, end_rate):
    num_left, foreseen = (np.array(column) for column in zip(*rows, strict=True))
    chances = chances_of_last(num_left, foreseen, end_rate)
    assert chances.min() >= 0
    assert chances.sum() == pytest.approx(1)
    for a, b in itertools.permutations(range(len(rows)), 2):  # the same text, further from the cap
        if num_left[a] == num_left[b] and foreseen[a] < foreseen[b]:
            assert chances[a] >= chances[b] - 1e-9


def test_the_chances_are_those_of_rows_that_end_by_themselves_or_at_their_caps(monkeypatch):
    """Against drawing which rows reach their caps; the slowest of those is the last, of none any."""
    monkeypatch.setattr(speculation, "SPREAD", 1e-3)
    rng = np.random.default_rng(0)
    for num_rows in (1, 2, 5):
        num_left, foreseen = rng.integers(20, 400, num_rows), rng.random(num_rows)
        times = num_left / (1 + foreseen)
        is_there = rng.random((20_000, num_rows)) < np.exp(-0.005 * num_left)
        last = np.argmax(np.where(is_there, times, -1.0), axis=1)
        some = is_there.any(axis=1)
        expected = np.bincount(last[some], minlength=num_rows) / some.size + (1 - some.mean()) / num_rows
        assert chances_of_last(num_left, foreseen, 0.005) == pytest.approx(expected, abs=0.015)


def test_rows_alike_are_worth_the_same_and_a_single_one_a_whole_step():
    alike = chances_of_last(np.full(5, 100), np.full(5, 0.4), 0.01)
    assert alike == pytest.approx(0.2)
    assert values(alike, 12.0) == pytest.approx(np.hypot(12, 5) / 5)
    assert values(chances_of_last(np.array([3]), np.array([0.1]), 0.1), 12.0) == pytest.approx(np.hypot(12, 1))


def test_nothing_is_drafted_for_rows_that_wait_for_one_that_nothing_foresees():
    """All go to their caps; one is never foreseen. As long as any may be the last, the others get drafts; and one that
    is behind gets them whatever the others do."""
    matches, rates = [0, 8, 8, 8], rates_of(0.5)
    most, end_rate = np.full(4, 100), 1e-4
    arguments = np.array(matches), most, 1000, rates, 10.0, 0.0, None
    assert sum(worthwhile(*arguments)) >= 3
    foreseen = np.array([0.0, 0.5, 0.5, 0.5])
    assert not worthwhile(*arguments, chances_of_last(most, foreseen, end_rate)).any()
    often = chances_of_last(most, foreseen, 0.05)  # they end by themselves long before
    assert worthwhile(*arguments, often).sum() >= 3
    behind = chances_of_last(np.array([100, 200, 100, 100]), foreseen, end_rate)
    lengths = worthwhile(*arguments, behind)
    assert lengths[1] > 0
    assert lengths.sum() == lengths[1]


def test_a_text_foreseen_more_rarely_than_others_gets_fewer_drafts():
    arguments = np.full(3, 8), np.full(3, 100), 1000, rates_of(0.8), 12.0, 0.0
    lengths = worthwhile(*arguments, np.array([1.0, 0.6, 0.1]))
    assert lengths[0] > lengths[1] > lengths[2] == 0
