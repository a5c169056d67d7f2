"""Speculative decoding of the last rows: which tokens are drafted, and which of those drawn count. Torch-free.

Lossless under keyed noise. The token at a position is a function of the text before it and of the position's own noise.
A drafted position is computed beside the one before it, its token is drawn with its own noise, and the draw counts if
the text before it turned out as drafted. So the tokens and log-probs are those of one-by-one decoding at every
temperature, and no rejection sampling is needed (compare Leviathan et al. 2023, arXiv:2211.17192, where the noise is
fresh; drafts from earlier text as in prompt lookup decoding and SuffixDecoding, arXiv:2411.04975).

What pays. A step of ``n`` tokens costs in proportion to ``c(n) = sqrt(F^2 + n^2)`` (:mod:`step_cost`), none
``c(0) = 0``. A draft of row ``i`` that counts ends the row one step earlier and saves ``v_i`` (below). With ``R`` rows
and ``m`` drafted tokens, ``G`` the sum of ``v_i`` times the chance of each, the step does the work of ``c(R) + G`` for
``h + c(R + m)``, with ``h`` for the host; ``m`` is where the ratio is largest. The chance of a draft is a product over
the drafts of its row up to it: of the hit rates that :mod:`drafts` keeps by match length, less where the row's newest
tokens were foreseen more rarely than others at matches as long. What is worth most comes first: so the best ``m`` are a
prefix of the sorted drafts, and rows whose text can be foreseen get more than others. While ``n`` is well below ``F`` a
token is nearly free, and even an unlikely draft pays. Hit rates are learnt from tokens that nobody drafted, too: text
that cannot be foreseen is never drafted, it only costs the look-up, and that is done ever more rarely and on less of
the text.

What a step of a row is worth (ours). A row that ends while ``k`` are live, itself included, saves ``c(k) - c(k - 1)``
by ending earlier: hardly anything for ``k > 1``, nearly a whole step for the last. If any row may be the last, all of
them have ``c(R) / R``; so it is while others wait for their rows, too. But rows tend to be cut at their cap, and of
those the one furthest from it that is foreseen most rarely comes last, however fast the others are. So a row's
share in ``c(1)`` is the chance that it comes last (:func:`chances_of_last`), and all share ``c(R) - c(1)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sagc_fast.rollout.drafts import NUM_LEVELS, Cursor, DraftIndex, HitRates
from sagc_fast.rollout.recall import CompletionRecall
from sagc_fast.rollout.rows import RowTable, Slots
from sagc_fast.rollout.sequence import PromptGroup
from sagc_fast.rollout.step_cost import StepCost, plan_seconds

MARGIN = 1.05
"""Drafts must make a token of output cheaper by this factor (ours): chances are estimates."""
MOST_DRAFTED = 32
"""Longest draft of a row in tokens (ours)."""
LOOK_SECONDS = 25e-6
"""What a look at a row's newest tokens takes (measured on an AMD EPYC, Zen 4)."""
LOOK_SHARE = 0.01
"""Share of a step that looks in vain may cost (ours)."""
FIRST_LOOK_SHARE, NEXT_LOOK_SHARE = 0.03, 0.25
"""The same for the first of them, as to the plans that they add: in a call, and behind drafts (ours)."""
LONGEST_PAUSE = 31
"""Most steps without a look while text has been foreseeable in this call (ours)."""
HOPELESS_TOKENS = 256
"""Completion tokens read in a call, hardly any of them expected, after which other prompts get no trial (ours)."""
NEWEST_TOKENS = 8
"""What is read of a text whose group has given no reason to read more (ours)."""
MOST_INDEXED, LEAST_INDEXED = 1 << 17, 1 << 11
"""Tokens that the indices of a call take in together, and one at least (ours; a token takes some 250 bytes)."""

LEAST_CHANCE = 1 / 64
"""Less likely drafts are not considered (ours)."""
PRIOR_HITS = 2.0
"""Weight in tokens of what all rows have in common when a row's own hits are counted (ours)."""
SPREAD = 0.1
"""How far apart the times at which two rows reach their caps have to be for e : 1 odds on their order, as a share of
the steps that are left (ours)."""
_PLACES = np.arange(MOST_DRAFTED)
_LEVEL_OF = np.array([min(n.bit_length(), NUM_LEVELS) for n in range(1 << (NUM_LEVELS - 1) | 1)])
"""Level of a match length; longer ones are in the last."""

SpeculationMode = Literal["auto", "fixed", "off"]
SPECULATION_MODES: tuple[SpeculationMode, ...] = ("auto", "fixed", "off")


class Speculation:
    """What an engine keeps for its calls: whether to draft, what a step costs, and completions of earlier calls.

    ``auto`` learns what a token costs from the seconds that steps take, ``fixed`` goes by ``fixed_tokens`` (see
    :class:`StepCost`), so that the same call has the same steps on every machine; ``off`` drafts nothing.
    ``recall_bytes`` above 0 keeps each prompt's completions for the next call that has it. ``has_bursts``: native code
    takes many steps at a time, which a look at the text cuts short.
    """

    def __init__(
        self,
        mode: SpeculationMode,
        fixed_tokens: float,
        step_seconds: float,
        recall_bytes: int = 0,
        has_bursts: bool = False,
    ) -> None:
        self.is_on = mode != "off"
        self.step_seconds, self.fixed_tokens = step_seconds, fixed_tokens
        """First estimates, which no clock changes: what a step costs at least, and how many tokens cost as much."""
        self.plan_seconds = plan_seconds(has_bursts)
        """What a look costs beside the reading: the plan that would not have been."""
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
        self._most_rows = most_rows(speculation.fixed_tokens, speculation.step_seconds)
        self._prior_token_seconds = speculation.step_seconds / speculation.fixed_tokens
        self._plan_seconds = speculation.plan_seconds
        self._prior_step_seconds = speculation.step_seconds
        self._rates = HitRates()
        self._num_ended = 0
        self._tokens_of_ended = 0
        self._pause = 0
        self._next_pause: int | None = None
        """Behind a look in vain; None before the first."""

    def note_finished(self, num_output: int, max_output: int) -> None:
        """A completion is over; before its cap, if it has fewer tokens."""
        self._num_ended += num_output < max_output
        self._tokens_of_ended += num_output

    def propose(self, slots: Slots, most: NDArray[np.int64], budget: int, is_awaited: bool = False) -> Drafts:
        """Drafts for the decode rows ``slots``: at most ``most`` [D] tokens each, ``budget`` together. ``is_awaited``:
        others wait for these rows."""
        num_rows = slots.size
        if not num_rows or num_rows > self.most_rows:
            return no_drafts(num_rows)
        if self._pause:
            self._pause -= 1
            return no_drafts(num_rows)
        outputs = self._rows.num_output[slots]
        columns = (slots.tolist(), outputs.tolist(), self._rows.last_token[slots].tolist())
        cursors = [self._up_to_date(*row, num_rows) for row in zip(*columns, strict=True)]
        match_lengths = np.array([cursor.match_length for cursor in cursors])
        lengths = no_drafts(num_rows).lengths
        if match_lengths.any():
            lengths = worthwhile(
                match_lengths,
                most,
                budget,
                self._rates,
                self._cost.fixed_tokens,
                self._host_tokens(num_rows),
                np.array([_luck(cursor) for cursor in cursors]),
                None if is_awaited else self._last_chances(slots, cursors),
            )
        tokens: list[int] = []
        for row in np.flatnonzero(lengths).tolist():
            drafted = cursors[row].draft(int(lengths[row]))
            lengths[row] = len(drafted)
            tokens += drafted
        self._plan_pause(num_rows, is_drafting=bool(tokens))
        return Drafts(lengths, np.array(tokens, dtype=np.int64))

    def _last_chances(self, slots: Slots, cursors: list[Cursor]) -> NDArray[np.float64]:
        num_output = self._rows.num_output[slots]
        num_left = self._rows.max_output[slots] - num_output
        read, hits = (np.array([getattr(c, name) for c in cursors]) for name in ("num_read", "num_hits"))
        common = (hits.sum() + 1) / (read.sum() + 2)
        foreseen = (hits + PRIOR_HITS * common) / (read + PRIOR_HITS)
        end_rate = (self._num_ended + 0.5) / (self._tokens_of_ended + int(num_output.sum()))
        return chances_of_last(num_left, foreseen, end_rate)

    @property
    def _goes_by_the_clock(self) -> bool:
        """Whether the seconds of steps may decide, and there are some."""
        return self._cost.is_learnt and self._cost.seconds_per_token > 0.0

    def _host_tokens(self, num_rows: int) -> float:
        """What the host's work for drafts costs, in tokens."""
        token_seconds = self._cost.seconds_per_token if self._goes_by_the_clock else self._prior_token_seconds
        return self._cost.draft_seconds(num_rows) / token_seconds

    @property
    def most_rows(self) -> int:
        """With more rows than these nothing is drafted or looked at."""
        return int(min(self._most_rows, self._cost.fixed_tokens))

    @property
    def _is_hopeless(self) -> bool:
        return self._rates.num_read >= HOPELESS_TOKENS and not self._rates.is_promising

    def _plan_pause(self, num_rows: int, is_drafting: bool) -> None:
        """No look for ever more steps when looks were in vain, up to where they cost next to nothing."""
        step_seconds = self._cost.seconds(num_rows) if self._goes_by_the_clock else self._prior_step_seconds
        if is_drafting:
            self._pause, self._next_pause = 0, self._steps_worth_a_plan(NEXT_LOOK_SHARE, step_seconds)
            return
        longest = int((num_rows * LOOK_SECONDS + self._plan_seconds) / (LOOK_SHARE * step_seconds))
        if self._rates.is_promising:
            longest = min(longest, LONGEST_PAUSE)
        if self._next_pause is None:
            self._next_pause = self._steps_worth_a_plan(FIRST_LOOK_SHARE, step_seconds)
        self._pause = longest if self._is_hopeless else min(self._next_pause, longest)
        self._next_pause = 2 * self._pause + 1

    def _steps_worth_a_plan(self, share: float, step_seconds: float) -> int:
        return max(1, math.ceil(self._plan_seconds / (share * step_seconds)))

    def num_quiet_steps(self, num_rows: int) -> int | None:
        """For how many steps with these rows :meth:`propose` is sure to propose nothing, so that it need not be asked
        (see :meth:`skip`); None: as long as there are so many rows."""
        return self._pause if num_rows <= self.most_rows else None

    def skip(self, num_steps: int) -> None:
        """So many of these steps are done, and :meth:`propose` has not been asked."""
        self._pause = max(0, self._pause - num_steps)

    def _up_to_date(self, slot: int, num_output: int, newest_token: int, num_rows: int) -> Cursor:
        """The cursor of the sequence in ``slot``, all its ``num_output`` tokens read."""
        sequence = self._rows.sequences[slot]
        cursor = sequence.cursor
        if cursor is None:
            cursor = sequence.cursor = self._index(sequence.group, num_rows).new_text()
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

    def _index(self, group: PromptGroup, num_rows: int) -> DraftIndex:
        """The group's index; made when it is first asked for, of all that has been written by then."""
        if group.drafts is None:
            max_tokens = max(LEAST_INDEXED, MOST_INDEXED // num_rows)  # no more groups are live than rows
            if self._is_hopeless:
                group.drafts = DraftIndex((), self._rates, max_tokens, trial_tokens=0)
            else:
                group.drafts = DraftIndex(group.token_ids.tolist(), self._rates, max_tokens)
            earlier = [] if self._recall is None else self._recall.texts(group.token_ids)
            for text in (*earlier, *(c.token_ids for c in group.completions.values())):
                if not group.drafts.is_promising:
                    break
                group.drafts.new_text().extend(text)
        return group.drafts


def most_rows(fixed_tokens: float, step_seconds: float) -> int:
    """Rows up to which text is looked at, by first estimates: ``F``, as beyond it only drafts likelier than not could
    pay, and fewer where the host's work for drafts would outweigh the step (ours)."""
    host = StepCost(fixed_tokens, is_learnt=False)
    rows = 0
    while rows < fixed_tokens and host.draft_seconds(rows + 1) <= step_seconds * math.hypot(
        1, (rows + 1) / fixed_tokens
    ):
        rows += 1
    return rows


def chances_of_last(num_left: NDArray[np.int64], foreseen: NDArray[np.float64], end_rate: float) -> NDArray[np.float64]:
    """[R], for each row the chance that it is the last to end; they add up to 1.

    A row that does not end by itself takes some ``num_left / (1 + foreseen)`` steps to its cap, with ``num_left`` [R]
    tokens before it of which the share ``foreseen`` [R] is drafted. By itself it ends at every token with the chance
    ``end_rate``. It comes last if it reaches its cap and no row that does comes later, the order of any two being a
    logistic function of the difference of their times. What these chances leave to 1, nobody knows: all rows share it.
    """
    times = num_left / (1.0 + foreseen)
    reaches = np.exp(-end_rate * num_left)
    spread = SPREAD * max(float(num_left.max()), 1.0)
    is_later = 1.0 / (1.0 + np.exp((times - times[:, None]) / spread))  # [R, R]: the first than the second
    stays = 1.0 - reaches[:, None] * is_later
    np.fill_diagonal(stays, 1.0)
    chances = reaches * stays.prod(axis=0)
    return chances + max(0.0, 1.0 - float(chances.sum())) / chances.size


def values(chances: NDArray[np.float64], fixed_tokens: float) -> NDArray[np.float64]:
    """[R], what a step of each row is worth, from its chance to be the last: they add up to ``c(R)``."""
    alone, together = math.hypot(fixed_tokens, 1), math.hypot(fixed_tokens, chances.size)
    return chances * alone + (together - alone) / chances.size


def _luck(cursor: Cursor) -> float:
    """How much more rarely this text was foreseen of late than others at matches as long: in (0, 1]."""
    return min(1.0, (cursor.num_hits + PRIOR_HITS) / (cursor.num_expected + PRIOR_HITS))


def worthwhile(
    match_lengths: NDArray[np.int64],
    most: NDArray[np.int64],
    budget: int,
    rates: HitRates,
    fixed_tokens: float,
    host_tokens: float = 0.0,
    luck: NDArray[np.float64] | None = None,
    last_chances: NDArray[np.float64] | None = None,
) -> NDArray[np.int64]:
    """How many tokens to draft for each row (see the top of this file): [R], at most ``most`` [R] each, ``budget``
    together. ``match_lengths`` [R]: 0 where nothing is expected. ``host_tokens``: the host's work, in tokens. ``luck``
    [R]: what the hit rates are multiplied by, 1 by default; ``last_chances`` [R]: of each row to be the last, by
    default the same for all."""
    num_rows = match_lengths.size
    lengths = np.zeros(num_rows, dtype=np.int64)
    matched = np.flatnonzero((match_lengths > 0) & (most > 0))
    if not matched.size or budget <= 0:
        return lengths
    grown = np.minimum(match_lengths[matched, None] + _PLACES, _LEVEL_OF.size - 1)
    hit_rates = np.array(rates.by_level())[_LEVEL_OF[grown]]
    if luck is not None:
        hit_rates *= luck[matched, None]
    chances = np.cumprod(hit_rates, axis=1)
    chances[(chances < LEAST_CHANCE) | (most[matched, None] <= _PLACES)] = 0.0
    if last_chances is None:
        last_chances = np.full(num_rows, 1 / num_rows)
    gains = chances * values(last_chances, fixed_tokens)[matched, None]
    ranked = np.sort(gains[gains > 0.0])[::-1][:budget]
    if not ranked.size:
        return lengths
    step = math.hypot(fixed_tokens, num_rows)
    cost = host_tokens + np.hypot(fixed_tokens, num_rows + np.arange(1, ranked.size + 1))
    worth = (step + np.cumsum(ranked)) / cost
    best = int(np.argmax(worth))
    if worth[best] <= MARGIN:
        return lengths
    certain = (gains > ranked[best]).sum(axis=1)
    equal = (gains == ranked[best]).sum(axis=1)  # alike in every row, unless the budget ends: the first rows get it
    before = np.cumsum(equal) - equal
    lengths[matched] = certain + np.clip(budget - certain.sum() - before, 0, equal)
    return lengths
