"""Counts what a ``generate`` call did with its tokens, rows and seconds (definitions: sagc_fast.types.RolloutStats)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from sagc_fast.rollout.step_cost import StepCost
from sagc_fast.types import Group, RolloutStats

TAIL_SHARE = 0.25
"""A step is in the tail when at most this share of the capacity samples (ours)."""


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """What the statistics need of a group, kept apart from the record that its owner may change."""

    num_prompt_tokens: int
    lengths: tuple[int, ...]
    num_truncated: int

    @classmethod
    def of(cls, group: Group) -> GroupFigures:
        num_truncated = sum(c.is_truncated for c in group.completions)
        return cls(len(group.prompt_token_ids), tuple(group.lengths), num_truncated)


class StatsRecorder:
    """Collects one call; :meth:`result` makes the record."""

    def __init__(self, capacity_rows: int) -> None:
        self.capacity_rows = capacity_rows
        self.active_rows: list[int] = []
        self.num_prefill_tokens = 0
        self.num_recomputed_tokens = 0
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.sample_seconds = 0.0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._steps_saved_for_others = 0.0
        self._draft_seconds = 0.0
        self._spans: list[tuple[int, int, int]] = []

    def add_steps(
        self,
        num_sampled: list[int],
        num_prefill_tokens: int,
        num_recomputed_tokens: int,
        num_decode_tokens: int,
        model_seconds: float,
        sample_seconds: float,
    ) -> None:
        """Engine steps of one plan: the rows that sample in each of them, and the tokens and seconds of all.

        Model time is divided between prefill and decode by their tokens. A step without tokens (first tokens drawn
        from prompts that were ready) counts as decode.
        """
        self.active_rows += num_sampled
        self.num_prefill_tokens += num_prefill_tokens
        self.num_recomputed_tokens += num_recomputed_tokens
        num_tokens = num_prefill_tokens + num_decode_tokens
        prefill_share = num_prefill_tokens / num_tokens if num_tokens else 0.0
        self.prefill_seconds += model_seconds * prefill_share
        self.decode_seconds += model_seconds * (1.0 - prefill_share)
        self.sample_seconds += sample_seconds

    def add_drafts(
        self, num_drafted: int, num_accepted: int, num_rows: int, is_short_of_blocks: bool, cost: StepCost
    ) -> None:
        """Drafts of one step in which ``num_rows`` rows sampled. Where others wait for blocks that these hold, the rows
        would have needed ``num_accepted / num_rows`` more such steps without drafts; else the ends of the rows tell."""
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        without = cost.seconds(num_rows)
        self._draft_seconds += cost.seconds(num_rows + num_drafted) - without + cost.draft_seconds(num_rows)
        if is_short_of_blocks:
            self._steps_saved_for_others += num_accepted / num_rows
            self._draft_seconds -= num_accepted / num_rows * without

    def add_end(self, first_step: int, last_step: int, num_steps_ahead: int) -> None:
        """A completion is over, which drafts have made ``num_steps_ahead`` steps shorter, without those in steps in
        which others waited for blocks."""
        self._spans.append((first_step, last_step, num_steps_ahead))

    def num_steps_saved(self) -> float:
        """Steps that the call would have had more without drafts."""
        if not self.num_draft_tokens:
            return 0.0
        _, last, _, last_without = self._spans_without_drafts()
        return self._steps_saved_for_others + int(last_without.max() - last.max())

    def draft_gain_seconds(self, cost: StepCost) -> float:
        """What the steps of the call would have cost more without drafts, by ``cost``; O(n log n) in completions."""
        if not self.num_draft_tokens:
            return 0.0
        first, last, first_without, last_without = self._spans_without_drafts()
        seconds = np.array([0.0, *(cost.seconds(num_rows) for num_rows in range(1, self.capacity_rows + 1))])
        rows_without, rows = (
            np.minimum(_live_per_step(*span), self.capacity_rows)  # of those live, some may have been sent back
            for span in ((first_without, last_without), (first, last))
        )
        return float(seconds[rows_without].sum() - seconds[rows].sum()) - self._draft_seconds

    def _spans_without_drafts(self) -> NDArray[np.int64]:
        """[4, completions]: first and last step of each, and what they would have been without drafts, if completions
        had started in the same order: with all rows taken, each in the one that is over first."""
        spans = []
        ends: list[int] = []  # of the completions whose rows nobody has taken over, with drafts and without
        ends_without: list[int] = []
        for first, last, num_steps_ahead in sorted(self._spans):
            delay = heappop(ends_without) - heappop(ends) if len(ends) == self.capacity_rows else 0
            spans.append((first, last, first + delay, last + delay + num_steps_ahead))
            heappush(ends, spans[-1][1])
            heappush(ends_without, spans[-1][3])
        return np.array(spans, dtype=np.int64).T

    def result(
        self,
        groups: Sequence[GroupFigures],
        total_seconds: float,
        num_preemptions: int,
        kv_blocks_total: int,
        kv_blocks_peak: int,
        kv_bytes_total: int,
        cost: StepCost,
        is_filtered: bool,
    ) -> RolloutStats:
        lengths = [group.lengths for group in groups]
        ratios = [straggler_ratio(group) for group in lengths]
        flat = [length for group in lengths for length in group]
        num_truncated = sum(group.num_truncated for group in groups)
        model_seconds = self.prefill_seconds + self.decode_seconds
        return RolloutStats(
            num_prompts=len(groups),
            num_completions=len(flat),
            num_prompt_tokens=sum(group.num_prompt_tokens for group in groups),
            num_prefill_tokens=self.num_prefill_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_output_tokens=sum(flat),
            num_steps=len(self.active_rows),
            total_seconds=total_seconds,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            sample_seconds=self.sample_seconds,
            host_seconds=max(0.0, total_seconds - model_seconds - self.sample_seconds),
            capacity_rows=self.capacity_rows,
            active_rows=self.active_rows,
            idle_fraction=idle_fraction(self.active_rows, self.capacity_rows),
            tail_fraction=tail_fraction(self.active_rows, self.capacity_rows),
            num_preemptions=num_preemptions,
            kv_blocks_total=kv_blocks_total,
            kv_blocks_peak=kv_blocks_peak,
            kv_bytes_total=kv_bytes_total,
            straggler_ratio_mean=sum(ratios) / len(ratios) if ratios else 0.0,
            straggler_ratio_max=max(ratios, default=0.0),
            clipped_ratio=num_truncated / len(flat) if flat else 0.0,
            mean_length=sum(flat) / len(flat) if flat else 0.0,
            max_length=max(flat, default=0),
            is_filtered=is_filtered,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_steps_saved=self.num_steps_saved(),
            draft_gain_seconds=self.draft_gain_seconds(cost),
        )


def _live_per_step(first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many completions are live in each step, from the first and the last step of each."""
    num_steps = int(last.max()) + 2
    return np.cumsum(np.bincount(first, minlength=num_steps) - np.bincount(last + 1, minlength=num_steps))


def straggler_ratio(lengths: Sequence[int]) -> float:
    """Longest over median completion length of a group (every completion has at least one token)."""
    return max(lengths) / statistics.median(lengths)


def idle_fraction(active_rows: Sequence[int], capacity_rows: int) -> float:
    """1 - useful row-steps / (capacity x steps); 0 without steps."""
    area = capacity_rows * len(active_rows)
    return 1.0 - sum(active_rows) / area if area else 0.0


def tail_fraction(active_rows: Sequence[int], capacity_rows: int) -> float:
    """Share of the steps that sample something, but at most ``TAIL_SHARE`` of the capacity; 0 without steps.

    A step that samples nothing is prefill with its rows waiting, not a tail.
    """
    if not active_rows:
        return 0.0
    return sum(0 < rows <= TAIL_SHARE * capacity_rows for rows in active_rows) / len(active_rows)
