"""The index of a group's texts, checked against scanning them all after every token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast.rollout.drafts import LEAST_HITS, MEMORY_TOKENS, MEMORY_TRIALS, TRIAL_TOKENS, DraftIndex, HitRates
from sagc_fast.rollout.speculation import _LEVEL_OF

TEXT = st.lists(st.integers(0, 2), max_size=40)


def index_of(prompt=(-1,), max_tokens=10_000):
    return DraftIndex(prompt, HitRates(), max_tokens)


def newest_continuation(prompt, stream, streams, length):
    """What followed the newest earlier occurrence of the stream's last ``length`` tokens, in reading order; or None."""
    continuation = None
    for text, begin in [(prompt, length), *((text, max(length, len(prompt))) for text in [*streams, stream])]:
        for at in range(begin, len(text)):
            if text[at - length : at] == stream[-length:]:
                continuation = text[at]
    return continuation


@given(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=40), texts=st.lists(TEXT, max_size=5))
@settings(max_examples=80, deadline=None)
def test_something_is_expected_exactly_where_the_last_token_has_stood_before(prompt, texts):
    """And what is expected follows a true match: its tokens are those that the text ends with."""
    index = index_of(prompt)
    streams, owners = [], {}
    for text in texts:
        cursor = index.new_text()
        owners[id(cursor.text)] = cursor.text
        for count, token in enumerate(text, start=1):
            cursor.extend([token])
            stream = [*prompt, *text[:count]]
            one, two = (newest_continuation(prompt, stream, streams, length) for length in (1, 2))
            assert (cursor.match_length > 0) == (one is not None)
            assert (cursor.match_length > 1) >= (two is not None)
            if not cursor.match_length:
                continue
            if cursor.match_length == 2 and two is not None:
                assert cursor.draft(1) == [two]
            is_of_prompt = id(cursor.source) not in owners
            before = [*([] if is_of_prompt else prompt), *cursor.source[: cursor.place]]
            assert stream[-cursor.match_length :] == before[-cursor.match_length :]
        streams.append([*prompt, *text])
    rates = index.rates
    assert index.num_read == rates.num_read == sum(map(len, texts))
    assert (
        index.num_hits == rates.num_hits <= sum(rates.hits) <= sum(rates.trials)
    )  # those of the prompt count for less


def test_a_match_grows_and_breaks():
    index = index_of()
    index.new_text().extend(range(50))
    cursor = index.new_text()
    cursor.extend(range(10, 30))
    assert cursor.match_length >= 18
    assert cursor.draft(4) == [30, 31, 32, 33]
    assert cursor.draft(100) == list(range(30, 50))  # no further than what has been written
    cursor.extend([99])
    assert cursor.match_length == 0
    assert cursor.draft(4) == []


def test_the_newest_place_behind_the_longest_run_wins():
    index = index_of()
    for text in ([1, 2, 3, 4, 5], [9, 8, 3, 4, 6], [1, 2, 3, 4, 5]):
        index.new_text().extend(text)
    cursor = index.new_text()
    cursor.extend([7, 3, 4])
    assert cursor.draft(1) == [5]
    index.new_text().extend([9, 8, 3, 4, 6])
    cursor = index.new_text()
    cursor.extend([7, 3, 4])
    assert cursor.draft(1) == [6]
    cursor = index.new_text()
    cursor.extend([1, 2, 3, 4])
    assert cursor.draft(1) == [5]


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end():
    cursor = index_of().new_text()
    cursor.extend([1, 2, 3] * 3)
    assert cursor.draft(8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert cursor.draft(0) == []


def test_a_prompt_is_drafted_from_and_leads_into_its_completions():
    index = index_of([5, 6, 7, 8])
    first = index.new_text()
    assert first.match_length == 0
    first.extend([5, 6])
    assert first.draft(2) == [7, 8]
    second = index.new_text()
    second.extend([5])
    assert second.draft(1) == [6]  # 8, 5 stood before: at the prompt's end


def test_skipped_tokens_are_neither_matched_nor_indexed():
    index = index_of()
    index.new_text().extend([1, 2, 3, 4])
    cursor = index.new_text()
    cursor.extend([1, 2])
    cursor.skip([5, 6, 5, 6])
    assert cursor.text == [1, 2, 5, 6, 5, 6]
    assert cursor.match_length == 0
    cursor.extend([1, 2])
    assert cursor.draft(1) == [3]
    assert index.num_tokens == 1 + 4 + 2 + 2


def test_memory_is_bounded_and_the_newest_text_is_what_remains():
    index = index_of(max_tokens=100)
    cursor = index.new_text()
    for start in range(0, 5000, 10):
        cursor.extend(range(start, start + 10))
        assert index.num_tokens <= 100
        assert len(index.twos) + len(index.pairs) <= 200
    cursor = index.new_text()
    cursor.extend([4990, 4991])
    assert cursor.draft(2) == [4992, 4993]
    cursor.extend([10, 11])
    assert cursor.draft(1) == []


def test_an_index_without_hits_is_found_out_and_one_with_hits_is_not():
    index = index_of(range(1000))
    assert index.is_promising  # the prompt counts for nothing
    index.new_text().extend(range(2000, 2000 + TRIAL_TOKENS - 1))
    assert index.is_promising
    index.new_text().extend([1])
    assert not index.is_promising
    index.new_text().extend(range(2000, 2000 + int(TRIAL_TOKENS * LEAST_HITS * 2)))
    assert index.is_promising


def rate(rates, match_length):
    return rates.by_level()[_LEVEL_OF[min(match_length, _LEVEL_OF.size - 1)]]


def test_a_text_knows_how_often_it_was_foreseen_of_late_and_how_often_it_should_have_been():
    index = index_of()
    index.new_text().extend(list(range(200)) * 2)
    same, other, unlike = (index.new_text() for _ in range(3))
    same.extend(range(200))
    assert same.num_read == MEMORY_TOKENS
    assert same.num_hits > 0.95 * MEMORY_TOKENS
    assert same.num_expected == pytest.approx(same.num_hits, rel=0.1)
    for token in range(0, 60, 2):  # each is expected to be followed by the next one
        other.extend([token])
    assert other.num_read == 30
    assert other.num_hits == 0
    assert other.num_expected > 5
    unlike.extend(range(1000, 1030))
    assert unlike.num_hits == unlike.num_expected == 0


def test_hit_rates_are_kept_by_match_length_and_fade():
    rates = HitRates()
    assert rate(rates, 5) == 0.5
    rates.trials[3], rates.hits[3] = 8, 7
    assert rate(rates, 4) == rate(rates, 7) == pytest.approx(0.8)
    assert rate(rates, 8) == 0.5
    assert rate(rates, 32) == rate(rates, 10_000)
    index = DraftIndex([], rates, 10_000)
    index.new_text().extend([1, 2, 3] * 2000)
    assert max(rates.trials) < MEMORY_TRIALS
    assert rate(rates, 100) > 0.99
