"""Blocks are never lost, doubled or handed out while somebody holds them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagc_fast.rollout.block_manager import BlockManager


class Owners(RuleBasedStateMachine):
    """Random owners take, share and give back tables; a dictionary of counts is the oracle."""

    def __init__(self):
        super().__init__()
        self.blocks = BlockManager(12)
        self.tables = []

    @rule(count=st.integers(0, 12))
    def take(self, count):
        if count <= self.blocks.num_free:
            before = {int(b) for table in self.tables for b in table}
            taken = self.blocks.allocate(count)
            assert before.isdisjoint(taken.tolist())
            self.tables.append(taken)

    @rule(data=st.data())
    def share(self, data):
        if self.tables:
            table = data.draw(st.sampled_from(self.tables))
            part = table[: data.draw(st.integers(0, table.size))].copy()
            self.blocks.share(part)
            self.tables.append(part)

    @rule(data=st.data())
    def give_back(self, data):
        if self.tables:
            self.blocks.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def counts_agree(self):
        expected = np.zeros(12, dtype=int)
        for table in self.tables:
            expected[table] += 1
        assert np.array_equal(self.blocks.refcounts, expected)
        assert self.blocks.num_used == (expected > 0).sum()
        assert self.blocks.peak_used >= self.blocks.num_used


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


def test_the_block_freed_last_is_used_next():
    blocks = BlockManager(1000)
    first = blocks.allocate(3)
    blocks.release(first)
    assert set(blocks.allocate(3).tolist()) == set(first.tolist())


def test_taking_too_many_or_releasing_twice_is_a_loud_bug():
    blocks = BlockManager(2)
    with pytest.raises(RuntimeError, match="3 KV blocks were asked for with 2 free"):
        blocks.allocate(3)
    table = blocks.allocate(1)
    blocks.release(table)
    with pytest.raises(RuntimeError, match="released more often"):
        blocks.release(table)
