"""Ending tokens and stop strings, checked against decoding everything after every token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast.rollout.stop import Detokenizer, EndTable, StopMatcher, cut_at_stop


def push_all(tokenizer, stop, token_ids):
    """Number of tokens until the matcher fires, or None."""
    matcher = StopMatcher(tuple(stop), Detokenizer(tokenizer))
    for count, token_id in enumerate(token_ids, start=1):
        if matcher.push(token_id):
            return count
    return None


def decode_all(tokenizer, stop, token_ids):
    """The oracle: the first prefix whose text contains a stop string."""
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count], skip_special_tokens=True)
        if any(s in text for s in stop):
            return count
    return None


class PieceTokenizer:
    """Tokens of several bytes, some of which begin or end inside a character; id 0 is special."""

    PIECES = (
        b"",
        b"a",
        b"b",
        b"ab",
        b" a",
        b"\n\n",
        b"\xc3",
        b"\xa9",
        b"x\xe2\x82",
        b"\xac",
        b"\xacb\xc3",
        b"\xf0\x9f",
        b"\x98\x80",
    )

    def decode(self, token_ids, skip_special_tokens=False, **_):
        return b"".join(self.PIECES[i] for i in token_ids).decode("utf-8", errors="replace")


STOPS = st.lists(
    st.sampled_from(["ab", "ba", "\n\n", "é", "€", "a€b", "😀", "éab", "bé", "aa"]), min_size=1, max_size=3
)


@given(stop=STOPS, token_ids=st.lists(st.integers(0, 12), max_size=40))
@settings(max_examples=150, deadline=None)
def test_a_stop_string_is_seen_at_the_very_token_that_completes_it(stop, token_ids):
    """Whatever the seams between tokens, characters and stop strings."""
    tokenizer = PieceTokenizer()
    assert push_all(tokenizer, stop, token_ids) == decode_all(tokenizer, stop, token_ids)


@given(text=st.text(alphabet="ab\n é€😀", max_size=30), stop=STOPS)
@settings(max_examples=100, deadline=None)
def test_bytes_of_valid_text_are_matched_like_the_text(byte_tokenizer, text, stop):
    token_ids = byte_tokenizer.encode(text)
    assert push_all(byte_tokenizer, stop, token_ids) == decode_all(byte_tokenizer, stop, token_ids)


def test_special_tokens_neither_match_nor_hide_a_match(byte_tokenizer):
    assert push_all(byte_tokenizer, ["<eos>"], [256, 97, 256]) is None
    assert push_all(byte_tokenizer, ["ab"], [97, 256, 98]) == 3


def test_endless_broken_bytes_keep_the_work_per_token_bounded(byte_tokenizer):
    decoded = []

    class Counting(type(byte_tokenizer)):
        def decode(self, token_ids, **kwargs):
            decoded.append(len(token_ids))
            return super().decode(token_ids, **kwargs)

    assert push_all(Counting(), ["end"], [0xC3] * 1000 + list(b"end")) == 1003
    assert max(decoded) <= 65


def test_pieces_keep_the_space_that_a_decoder_strips_at_the_front():
    class Stripping:
        WORDS = ("▁the", "▁end", "ing")

        def decode(self, token_ids, **_):
            return "".join(self.WORDS[i] for i in token_ids).replace("▁", " ").removeprefix(" ")

    assert push_all(Stripping(), [" end"], [0, 1]) == 2
    assert push_all(Stripping(), ["theing end"], [0, 2, 1]) == 3


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [("a\n\nb", ("\n\n",), "a"), ("abc", ("c", "b"), "a"), ("abc", ("x",), "abc"), ("stop", ("stop",), "")],
)
def test_text_is_cut_before_the_first_stop_string(text, stop, expected):
    assert cut_at_stop(text, stop) == expected


def test_end_table_keeps_the_sets_of_rows_apart():
    table = EndTable()
    first, empty, second = table.add((3,)), table.add(()), table.add((5, 3, 9))
    assert table.add((3,)) == first
    tokens = np.array([3, 3, 9, 9, 0])
    sets = np.array([first, empty, second, first, second])
    assert table.is_end(tokens, sets).tolist() == [True, False, True, False, False]
    third = table.add((0, 1, 2, 4))
    assert table.is_end(np.array([4]), np.array([third])).tolist() == [True]


def test_a_call_without_any_end_ids_never_ends_by_token():
    table = EndTable()
    empty = table.add(())
    assert table.is_end(np.array([-1, 0]), np.array([empty, empty])).tolist() == [False, False]
