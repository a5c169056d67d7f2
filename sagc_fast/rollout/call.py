"""One ``generate`` call from first admission to last completion. All of its state dies with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagc_fast.profiling import ranged
from sagc_fast.rollout.admission import AdmissionQueue
from sagc_fast.rollout.block_manager import BlockManager
from sagc_fast.rollout.kv_cache import KVCache
from sagc_fast.rollout.lengths import LengthHistory
from sagc_fast.rollout.model_runner import ModelRunner
from sagc_fast.rollout.request import PromptRequest
from sagc_fast.rollout.rows import RowTable, Slots
from sagc_fast.rollout.scheduler import Scheduler
from sagc_fast.rollout.sequence import PromptGroup, Sequence
from sagc_fast.rollout.stats import StatsRecorder
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
        self._scheduler = Scheduler(queue, self._rows, self._blocks, kv.block_size, settings.max_batch_tokens)
        for group in self._sequence_groups:
            queue.add(group)
        self._runner = ModelRunner(model, kv, self._rows)
        self._kv_bytes = kv.num_bytes
        self._recorder = StatsRecorder(settings.capacity_rows)
        self._groups: dict[int, Group] = {}

    def run(self, on_group: OnGroup | None) -> list[Group]:
        """All groups, in prompt order."""
        step = 0
        while self._scheduler.has_work:
            for group in self._step(step):
                if on_group is not None:
                    on_group(group)
            step += 1
        return [self._groups[index] for index in range(len(self._sequence_groups))]

    def stats(self, total_seconds: float) -> RolloutStats:
        params = (s.params for group in self._sequence_groups for s in group.sequences)
        return self._recorder.result(
            [self._groups[index] for index in range(len(self._sequence_groups))],
            total_seconds,
            num_preemptions=self._scheduler.num_preemptions,
            kv_blocks_total=self._blocks.num_blocks,
            kv_blocks_peak=self._blocks.peak_used,
            kv_bytes_total=self._kv_bytes,
            is_filtered=any(p.is_filtered and p.temperature > 0 for p in params),
        )

    # ---- one step ------------------------------------------------------------------------------------------------

    @ranged("engine step")
    def _step(self, step: int) -> list[Group]:
        """Plan, compute, sample, retire; the groups that are complete now."""
        rows, scheduler = self._rows, self._scheduler
        plan = scheduler.schedule()
        if not (plan.sample_slots.size or plan.chunks):
            raise RuntimeError("The rollout scheduler has work and planned none; this is a bug in sagc_fast.")
        result = self._runner.run(plan)
        scheduler.commit(plan)
        self._recorder.add_step(
            plan.sample_slots.size,
            result.num_prefill_tokens,
            result.num_recomputed_tokens,
            result.num_decode_tokens,
            result.model_seconds,
            result.sample_seconds,
        )
        slots = plan.sample_slots
        if not slots.size:
            return []
        rows.append(slots, result.tokens, result.logprobs)
        for slot in slots[rows.num_output[slots] == 1].tolist():
            rows.sequences[slot].first_step = step
        is_stopped, is_matched = self._stopped(slots, result.tokens)
        is_over = is_stopped | (rows.num_output[slots] >= rows.max_output[slots])
        if not is_over.any():
            return []
        stopped_by_text = set(slots[is_matched].tolist())
        stopped = set(slots[is_stopped].tolist())
        over = slots[is_over]
        complete = []
        for slot, sequence in zip(over.tolist(), scheduler.finish(over), strict=True):
            group = sequence.group
            group.completions[sequence.sample_index] = self._completion(
                sequence, step, slot in stopped, slot in stopped_by_text
            )
            if len(group.completions) == len(group.sequences):
                complete.append(self._complete(group))
        return complete

    def _stopped(self, slots: Slots, tokens: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which sampled rows end by token or text, and which of them by text alone."""
        rows = self._rows
        is_end = self._end_table.is_end(tokens, rows.end_set[slots])
        is_matched = np.zeros_like(is_end)
        for row in np.flatnonzero(rows.has_matcher[slots] & ~is_end).tolist():
            is_matched[row] = rows.sequences[slots[row]].matcher.push(int(tokens[row]))
        return is_end | is_matched, is_matched

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
        self._history.record(group.token_ids, record.lengths)
        return record
