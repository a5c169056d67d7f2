"""Completions kept for the next call with the same prompt."""

from __future__ import annotations

import numpy as np

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
