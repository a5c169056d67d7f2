"""Run one step plan: copy shared blocks, one forward pass, one draw per sampled row."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sagc_fast.model.transformer import Transformer
from sagc_fast.profiling import ranged
from sagc_fast.rollout.batch import StepBatch, build_batch
from sagc_fast.rollout.kv_cache import KVCache
from sagc_fast.rollout.rows import RowTable
from sagc_fast.rollout.sampler import Sampler
from sagc_fast.rollout.scheduler import StepPlan
from sagc_fast.rollout.stop import EndTable


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """Tokens of the steps done and where their time went."""

    num_steps: int
    """At least 1, at most the plan's."""
    tokens: NDArray[np.int64]
    """In the order of ``plan.samples_of(num_steps)``."""
    logprobs: NDArray[np.float32]
    num_decode_tokens: int
    num_prefill_tokens: int
    num_recomputed_tokens: int
    model_seconds: float
    """Forward pass and language-model head."""
    sample_seconds: float


class ModelRunner:
    """Binds a model, its KV cache, the row table and the ending token ids of one call."""

    max_steps = 1
    """Most steps of a plan that are worth asking for."""

    def __init__(self, model: Any, kv: KVCache, rows: RowTable, ends: EndTable) -> None:
        self._model = model
        self._kv = kv
        self._rows = rows
        self._ends = ends
        self._decoder = model.decoder(kv) if isinstance(model, Transformer) else None
        self._sampler = Sampler(model, rows, self._decoder)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Execute the plan; its tokens' keys and values are in the cache afterwards."""
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
