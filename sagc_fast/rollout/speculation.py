"""Speculative decoding of the last rows: which tokens are drafted, and which of those drawn count. Torch-free.

Lossless under keyed noise. The token at a position is a function of the text before it and of the position's own noise.
A drafted position is computed beside the one before it, its token is drawn with its own noise, and the draw counts if
the text before it turned out as drafted. So the tokens and log-probs are those of one-by-one decoding at every
temperature, and no rejection sampling is needed (compare Leviathan et al. 2023, arXiv:2211.17192, where the noise is
fresh; drafts from earlier text as in prompt lookup decoding and SuffixDecoding, arXiv:2411.04975).

What pays. With ``R`` rows and steps of ``a + b n`` seconds, ``F = a / b``, a row's token costs ``(F + R) / R`` in units
of ``b``. If ``k`` drafted tokens in each row bring ``E`` more, it costs ``(F + R (1 + k)) / (R (1 + E))``. One more
draft, accepted with probability ``p``, lowers that as long as ``p (F + R (1 + k)) > R (1 + E)``. ``p`` is the product
of the hit rates that :mod:`drafts` keeps by match length, so that drafts grow where they are accepted and shrink where
they are not, for every sequence by itself. Hit rates are learnt from tokens that nobody drafted, too: text that cannot
be foreseen is never drafted, it only costs the look-up, and that is done ever more rarely and on less of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sagc_fast.rollout.drafts import Cursor, DraftIndex, HitRates
from sagc_fast.rollout.recall import CompletionRecall
from sagc_fast.rollout.rows import RowTable, Slots
from sagc_fast.rollout.sequence import PromptGroup
from sagc_fast.rollout.step_cost import StepCost

MARGIN = 1.25
"""A draft must promise so many times its cost (ours): the host's work for it is not in the cost model."""
ROWS_PER_FIXED_TOKEN = 1.0
"""Nothing is looked up while more than ``F`` rows are live (ours): half of a step's cost is then its tokens' own."""
MOST_DRAFTED = 32
"""Longest draft of a row in tokens (ours)."""
LONGEST_PAUSE = 31
"""Most steps without a look-up after steps in which nothing was worth drafting (ours)."""
HOPELESS_TOKENS = 256
"""Completion tokens read in a call, hardly any of them expected, after which other prompts get no trial (ours)."""
NEWEST_TOKENS = 16
"""What is read of a text whose group has given no reason to read more (ours)."""
MOST_INDEXED, LEAST_INDEXED = 1 << 17, 1 << 11
"""Tokens that the indices of a call take in together, and one at least (ours; a token takes some 250 bytes)."""

SpeculationMode = Literal["auto", "fixed", "off"]
SPECULATION_MODES: tuple[SpeculationMode, ...] = ("auto", "fixed", "off")


class Speculation:
    """What an engine keeps for its calls: whether to draft, what a step costs, and completions of earlier calls.

    ``auto`` learns what a token costs from the seconds that steps take, ``fixed`` goes by ``fixed_tokens`` (see
    :class:`StepCost`), so that the same call has the same steps on every machine; ``off`` drafts nothing.
    ``recall_bytes`` above 0 keeps each prompt's completions for the next call that has it.
    """

    def __init__(self, mode: SpeculationMode, fixed_tokens: float, recall_bytes: int = 0) -> None:
        self.is_on = mode != "off"
        self.cost = StepCost(fixed_tokens, is_learnt=mode == "auto")
        self.recall = CompletionRecall(recall_bytes) if self.is_on and recall_bytes else None


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Drafted tokens of a step's decode rows."""

    lengths: NDArray[np.int64]
    """[D], one per decode row."""
    tokens: NDArray[np.int64]
    """Those of the first row, of the second, ..."""

    def cut(self, most: NDArray[np.int64]) -> Drafts:
        """At most ``most`` [D] of them per row."""
        if (self.lengths <= most).all():
            return self
        row = np.repeat(np.arange(self.lengths.size), self.lengths)
        place = np.arange(self.tokens.size) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        return Drafts(np.minimum(self.lengths, most), self.tokens[place < most[row]])


def no_drafts(num_rows: int) -> Drafts:
    return Drafts(np.zeros(num_rows, dtype=np.int64), np.empty(0, dtype=np.int64))


def num_accepted(drafts: Drafts, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
    """[D], how many leading drafts of each row were drawn.

    ``drawn``: the tokens of the decode rows, for each row those of its own position and of its drafted ones.
    """
    lengths = drafts.lengths
    if not drafts.tokens.size:
        return lengths
    is_last = np.zeros(drawn.size, dtype=bool)
    is_last[np.cumsum(lengths + 1) - 1] = True
    is_miss = drawn[~is_last] != drafts.tokens
    misses_so_far = np.concatenate(([0], np.cumsum(is_miss)))
    begins = np.cumsum(lengths) - lengths
    is_hit = misses_so_far[1:] == np.repeat(misses_so_far[begins], lengths)
    hits_so_far = np.concatenate(([0], np.cumsum(is_hit)))
    return hits_so_far[begins + lengths] - hits_so_far[begins]


class Speculator:
    """Proposes drafts for the decode rows of one call."""

    def __init__(self, rows: RowTable, speculation: Speculation) -> None:
        self._rows = rows
        self._cost = speculation.cost
        self._recall = speculation.recall
        self._rates = HitRates()
        self._pause = 0
        self._next_pause = 1
        self._num_rows = 0
        self._worth: dict[int, int] = {}

    def propose(self, slots: Slots, most: NDArray[np.int64], budget: int) -> Drafts:
        """Drafts for the decode rows ``slots``: at most ``most`` [D] tokens each, ``budget`` together."""
        num_rows = slots.size
        if not num_rows or num_rows > ROWS_PER_FIXED_TOKEN * self._cost.fixed_tokens:
            return no_drafts(num_rows)
        if self._pause:
            self._pause -= 1
            return no_drafts(num_rows)
        self._num_rows, self._worth = num_rows, {}
        lengths = [0] * num_rows
        tokens: list[int] = []
        outputs = self._rows.num_output[slots]
        newest = self._rows.last_token[slots]
        columns = (slots.tolist(), outputs.tolist(), newest.tolist(), most.tolist())
        for row, (slot, num_output, token, limit) in enumerate(zip(*columns, strict=True)):
            cursor = self._up_to_date(slot, num_output, token)
            if cursor.match_length:
                drafted = cursor.draft(min(self._worthwhile(cursor.match_length), limit, budget))
                lengths[row] = len(drafted)
                budget -= len(drafted)
                tokens += drafted
        self._pause = 0 if tokens else self._next_pause
        self._next_pause = 1 if tokens else min(2 * self._next_pause + 1, LONGEST_PAUSE)
        return Drafts(np.array(lengths, dtype=np.int64), np.array(tokens, dtype=np.int64))

    def num_quiet_steps(self, num_rows: int) -> int | None:
        """For how many steps with these rows :meth:`propose` is sure to propose nothing, so that it need not be asked
        (see :meth:`skip`); None: as long as there are so many rows."""
        return None if num_rows > ROWS_PER_FIXED_TOKEN * self._cost.fixed_tokens else self._pause

    def skip(self, num_steps: int) -> None:
        """So many of these steps are done, and :meth:`propose` has not been asked."""
        self._pause = max(0, self._pause - num_steps)

    def _up_to_date(self, slot: int, num_output: int, newest_token: int) -> Cursor:
        """The cursor of the sequence in ``slot``, all its ``num_output`` tokens read."""
        sequence = self._rows.sequences[slot]
        cursor = sequence.cursor
        if cursor is None:
            cursor = sequence.cursor = self._index(sequence.group).new_text()
        num_new = num_output - len(cursor.text)
        if num_new == 1:
            cursor.extend((newest_token,))
        elif num_new:
            new = self._rows.outputs_from(slot, num_output - num_new)
            if num_new > NEWEST_TOKENS and not sequence.group.drafts.is_promising:
                cursor.skip(new[:-NEWEST_TOKENS])
                new = new[-NEWEST_TOKENS:]
            cursor.extend(new)
        return cursor

    def _worthwhile(self, match_length: int) -> int:
        """How many tokens to draft behind a match; looked up after the first time in a step."""
        known = self._worth.get(match_length)
        if known is None:
            known = self._worth[match_length] = worthwhile(
                match_length, self._rates, self._num_rows, self._cost.fixed_tokens
            )
        return known

    def _index(self, group: PromptGroup) -> DraftIndex:
        """The group's index; made when it is first asked for, of all that has been written by then."""
        if group.drafts is None:
            max_tokens = max(LEAST_INDEXED, MOST_INDEXED // self._num_rows)  # no more groups are live than rows
            if self._rates.num_read >= HOPELESS_TOKENS and not self._rates.is_promising:
                group.drafts = DraftIndex((), self._rates, max_tokens, trial_tokens=0)
            else:
                group.drafts = DraftIndex(group.token_ids.tolist(), self._rates, max_tokens)
            earlier = [] if self._recall is None else self._recall.texts(group.token_ids)
            for text in (*earlier, *(c.token_ids for c in group.completions.values())):
                if not group.drafts.is_promising:
                    break
                group.drafts.new_text().extend(text)
        return group.drafts


def worthwhile(match_length: int, rates: HitRates, num_rows: int, fixed_tokens: float) -> int:
    """How many tokens to draft behind a match of that length (see the top of this file)."""
    accepted, expected, drafted = 1.0, 0.0, 0
    cost = fixed_tokens + num_rows
    while drafted < MOST_DRAFTED:
        accepted *= rates.of_length(match_length + drafted)
        if accepted * cost <= MARGIN * num_rows * (1.0 + expected):
            break
        drafted += 1
        expected += accepted
        cost += num_rows
    return drafted
