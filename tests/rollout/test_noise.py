"""Philox against its published vectors, and the key layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagc_fast.rollout.noise import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # kat_vectors of Random123 1.14, "philox4x32 10"
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    output = philox4x32(np.array(counter)[:, None], np.array(key)[:, None])
    assert output[:, 0].tolist() == list(words)


def test_uniform_is_the_first_two_words_in_53_bits():
    assert uniforms(0, 0, 0, 0) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


uint64 = st.integers(0, 2**64 - 1)
uint32 = st.integers(0, 2**32 - 1)


@given(key=st.tuples(uint64, uint64, uint32, uint32), others=st.lists(st.tuples(uint64, uint64, uint32, uint32)))
def test_a_row_does_not_depend_on_the_other_rows(key, others):
    alone = uniforms(*key)
    columns = [np.array(column, dtype=np.uint64) for column in zip(*others, key, *others, strict=True)]
    assert uniforms(*columns)[len(others)] == alone
    assert 0 <= alone < 1


@given(key=st.tuples(uint64, uint64, uint32, uint32), field=st.integers(0, 3), bit=st.integers(0, 63))
def test_every_bit_of_the_key_matters(key, field, bit):
    changed = list(key)
    changed[field] ^= 1 << (bit if field < 2 else bit % 32)
    assert uniforms(*changed) != uniforms(*key)


def test_arguments_broadcast():
    grid = uniforms(7, np.arange(3)[:, None], 0, np.arange(4))
    assert grid.shape == (3, 4)
    assert grid[2, 3] == uniforms(7, 2, 0, 3)


def test_numbers_look_uniform_along_each_field():
    steps = np.arange(20_000)
    for fields in ((steps, 1, 2, 3), (1, steps, 2, 3), (1, 2, steps, 3), (1, 2, 3, steps)):
        numbers = uniforms(*fields)
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 60  # chi-square, 19 degrees of freedom: about 1 in 10**5
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
