"""Reading lengths: the compiled reader, NumPy, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagc_fast.controller import _lengths
from sagc_fast.controller._lengths import flatten

numbers = st.one_of(st.integers(-(2**62), 2**62), st.floats(), st.booleans())
groups = st.lists(st.one_of(st.lists(numbers), st.lists(numbers).map(tuple)), max_size=6)


def refuse(groups, values, group_size):
    return False


@given(st.one_of(groups, groups.map(tuple)))
def test_the_compiled_reader_and_numpy_agree_to_the_bit(lengths):
    fast = flatten(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_lengths, "fill", refuse)
        slow = flatten(lengths)
    assert fast[0].tobytes() == slow[0].tobytes()
    assert fast[1] == slow[1]
    assert fast[2].tolist() == slow[2].tolist()


@pytest.mark.parametrize(
    "lengths",
    [
        [np.array([3, 4]), np.array([5, 6])],
        [[np.int64(3), np.float32(4)], [5, 6.0]],
        [range(3, 5), range(5, 7)],
        np.array([[3, 4], [5, 6]]),
        [np.array([3, 4]), [5, 6]],
    ],
)
def test_other_sequences_read_as_lists_do(lengths):
    values, group_size, _ = flatten(lengths)
    assert (values.tolist(), group_size) == ([3.0, 4.0, 5.0, 6.0], 2)


def test_an_integer_beyond_64_bits_is_read():
    assert flatten([[10**30, 1]])[0].tolist() == [1e30, 1.0]


@pytest.mark.parametrize(
    "lengths",
    [
        [1, 2],
        [["a"]],
        [[1], None],
        5,
        [[[1]]],
        ["12", "345"],
        "123",
        [["12", "345"]],
        [b"ab"],
        [{1: 5, 2: 6}],
        {1: [2]},
        [[1, 10**400]],
        np.array([[1j, 2]]),
        np.array([["1", "2"]]),
    ],
)
def test_what_is_no_sequence_of_numbers_per_group_is_refused(lengths):
    with pytest.raises(ValueError, match="one sequence of completion lengths per group"):
        flatten(lengths)


fill = _lengths.fill


@pytest.mark.skipif(fill.__module__ != "sagc_fast.controller._fill", reason="built without the compiled reader")
class TestCompiledReader:
    @pytest.mark.parametrize("room", [0, 2, 4])
    def test_a_vector_of_another_size_is_not_filled(self, room):
        assert not fill([[1], [2, 3]], np.empty(room), -1)

    def test_a_read_only_or_missing_vector_raises(self):
        values = np.empty(1)
        values.flags.writeable = False
        with pytest.raises((BufferError, ValueError)):
            fill([[1]], values, -1)
        with pytest.raises(TypeError):
            fill([[1]], None, -1)
        with pytest.raises(TypeError):
            fill([[1]])

    def test_plain_lists_take_the_compiled_path(self):
        values = np.empty(3)
        assert fill([[1, True], (2.5,)], values, -1)
        assert not fill([[1, True], (2.5,)], values, 2)
        assert values.tolist() == [1.0, 1.0, 2.5]
