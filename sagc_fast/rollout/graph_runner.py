"""Runs plans on a device that must not wait for the host: bursts of graph replays, polled every k steps.

A *chain* is a batch of decode rows that live on the device (:mod:`sagc_fast.ops.decode_rows`). The host queues a burst
of k steps for it, has the burst's draws copied back on a second stream, and waits for the copy of the burst *before*:
while it books that one and plans on, the device computes the next. So ``run`` returns k steps and leaves k more under
way (``StepResult.num_ahead``). The next plan takes them up if it goes on with the same rows, less some that are over;
else they are forgotten, which is safe: keyed noise draws the same tokens again, and everything that is written later is
written behind them on the same stream. A row that is over is frozen by the device itself, until the rows fit a smaller
bucket and the next chain begins there.

Everything else (prefill, forks, drafts) runs operator by operator through :class:`ModelRunner`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sagc_fast.ops.decode_rows import NOT_DRAWN
from sagc_fast.ops.sampling import not_finite
from sagc_fast.profiling import annotate
from sagc_fast.rollout.decode_graphs import DecodeGraphs, bucket_of
from sagc_fast.rollout.kv_cache import KVCache
from sagc_fast.rollout.model_runner import ModelRunner, StepResult
from sagc_fast.rollout.plan import StepPlan
from sagc_fast.rollout.row_buffers import RECORD_STEPS
from sagc_fast.rollout.rows import RowTable, Slots
from sagc_fast.rollout.sequence import Sequence
from sagc_fast.rollout.stop import EndTable

LEAST_STEPS, MOST_STEPS = 4, 32
"""Steps between two looks at the results (ours). Too few and the host cannot plan a burst while the one before runs;
too many and rows that are over stay too long."""
MOST_AWAITED_STEPS = 8
"""The same while somebody waits for a row (ours): a row that is over keeps him out at most so long."""
SHARE_OVER = 0.125
"""Share of the rows that may be expected to end between two looks (ours)."""
PRIOR_TOKENS = 256
"""Tokens per end to reckon with before any row has ended (ours)."""


@dataclass(eq=False)
class _Burst:
    """Steps of a chain that are queued and not read yet."""

    first_step: int
    num_steps: int
    started: Any
    ended: Any
    copied: Any
    """Events: before its first step, behind its last, behind the copy of its draws."""


class _Chain:
    """Decode rows on the device, in the order of ``slots``."""

    def __init__(self, plan: StepPlan, rows: RowTable, bucket: int, has_filters: bool) -> None:
        self.slots: Slots = plan.decode_slots
        self.sequences: list[Sequence | None] = [rows.sequences[slot] for slot in self.slots.tolist()]
        self.first_output = rows.num_output[self.slots]
        self.tables = rows.block_tables[self.slots]
        self.bucket = bucket
        self.has_filters = has_filters
        self.num_queued = 0
        self.num_read = 0
        self.bursts: deque[_Burst] = deque()

    def places_of(self, plan: StepPlan, rows: RowTable, block_size: int) -> NDArray[np.int64] | None:
        """Where the plan's rows stand in the chain; None when the steps under way are not what the plan asks for."""
        slots = plan.decode_slots
        order = np.full(rows.capacity, -1)
        order[self.slots] = np.arange(self.slots.size)
        places = order[slots]
        if plan.copy_sources.size or (places < 0).any():
            return None
        if any(
            rows.sequences[s] is not self.sequences[p] for s, p in zip(slots.tolist(), places.tolist(), strict=True)
        ):
            return None
        if (rows.num_output[slots] != self.first_output[places] + self.num_read).any():
            return None
        # The blocks that steps under way write to must still be those of the rows.
        last_column = (rows.num_computed[slots] + self.num_queued - self.num_read - 1) // block_size
        is_needed = np.arange(rows.block_tables.shape[1]) <= last_column[:, None]
        is_same = rows.block_tables[slots] == self.tables[places]
        return places if (is_same | ~is_needed).all() else None


class GraphRunner(ModelRunner):
    """The runner of one call on a device with graphs."""

    def __init__(self, model: Any, kv: KVCache, rows: RowTable, ends: EndTable, graphs: DecodeGraphs) -> None:
        super().__init__(model, kv, rows, ends)
        self.max_steps = 2 * MOST_STEPS  # one burst to read and one under way
        graphs.prepare(model, kv, rows.capacity, rows.block_tables.shape[1], *ends.ids.shape)
        self._graphs = graphs
        self._device = graphs.device
        self._chain: _Chain | None = None
        self._counts_before = replace(self._device.counts)
        self._last_end: Any = None
        self._gaps: deque[tuple[Any, Any]] = deque()
        self._idle_seconds = 0.0
        self._num_row_steps = self._num_drawn = self._num_ended = 0

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Execute the plan, or as many of its steps as one burst has. ``stop_at_rows`` is kept to the burst: rows that
        are over meanwhile stand still."""
        if not plan.is_decode_only:
            return self._run_eagerly(plan)
        chain, places = self._chain_for(plan)
        has_room = bucket_of(plan.decode_slots.size) < chain.bucket  # the next chain will have fewer rows
        num_steps = self._steps_between_looks(plan)
        if not chain.bursts:
            self._queue(chain, min(num_steps, plan.num_steps))
        num_under_way = chain.num_queued - chain.num_read
        if not (plan.is_awaited or has_room) and plan.num_steps > num_under_way:
            self._queue(chain, min(num_steps, plan.num_steps - num_under_way))
        return self._read(chain, places, plan)

    def device_figures(self) -> dict[str, float]:
        counts, before = self._device.counts, self._counts_before
        return {
            "num_graph_captures": counts.captures - before.captures,
            "num_graph_replays": counts.replays - before.replays,
            "num_device_waits": counts.waits - before.waits,
            "num_wasted_row_steps": self._num_row_steps - self._num_drawn,
            "device_idle_seconds": self._idle_seconds,
        }

    # ---- steps operator by operator ------------------------------------------------------------------------------

    def _run_eagerly(self, plan: StepPlan) -> StepResult:
        self._chain = None
        self._begin_work()
        with self._device.eager():
            result = super().run(plan)
        self._last_end = self._device.record()
        return result

    def _begin_work(self) -> Any:
        """An event before the work that is queued next; the device has nothing to do between the last end and it."""
        started = self._device.record()
        self._gaps.append((self._last_end, started))
        return started

    # ---- chains --------------------------------------------------------------------------------------------------

    def _chain_for(self, plan: StepPlan) -> tuple[_Chain, NDArray[np.int64]]:
        """The chain that serves the plan's rows, and their places in it."""
        chain, rows = self._chain, self._rows
        if chain is not None:
            fits = bucket_of(plan.decode_slots.size) == chain.bucket or chain.bursts
            places = chain.places_of(plan, rows, self._kv.block_size) if fits else None
            if places is not None:
                self._upload_tables(chain, places)
                return chain, places
        has_filters = bool(rows.is_filtered[plan.decode_slots].any())
        chain = self._chain = _Chain(plan, rows, bucket_of(plan.decode_slots.size), has_filters)
        self._graphs.ready(chain.bucket, has_filters)
        if plan.copy_sources.size:
            with self._device.eager():
                self._kv.copy_blocks(plan.copy_sources, plan.copy_targets)
        places = np.arange(chain.slots.size)
        self._upload_state(chain)
        self._upload_tables(chain, places)
        return chain, places

    def _upload_state(self, chain: _Chain) -> None:
        rows, slots, count = self._rows, chain.slots, chain.slots.size
        buffers = self._graphs.buffers
        assert buffers is not None
        state = buffers.state.write()
        for column in state.values():
            column[...] = 0
        state["temperature"][count:] = 1.0
        state["share_group"][count:] = -1
        state["top_p"][count:] = 1.0
        state["is_live"][:count] = 1
        for name, source in (
            ("token", rows.last_token), ("position", rows.num_computed), ("index", rows.num_output),
            ("max_output", rows.max_output), ("end_set", rows.end_set), ("shared_blocks", rows.shared_blocks),
            ("share_group", rows.group_index), ("sample_index", rows.sample_index), ("temperature", rows.temperature),
            ("top_k", rows.top_k), ("top_p", rows.top_p), ("min_p", rows.min_p),
        ):  # fmt: skip
            state[name][:count] = source[slots]
        state["seed"][:count] = rows.seed[slots].view(np.int64)
        state["prompt_id"][:count] = rows.prompt_id[slots].view(np.int64)
        is_off = ~rows.is_filtered[slots]  # a greedy row's filters are off as well
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            state[name][:count][is_off] = off
        ids = self._ends.ids
        state["end_ids"][...] = -1
        state["end_ids"][: ids.shape[0], : ids.shape[1]] = ids
        buffers.state.upload()

    def _upload_tables(self, chain: _Chain, places: NDArray[np.int64]) -> None:
        """Block tables with what the plan has added; rows that are not in the plan any more are over."""
        buffers, rows = self._graphs.buffers, self._rows
        assert buffers is not None
        chain.tables[places] = rows.block_tables[chain.slots[places]]
        tables, count = buffers.tables.write(), chain.slots.size
        tables["is_kept"][...] = 0
        tables["is_kept"][places] = 1
        tables["block_tables"][count : chain.bucket] = self._kv.scratch_block
        tables["block_tables"][:count, : chain.tables.shape[1]] = chain.tables
        buffers.tables.upload()

    # ---- bursts --------------------------------------------------------------------------------------------------

    def _steps_between_looks(self, plan: StepPlan) -> int:
        """As many as let ``SHARE_OVER`` of the rows end, by the lengths seen in this call."""
        tokens_per_end = (PRIOR_TOKENS + self._num_drawn) / (1 + self._num_ended)
        most = MOST_AWAITED_STEPS if plan.is_awaited else MOST_STEPS
        return max(LEAST_STEPS, min(most, int(SHARE_OVER * tokens_per_end)))

    def _queue(self, chain: _Chain, num_steps: int) -> None:
        buffers = self._graphs.buffers
        assert buffers is not None
        started = self._begin_work()
        with annotate("decode"):
            self._graphs.launch(chain.bucket, chain.has_filters, num_steps)
        ended = self._last_end = self._device.record()
        pairs = buffers.record_pairs(chain.num_queued % RECORD_STEPS, num_steps)
        copied = self._device.download(pairs, after=ended)
        chain.bursts.append(_Burst(chain.num_queued, num_steps, started, ended, copied))
        chain.num_queued += num_steps
        self._num_row_steps += num_steps * chain.bucket

    def _read(self, chain: _Chain, places: NDArray[np.int64], plan: StepPlan) -> StepResult:
        """Wait for the chain's oldest burst and hand out its draws."""
        burst, buffers = chain.bursts.popleft(), self._graphs.buffers
        assert buffers is not None
        with annotate("wait for the device"):
            self._device.wait(burst.copied)
        num_steps = min(burst.num_steps, plan.num_steps)
        drawn, logprobs = buffers.record(burst.first_step % RECORD_STEPS, num_steps, chain.slots.size)
        drawn, logprobs = drawn[:, places], logprobs[:, places]
        is_over = drawn < NOT_DRAWN
        if np.isnan(logprobs).any():
            raise RuntimeError(not_finite(int(np.isnan(logprobs).any(0).sum()), places.size))
        self._num_drawn += int((drawn != NOT_DRAWN).sum())
        self._num_ended += int(is_over.sum())
        chain.num_read += num_steps
        goes_on = num_steps == burst.num_steps and bool((drawn[-1] >= 0).any())
        if not goes_on:
            self._chain = None
        num_done = places.size * num_steps
        return StepResult(
            num_steps=num_steps,
            tokens=np.where(is_over, -2 - drawn, np.maximum(drawn, 0)).T.reshape(num_done),
            logprobs=logprobs.T.reshape(num_done),
            num_decode_tokens=num_done,
            num_prefill_tokens=0,
            num_recomputed_tokens=0,
            model_seconds=self._settle_times(burst),
            sample_seconds=0.0,  # the draw is part of the step
            num_ahead=chain.num_queued - chain.num_read if goes_on else 0,
        )

    def _settle_times(self, burst: _Burst) -> float:
        """The burst's device seconds; gaps before it are known now as well."""
        while self._gaps:
            ended, started = self._gaps.popleft()
            if ended is not None:
                self._idle_seconds += self._device.seconds_between(ended, started)
            if started is burst.started:
                break
        return self._device.seconds_between(burst.started, burst.ended)
