"""Run a step plan: copy shared blocks, one forward pass, one draw per sampled row.

Decode rows alone go to the native decoder as slots of the row table, for all steps of the plan in one call; any other
step, and every step without native code, goes through the tensors of ``batch.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sagc_fast import ops
from sagc_fast.model.transformer import Transformer
from sagc_fast.profiling import ranged
from sagc_fast.rollout.batch import StepBatch, build_batch
from sagc_fast.rollout.kv_cache import KVCache
from sagc_fast.rollout.plan import StepPlan
from sagc_fast.rollout.rows import RowTable
from sagc_fast.rollout.sampler import Sampler
from sagc_fast.rollout.stop import EndTable

MOST_STEPS = 128
"""Of one native call (ours): with one row of a small model a plan takes as long as two or three steps."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """Tokens of the steps done and where their time went."""

    num_steps: int
    """At least 1, at most the plan's."""
    tokens: NDArray[np.int64]
    """In the order of ``plan.samples_of(num_steps)``. What stands behind a row's end says nothing."""
    logprobs: NDArray[np.float32]
    num_decode_tokens: int
    num_prefill_tokens: int
    num_recomputed_tokens: int
    model_seconds: float
    """Forward pass and language-model head."""
    sample_seconds: float
    num_ahead: int = 0
    """Steps that are under way behind these for the next plan to take up; their blocks are kept for it."""
    shares_of_steps: tuple[float, ...] = ()
    """Of several steps, the share of the time that each took; empty: the same."""


class ModelRunner:
    """Binds a model, its KV cache, the row table and the ending token ids of one call."""

    max_steps = 1
    """Most steps of a plan that are worth asking for."""
    closes_ranks = False
    """Whether it goes on without rows that are over, so that a plan may have more steps than some row has left."""

    def __init__(self, model: Any, kv: KVCache, rows: RowTable, ends: EndTable) -> None:
        self._model = model
        self._kv = kv
        self._rows = rows
        self._ends = ends
        self._decoder = model.decoder(kv) if isinstance(model, Transformer) else None
        self._sampler = Sampler(model, rows, self._decoder)
        if self._decoder is not None:
            self.max_steps = MOST_STEPS
            self.closes_ranks = True
            longest = min(rows.block_tables.shape[1] * kv.block_size, model.config.max_position_embeddings)
            self._decoder.bind(_bound(rows, ends), *model.rope(longest))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Execute the plan; its tokens' keys and values are in the cache afterwards."""
        if self._decoder is not None and plan.is_decode_only and not self._rows.is_filtered[plan.decode_slots].any():
            return self._decode(self._decoder, plan)
        batch = build_batch(plan, self._rows, self._kv.block_size, self._model.device)
        started = perf_counter()
        if plan.copy_sources.size:
            self._kv.copy_blocks(plan.copy_sources, plan.copy_targets)
        hidden_UE = self._hidden(plan, batch)
        forwarded = perf_counter()
        tokens, logprobs = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        logits_seconds = 0.0
        if plan.sample_slots.size:
            tokens, logprobs = self._sampler.sample(
                hidden_UE, batch.hidden_index, plan.sample_slots, plan.sample_offsets
            )
            logits_seconds = self._sampler.logits_seconds
        return StepResult(
            num_steps=1,
            tokens=tokens,
            logprobs=logprobs,
            num_decode_tokens=batch.num_decode_tokens,
            num_prefill_tokens=batch.num_prefill_tokens,
            num_recomputed_tokens=batch.num_recomputed_tokens,
            model_seconds=forwarded - started + logits_seconds,
            sample_seconds=perf_counter() - forwarded - logits_seconds,
        )

    def device_figures(self) -> dict[str, float]:
        """What this call asked of a device that runs bursts, by the names of RolloutStats."""
        return {}

    @ranged("decode")
    def _decode(self, decoder: ops.Decoder, plan: StepPlan) -> StepResult:
        started = perf_counter()
        if plan.copy_sources.size:
            self._kv.copy_blocks(plan.copy_sources, plan.copy_targets)
        copied = perf_counter()
        tokens, logprobs, seconds = decoder.steps(
            torch.from_numpy(plan.decode_slots), plan.num_steps, plan.stop_at_rows
        )
        spent, drawn = seconds.numpy(), tokens.numpy()  # operations on tensors cost several times as much to begin
        model_seconds, sample_seconds = spent.sum(axis=0).tolist()
        total_seconds = model_seconds + sample_seconds
        return StepResult(
            num_steps=len(spent),
            tokens=drawn,
            logprobs=logprobs.numpy(),
            num_decode_tokens=drawn.size,
            num_prefill_tokens=0,
            num_recomputed_tokens=0,
            model_seconds=copied - started + model_seconds,
            sample_seconds=sample_seconds,
            shares_of_steps=tuple((spent.sum(axis=1) / total_seconds).tolist()) if len(spent) > 1 else (),
        )

    @ranged("forward")
    def _hidden(self, plan: StepPlan, batch: StepBatch) -> torch.Tensor:
        """Hidden states [U, E]: of the step's wanted rows, then those kept for late forks."""
        parts = []
        if len(batch.token_ids):
            hidden = self._forward(batch)
            parts.append(hidden)
            finishing = [chunk for chunk in plan.chunks if chunk.is_last]
            for row, chunk in enumerate(finishing, start=plan.num_decode_tokens):
                if chunk.sequence is None:
                    chunk.group.last_hidden = hidden[row : row + 1].clone()
        parts += [group.last_hidden for group, _ in plan.late_forks]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        if self._decoder is None:
            return self._model.forward_paged(batch.token_ids, batch.layout, self._kv)
        angles = self._model.rope(batch.layout.max_context_len)
        return self._decoder.forward(batch.token_ids, batch.layout, *angles)


def _bound(rows: RowTable, ends: EndTable) -> ops.BoundRows:
    """The row table's own memory, so that the decoder sees every change."""
    arrays = {name: getattr(rows, name, None) for name in ops.BoundRows.__dataclass_fields__} | {"end_ids": ends.ids}
    return ops.BoundRows(
        **{name: torch.from_numpy(a.view(np.int64) if a.dtype == np.uint64 else a) for name, a in arrays.items()}
    )
