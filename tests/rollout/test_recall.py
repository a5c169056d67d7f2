"""Completions kept for the next call with the same prompt."""

from __future__ import annotations

import numpy as np
import pytest

from sagc_fast.rollout import recall as module
from sagc_fast.rollout.recall import CompletionRecall


def test_the_newest_completions_of_a_prompt_replace_the_earlier_ones():
    recall = CompletionRecall(1000)
    recall.store(np.array([1, 2]), [[3, 4], [5]])
    recall.store(np.array([1]), [[9]])
    assert recall.texts(np.array([1, 2])) == [[3, 4], [5]]
    recall.store(np.array([1, 2]), [[6]])
    assert recall.texts(np.array([1, 2])) == [[6]]
    assert recall.texts(np.array([2, 1])) == []
    assert recall.num_bytes == 8


def test_the_limit_holds_and_the_oldest_prompts_go_first():
    recall = CompletionRecall(40)
    for prompt in range(5):
        recall.store(np.array([prompt]), [[7] * 4])
        assert recall.num_bytes <= 40
    assert [bool(recall.texts(np.array([p]))) for p in range(5)] == [False, False, False, True, True]
    recall.store(np.array([9]), [[7] * 100])
    assert (len(recall), recall.num_bytes) == (0, 0)


def test_an_interrupt_between_a_prompt_and_its_bytes_does_no_harm_for_long(monkeypatch):
    """The bytes of what had gone stayed counted: less was kept from then on, or nothing, and a KeyError in the end."""
    recall = CompletionRecall(40)
    recall.store(np.array([1]), [[7] * 10])
    sizes = [40]

    def interrupted(_texts):
        if not sizes:
            raise KeyboardInterrupt
        return sizes.pop()

    with monkeypatch.context() as patch:
        patch.setattr(module, "_bytes_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recall.store(np.array([1]), [[8] * 10])
    for _ in range(2):
        recall.store(np.array([2]), [[7] * 4])
    assert (len(recall), recall.num_bytes) == (1, 16)
