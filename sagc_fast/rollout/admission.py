"""Which completion starts next: the one expected to run longest.

The expected length of a group's completions is, in this order, the mean of earlier calls for the same prompt, the
mean of its own finished siblings, the mean over all groups, the length cap. It never exceeds the cap.

Groups wait, not completions: two heaps with lazy deletion (groups with an expectation of their own, groups without)
make a start or a finish cost O(log groups), and nothing is done for those that merely wait.
"""

from __future__ import annotations

import heapq

from sagc_fast.rollout.lengths import LengthHistory
from sagc_fast.rollout.sequence import PromptGroup, Sequence


class AdmissionQueue:
    """Completions that have never started, longest expected first; ties go to groups that nothing is known about."""

    def __init__(self, history: LengthHistory) -> None:
        self._history = history
        self._known: list[tuple[float, int, PromptGroup]] = []
        self._unknown: list[tuple[int, int, PromptGroup]] = []
        self._current_key: dict[int, float] = {}
        self._finished_tokens = 0
        self._num_finished = 0
        self.num_waiting = 0

    def add(self, group: PromptGroup) -> None:
        """Queue all completions of a group, those with the highest cap first."""
        group.unstarted = sorted(group.sequences, key=lambda s: (s.max_output, -s.sample_index))
        self.num_waiting += len(group.unstarted)
        expected = self._history.expected(group.token_ids)
        group.is_known_from_before = expected is not None
        if expected is None:
            heapq.heappush(self._unknown, (-group.unstarted[-1].max_output, group.prompt_index, group))
        else:
            group.has_known_length = True
            self._push_known(group, expected)

    def peek(self) -> Sequence | None:
        """The next completion to start; it stays in the queue."""
        known, unknown = self._first_known(), self._first_unknown()
        if known is None or unknown is None:
            group = known or unknown
            return group.unstarted[-1] if group is not None else None
        mean = self._overall_mean()
        cap = unknown.unstarted[-1].max_output
        unknown_expected = cap if mean is None else min(mean, cap)
        return (known if -self._known[0][0] > unknown_expected else unknown).unstarted[-1]

    def pop(self, sequence: Sequence) -> None:
        """Take out the completion that :meth:`peek` returned."""
        popped = sequence.group.unstarted.pop()
        assert popped is sequence
        self.num_waiting -= 1

    def note_finished(self, group: PromptGroup, length: int) -> None:
        """A sibling ended: groups without a history of earlier calls take their expectation from it."""
        self._finished_tokens += length
        self._num_finished += 1
        if group.unstarted and not group.is_known_from_before:
            group.has_known_length = True
            self._push_known(group, group.finished_tokens / group.num_finished)

    def _push_known(self, group: PromptGroup, expected: float) -> None:
        key = -min(expected, float(group.unstarted[-1].max_output))
        self._current_key[group.prompt_index] = key
        heapq.heappush(self._known, (key, group.prompt_index, group))

    def _first_known(self) -> PromptGroup | None:
        heap = self._known
        while heap and (not heap[0][2].unstarted or self._current_key[heap[0][1]] != heap[0][0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _first_unknown(self) -> PromptGroup | None:
        heap = self._unknown
        while heap and (not heap[0][2].unstarted or heap[0][2].has_known_length):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _overall_mean(self) -> float | None:
        if self._num_finished:
            return self._finished_tokens / self._num_finished
        return self._history.overall
