"""One ``generate`` call from first admission to last completion. All of its state dies with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from time import thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagc_fast.profiling import ranged
from sagc_fast.rollout.admission import AdmissionQueue
from sagc_fast.rollout.block_manager import BlockManager
from sagc_fast.rollout.decode_graphs import DecodeGraphs
from sagc_fast.rollout.graph_runner import GraphRunner
from sagc_fast.rollout.kv_cache import KVCache
from sagc_fast.rollout.lengths import LengthHistory
from sagc_fast.rollout.model_runner import ModelRunner, StepResult
from sagc_fast.rollout.plan import StepPlan
from sagc_fast.rollout.request import PromptRequest
from sagc_fast.rollout.rows import RowTable, Slots
from sagc_fast.rollout.scheduler import Scheduler
from sagc_fast.rollout.sequence import PromptGroup, Sequence
from sagc_fast.rollout.speculation import Speculation, Speculator, num_accepted
from sagc_fast.rollout.stats import GroupFigures, StatsRecorder
from sagc_fast.rollout.stop import Detokenizer, EndTable, StopMatcher, cut_at_stop
from sagc_fast.types import Completion, Group, RolloutStats

OnGroup = Callable[[Group], None]


@dataclass(frozen=True, slots=True)
class CallSettings:
    """What the engine fixes for a call."""

    capacity_rows: int
    max_batch_tokens: int
    eos_token_ids: tuple[int, ...]
    policy_version: int


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Tokens drawn in a step, in sampling order; those of a row stand side by side."""

    slots: Slots
    offsets: NDArray[np.int64]
    """Place of each token among those that its row drew in this step."""
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    is_over: NDArray[np.bool_]
    """Whether the completion ends with the token: one of the next two, or the length cap."""
    is_stopped: NDArray[np.bool_]
    is_matched: NDArray[np.bool_]
    """Whether the token completes a stop string."""

    def only(self, is_kept: NDArray[np.bool_]) -> Drawn:
        return Drawn(*(getattr(self, field)[is_kept] for field in self.__slots__))


class Call:
    """Runs steps until every group is complete. ``on_group`` may raise: nothing outlives the call."""

    def __init__(
        self,
        model: Any,
        kv: KVCache,
        requests: list[PromptRequest],
        settings: CallSettings,
        history: LengthHistory,
        detokenizer: Detokenizer | None,
        speculation: Speculation,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._settings = settings
        self._history = history
        self._detokenizer = detokenizer
        self._end_table = EndTable()
        self._context_length = model.config.max_position_embeddings
        self._sequence_groups = [self._make_group(index, request) for index, request in enumerate(requests)]
        longest = max(s.group.prompt_length + s.max_output for g in self._sequence_groups for s in g.sequences)
        self._rows = RowTable(settings.capacity_rows, max_blocks=-(-longest // kv.block_size))
        self._blocks = BlockManager(kv.num_blocks)
        queue = AdmissionQueue(history)
        self._speculation = speculation
        runner = ModelRunner if graphs is None else partial(GraphRunner, graphs=graphs)
        self._runner = runner(model, kv, self._rows, self._end_table)
        self._scheduler = Scheduler(
            queue,
            self._rows,
            self._blocks,
            kv.block_size,
            settings.max_batch_tokens,
            Speculator(self._rows, speculation) if speculation.is_on else None,
            self._runner.max_steps,
            self._runner.closes_ranks,
        )
        for group in self._sequence_groups:
            queue.add(group)
        self._kv_bytes = kv.num_bytes
        self._recorder = StatsRecorder(settings.capacity_rows)
        self._groups: dict[int, Group] = {}
        self._figures: dict[int, GroupFigures] = {}

    def run(self, on_group: OnGroup | None) -> list[Group]:
        """All groups, in prompt order."""
        while self._scheduler.has_work:
            for group in self._run_plan(first_step=len(self._recorder.active_rows)):
                if on_group is not None:
                    on_group(group)
        return [self._groups[index] for index in range(len(self._sequence_groups))]

    def stats(self, total_seconds: float) -> RolloutStats:
        params = (s.params for group in self._sequence_groups for s in group.sequences)
        stats = self._recorder.result(
            [self._figures[index] for index in range(len(self._sequence_groups))],
            total_seconds,
            num_preemptions=self._scheduler.num_preemptions,
            kv_blocks_total=self._blocks.num_blocks,
            kv_blocks_peak=self._blocks.peak_used,
            kv_bytes_total=self._kv_bytes,
            cost=self._speculation.cost,
            is_filtered=any(p.is_filtered and p.temperature > 0 for p in params),
        )
        return replace(stats, **self._runner.device_figures())

    # ---- one plan ------------------------------------------------------------------------------------------------

    @ranged("engine step")
    def _run_plan(self, first_step: int) -> list[Group]:
        """Plan, compute, sample, retire; the groups that are complete now. Mostly one step, see ``num_steps``."""
        started = thread_time()  # of this thread, so that a busy machine does not teach wrong costs
        rows, scheduler = self._rows, self._scheduler
        plan = scheduler.schedule()
        if not (plan.sample_slots.size or plan.chunks):
            raise RuntimeError("The rollout scheduler has work and planned none; this is a bug in sagc_fast.")
        result = self._runner.run(plan)
        is_burst = result.num_steps > 1
        num_hits = num_accepted(plan.drafts, result.tokens[: plan.num_decode_tokens])
        drawn = self._up_to_ends(*_that_count(plan, result, num_hits))
        num_new = _tokens_per_row(drawn.offsets) if is_burst else 1 + num_hits
        scheduler.commit(plan, num_new, result.num_steps, result.num_ahead)
        slots = drawn.slots
        is_short_of_blocks = plan.is_awaited and rows.num_free > 0
        if slots.size:
            rows.append(slots, drawn.offsets, drawn.tokens, drawn.logprobs)
            if not plan.is_decode_only:
                for slot in slots[rows.num_output[slots] == 1].tolist():
                    rows.sequences[slot].first_step = first_step
            if plan.drafts.tokens.size and not is_short_of_blocks:
                for slot in slots[drawn.offsets > 0].tolist():
                    rows.sequences[slot].num_steps_ahead += 1
        steps = drawn.offsets * is_burst  # without a burst offsets are places in a draft
        complete = self._retire(drawn, steps, first_step) if drawn.is_over.any() else []
        self._record(plan, result, drawn, is_short_of_blocks, seconds=thread_time() - started)
        return complete

    def _up_to_ends(
        self, slots: Slots, offsets: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray[np.float32]
    ) -> Drawn:
        """Find the tokens that end their row, by id, by text or by the cap; what a row drew behind one never was."""
        rows = self._rows
        is_end = self._end_table.is_end(tokens, rows.end_set[slots])
        is_last = rows.num_output[slots] + offsets + 1 >= rows.max_output[slots]
        is_matched = np.zeros(slots.size, dtype=bool)
        over_slot = -1
        for row in np.flatnonzero(rows.has_matcher[slots]).tolist():
            slot = int(slots[row])
            if slot == over_slot:
                continue
            is_matched[row] = rows.sequences[slot].matcher.push(int(tokens[row]))
            if is_matched[row] or is_end[row]:
                over_slot = slot
        is_stopped = is_end | is_matched
        drawn = Drawn(slots, offsets, tokens, logprobs, is_stopped | is_last, is_stopped, is_matched)
        if not drawn.is_over.any() or not offsets.any():
            return drawn
        # A row's tokens stand side by side: keep those with no end before them in their row.
        ends_before = np.cumsum(drawn.is_over) - drawn.is_over
        first_of_row = np.arange(slots.size) - offsets
        return drawn.only(ends_before == ends_before[first_of_row])

    def _retire(self, drawn: Drawn, steps: NDArray[np.int64], first_step: int) -> list[Group]:
        """Take out the rows that are over, step by step; the groups that this completes."""
        complete = []
        over = np.flatnonzero(drawn.is_over)
        over = over[np.argsort(steps[over], kind="stable")]
        steps = steps[over]
        sequences = self._scheduler.finish(drawn.slots[over], steps + 1)
        for row, step, sequence in zip(over.tolist(), steps.tolist(), sequences, strict=True):
            group = sequence.group
            is_stopped, is_matched = bool(drawn.is_stopped[row]), bool(drawn.is_matched[row])
            completion = self._completion(sequence, first_step + step, is_stopped, is_matched)
            self._recorder.add_end(completion.first_step, completion.last_step, sequence.num_steps_ahead)
            group.completions[sequence.sample_index] = completion
            if len(group.completions) == len(group.sequences):
                complete.append(self._complete(group))
        return complete

    def _record(
        self, plan: StepPlan, result: StepResult, drawn: Drawn, is_short_of_blocks: bool, seconds: float
    ) -> None:
        num_rows, cost = plan.num_sampled_rows, self._speculation.cost
        num_drafted = plan.drafts.tokens.size
        active_rows = [num_rows] if result.num_steps == 1 else np.bincount(drawn.offsets).tolist()
        self._recorder.add_steps(
            active_rows,
            result.num_prefill_tokens,
            result.num_recomputed_tokens,
            result.num_decode_tokens,
            result.model_seconds,
            result.sample_seconds,
        )
        if num_drafted:
            self._recorder.add_drafts(num_drafted, drawn.slots.size - num_rows, num_rows, is_short_of_blocks, cost)
        if num_drafted and not plan.chunks:
            cost.observe_drafts(plan.num_decode_tokens, num_rows, seconds)
        elif result.num_steps > 1:
            shares = result.shares_of_steps or (1 / result.num_steps,) * result.num_steps
            steps = zip(active_rows, shares, strict=False)  # a device may go on when no row is left
            for step_rows, run in groupby(steps, key=itemgetter(0)):
                shares_of_run = [share for _, share in run]
                cost.observe(step_rows, seconds * sum(shares_of_run) / len(shares_of_run), len(shares_of_run))
        elif not plan.chunks:
            cost.observe(plan.num_decode_tokens, seconds)

    # ---- records -------------------------------------------------------------------------------------------------

    def _make_group(self, index: int, request: PromptRequest) -> PromptGroup:
        group = PromptGroup(index, request.prompt_id, request.token_ids)
        room = self._context_length - request.token_ids.size
        eos = self._settings.eos_token_ids
        for sample_index, params in enumerate(request.params):
            end_ids = params.stop_token_ids if params.ignore_eos else (*eos, *params.stop_token_ids)
            group.sequences.append(
                Sequence(
                    group,
                    sample_index,
                    params,
                    max_output=min(params.max_new_tokens, room),
                    end_set=self._end_table.add(end_ids),
                    matcher=StopMatcher(params.stop, self._detokenizer) if params.stop else None,
                )
            )
        return group

    def _completion(self, sequence: Sequence, step: int, is_stopped: bool, is_matched: bool) -> Completion:
        token_ids = sequence.token_ids.tolist()
        text = None if self._detokenizer is None else self._detokenizer.decode(token_ids)
        if text is not None and is_matched:
            text = cut_at_stop(text, sequence.params.stop)
        return Completion(
            sample_index=sequence.sample_index,
            token_ids=token_ids,
            logprobs=sequence.logprobs.tolist(),
            finish_reason="stop" if is_stopped else "length",
            text=text,
            first_step=sequence.first_step,
            last_step=step,
        )

    def _complete(self, group: PromptGroup) -> Group:
        completions = [group.completions[index] for index in range(len(group.sequences))]
        record = Group(
            prompt_index=group.prompt_index,
            prompt_token_ids=group.token_ids.tolist(),
            completions=completions,
            prompt_id=group.prompt_id,
            policy_version=self._settings.policy_version,
        )
        self._groups[group.prompt_index] = record
        self._figures[group.prompt_index] = GroupFigures.of(record)
        self._history.record(group.token_ids, record.lengths)
        group.drafts = None
        if self._speculation.recall is not None:
            self._speculation.recall.store(group.token_ids, (c.token_ids for c in completions))
        return record


def _that_count(plan: StepPlan, result: StepResult, num_hits: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
    """Slots, offsets, tokens and log-probs drawn, without those behind a draft that did not come true."""
    drawn = (*plan.samples_of(result.num_steps), result.tokens, result.logprobs)
    if not plan.drafts.tokens.size:
        return drawn
    is_counted = np.ones(result.tokens.size, dtype=bool)
    num_decode = plan.num_decode_tokens
    is_counted[:num_decode] = plan.sample_offsets[:num_decode] <= np.repeat(num_hits, plan.drafts.lengths + 1)
    return tuple(column[is_counted] for column in drawn)


def _tokens_per_row(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many tokens each row of a burst drew; those of a row stand side by side, ``offsets`` rising from 0."""
    begins = (offsets == 0).nonzero()[0]
    ends = np.concatenate((begins[1:], [offsets.size]))
    return ends - begins
