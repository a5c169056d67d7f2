"""A step's scored groups -> rewards, advantages, packed micro-batches, gradients, optimizer updates.

The loss of an optimizer update is a sum over its micro-batches under one normaliser counted beforehand, so its gradient
does not depend on how the completions are packed. Groups whose advantages are all zero are not computed at all when the
loss has no other term: their gradient is exactly zero, and the normaliser still counts them.

Shape suffixes: T tokens of a micro-batch, N completion tokens, C completions of the step.
"""

# ruff: noqa: N815 (shape suffixes in field names)

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from sagc_fast import ops
from sagc_fast.algo.advantage import group_advantages
from sagc_fast.algo.config import Algorithm
from sagc_fast.algo.logprobs import LogprobDifference, logprob_difference, merge_differences
from sagc_fast.algo.loss import LossMetrics, linear_policy_loss, loss_normalizer
from sagc_fast.algo.rewards import kl_penalised_rewards, shape_rewards
from sagc_fast.config import UpdateOptions
from sagc_fast.ops.rows import take_rows
from sagc_fast.profiling import annotate, ranged
from sagc_fast.rollout.device import made_current
from sagc_fast.train.distributed import ALONE, Processes
from sagc_fast.train.optimizer import PolicyOptimizer
from sagc_fast.train.packing import MicroBatch, PackItem, pack, pack_group, predicted_cost
from sagc_fast.train.sampling import ScoredGroup

if TYPE_CHECKING:
    from sagc_fast.model.transformer import Transformer


@dataclass
class UpdateResult:
    """What one step's update did. Figures are None when nothing was computed for them."""

    num_updates: int = 0
    """Optimizer updates applied; 0 is a skipped step."""
    num_informative_groups: int = 0
    """Groups with a non-zero advantage."""
    num_tokens: int = 0
    """Tokens that went forward and backward, prompts included, all epochs."""
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    metrics: LossMetrics | None = None
    logprob_difference: LogprobDifference | None = None
    learning_rate: float = 0.0
    bad_groups: list[int] = field(default_factory=list)
    """When a loss or gradient was not finite: places of the groups behind it."""
    seconds: float = 0.0
    prepare_seconds: float = 0.0
    """Of them before the first forward pass."""


@dataclass
class _Batch:
    """The completions of a step, flat; lists and tensors over C."""

    items: list[PackItem]
    """One per group: its completions that take part (truncated ones may be masked)."""
    advantages_C: torch.Tensor
    lengths_C: torch.Tensor
    """Tokens of each completion, 0 for a masked one."""
    rollout_logp: list[torch.Tensor]
    old_logp: list[torch.Tensor]
    ref_logp: list[torch.Tensor] | None = None


@dataclass
class _Sums:
    """What the micro-batches of one optimizer update add up to: of one process, then of all."""

    loss: float = 0.0
    num_tokens: int = 0
    metrics: LossMetrics | None = None
    difference: LogprobDifference | None = None
    bad_rows: frozenset[int] = frozenset()
    """Completions behind a loss that was not finite."""


class PolicyUpdater:
    """Trains ``model`` in place.

    Args:
        reference: the starting model, held once, when the algorithm penalises the distance to it; not needed by a model
            with adapters.
        processes: all are given the same groups; each computes its share of the gradient and applies the whole.
        max_length: length cap of a completion in tokens.
        temperature: of the sampled, and therefore of the trained, distribution.
        seed: of the run; orders the groups into minibatches.
    """

    def __init__(
        self,
        model: Transformer,
        reference: Transformer | None,
        optimizer: PolicyOptimizer,
        algorithm: Algorithm,
        options: UpdateOptions,
        *,
        max_length: int,
        temperature: float,
        seed: int,
        processes: Processes = ALONE,
    ) -> None:
        self.model, self.reference, self.optimizer, self.processes = model, reference, optimizer, processes
        self.algorithm, self.options = algorithm, options
        self.max_length, self.temperature, self.seed = max_length, temperature, seed
        self._forward_started: float | None = None
        """Of the running update."""

    @ranged("update")
    def update(self, step: int, groups: Sequence[ScoredGroup]) -> UpdateResult:
        """One step's optimizer updates (``num_epochs`` x ``num_minibatches``); none when a value is not finite."""
        started, self._forward_started = time.perf_counter(), None
        result = UpdateResult(learning_rate=self.optimizer.learning_rate)
        if groups:
            with made_current(self.model.device):
                self._apply(step, groups, result)
        ended = time.perf_counter()
        result.seconds, result.prepare_seconds = ended - started, (self._forward_started or ended) - started
        return result

    def _apply(self, step: int, groups: Sequence[ScoredGroup], result: UpdateResult) -> None:
        batch = self._prepare(groups, result)
        for members in self._minibatches(step, len(groups)):
            self._optimizer_update(batch, members, result)
            if result.bad_groups:
                break

    @ranged("advantages")
    def _prepare(self, groups: Sequence[ScoredGroup], result: UpdateResult) -> _Batch:
        """Rewards and advantages, and the log-probs that the loss compares with."""
        filters, loss, device = self.algorithm.filters, self.algorithm.loss, self.model.device
        packed = [g.packed or pack_group(g.group, filters) for g in groups]
        group_ids_C = torch.tensor([i for i, group in enumerate(packed) for _ in group.lengths])
        lengths = [length for group in packed for length in group.lengths]
        lengths_C = torch.tensor(lengths)
        valid_C = torch.tensor([valid for group in packed for valid in group.is_valid])
        rollout_logp = list(torch.cat([group.logprobs_N for group in packed]).to(device).split(lengths))
        first_rows = accumulate((len(group.lengths) for group in packed), initial=0)
        items = [group.item.moved(row) for group, row in zip(packed, first_rows, strict=False)]

        old_logp = rollout_logp
        if self.options.old_logprobs == "recompute":
            old_logp = self._logprobs(self.model, items, rollout_logp)
            result.logprob_difference = _difference(old_logp, rollout_logp, items)
        ref_logp = self._reference_logprobs(items, rollout_logp)

        rewards_C = torch.tensor([r for g in groups for r in g.rewards], dtype=torch.float64)
        rewards_C = shape_rewards(rewards_C, lengths_C, self.max_length, filters)
        if ref_logp is not None:
            index_N = torch.repeat_interleave(lengths_C)
            flat = (torch.cat(x).cpu() for x in (old_logp, ref_logp))
            rewards_C = kl_penalised_rewards(rewards_C, *flat, index_N, config=loss)
        advantages_C = group_advantages(rewards_C, group_ids_C, valid_C=valid_C, **asdict(self.algorithm.advantage))
        informative = torch.zeros(len(groups), dtype=torch.bool)
        informative[group_ids_C[advantages_C != 0]] = True
        result.num_informative_groups = int(informative.sum())
        return _Batch(
            items, advantages_C.float().to(device), torch.where(valid_C, lengths_C, 0), rollout_logp, old_logp, ref_logp
        )

    def _minibatches(self, step: int, num_groups: int) -> Iterator[list[int]]:
        """Places of the groups of each optimizer update: all, or shares of an order keyed by (seed, step, epoch)."""
        count = min(self.options.num_minibatches, num_groups)
        for epoch in range(self.options.num_epochs):
            order = list(range(num_groups))
            if count > 1:
                random.Random(f"{self.seed}/{step}/{epoch}").shuffle(order)
            yield from (sorted(order[i::count]) for i in range(count))

    def _optimizer_update(self, batch: _Batch, members: list[int], result: UpdateResult) -> None:
        """Accumulate the gradients of the groups ``members`` and apply them."""
        loss_config = self.algorithm.loss
        items = [batch.items[i] for i in members if batch.items[i].rows]
        rows_C = [row for item in items for row in item.rows]
        normalizer = loss_normalizer(batch.lengths_C[rows_C], loss_config, self.max_length)
        if self._needs_advantage():
            advantages = batch.advantages_C.tolist()
            items = [item for item in items if any(advantages[row] != 0.0 for row in item.rows)]
        sums = self._summed(self.processes.gather(self._accumulate(batch, self._own_share(items), normalizer)))
        result.num_tokens += sums.num_tokens
        if sums.bad_rows:
            self.optimizer.clear()
            result.bad_groups = [i for i in members if sums.bad_rows & set(batch.items[i].rows)]
            return
        if sums.metrics is not None:
            result.metrics = sums.metrics if result.metrics is None else result.metrics + sums.metrics
        if result.logprob_difference is None and result.num_updates == 0:
            result.logprob_difference = sums.difference
        if self.processes.size > 1:
            self.processes.sum_(self.optimizer.gradients())
        norm = self.optimizer.step()
        if not math.isfinite(norm):
            result.bad_groups = members
            return
        if self.model.adapters is not None:
            self.model.adapters.merge()
        result.losses.append(sums.loss)
        result.grad_norms.append(norm)
        result.num_updates += 1

    def _accumulate(self, batch: _Batch, items: Sequence[PackItem], normalizer: float) -> _Sums:
        """Forward and backward of ``items``; stops at a loss that is not finite."""
        sums = _Sums()
        on_policy: list[torch.Tensor] = []
        rollout: list[torch.Tensor] = []
        for place, micro_batch in enumerate(self._pack(items)):
            self._seed_dropout(place)
            hidden_NE = self._hidden(self.model, micro_batch)
            rollout_logp_N = _gather(batch.rollout_logp, micro_batch)
            output, logp_N = linear_policy_loss(
                hidden_NE,
                self.model.trained_head,
                micro_batch.targets_N,
                _gather(batch.old_logp, micro_batch),
                batch.advantages_C[micro_batch.rows],
                micro_batch.completion_index_N,
                temperature=self.temperature,
                config=self.algorithm.loss,
                normalizer=normalizer,
                ref_logp_N=None if batch.ref_logp is None else _gather(batch.ref_logp, micro_batch),
                rollout_logp_N=rollout_logp_N,
            )
            loss = float(output.loss.detach())
            if not math.isfinite(loss):
                sums.bad_rows = frozenset(micro_batch.rows)
                break
            with annotate("backward"):
                output.loss.backward()
            sums.loss += loss
            sums.num_tokens += micro_batch.num_tokens
            sums.metrics = output.metrics if sums.metrics is None else sums.metrics + output.metrics
            on_policy.append(logp_N)
            rollout.append(rollout_logp_N)
        if on_policy:
            sums.difference = logprob_difference(torch.cat(on_policy), torch.cat(rollout))
        if self.processes.size > 1 and sums.metrics is not None:
            on_host = {f.name: getattr(sums.metrics, f.name).cpu() for f in fields(LossMetrics)}
            sums.metrics = LossMetrics(**on_host)
        return sums

    def _seed_dropout(self, place: int) -> None:
        """Key the adapters' dropout, the one thing here that draws from torch, by what a resumed run knows."""
        if self.model.adapters is not None and self.model.adapters.spec.dropout:
            key = f"{self.seed}/{self.optimizer.num_updates}/{self.processes.rank}/{place}"
            torch.manual_seed(random.Random(key).getrandbits(63))

    @staticmethod
    def _summed(parts: Sequence[_Sums]) -> _Sums:
        """Of all processes, in the order of their ranks."""
        if len(parts) == 1:
            return parts[0]
        metrics = None
        for part in parts:
            if part.metrics is not None:
                metrics = part.metrics if metrics is None else metrics + part.metrics
        return _Sums(
            loss=sum(part.loss for part in parts),
            num_tokens=sum(part.num_tokens for part in parts),
            metrics=metrics,
            difference=merge_differences([part.difference for part in parts if part.difference is not None]),
            bad_rows=frozenset().union(*(part.bad_rows for part in parts)),
        )

    def _own_share(self, items: Sequence[PackItem]) -> list[PackItem]:
        """This process's items: the dearest first, each to the process with the least work so far."""
        if self.processes.size == 1:
            return list(items)
        width = self.model.config.hidden_size
        costs = [predicted_cost(item, width) for item in items]
        work = [0.0] * self.processes.size
        own = []
        for i in sorted(range(len(items)), key=lambda i: (-costs[i], i)):
            rank = work.index(min(work))
            work[rank] += costs[i]
            if rank == self.processes.rank:
                own.append(i)
        return [items[i] for i in sorted(own)]

    def _needs_advantage(self) -> bool:
        """True when a completion without advantage adds nothing to the loss."""
        loss = self.algorithm.loss
        return loss.entropy_coef == 0 and (loss.kl_beta == 0 or loss.kl_in == "reward")

    @ranged("pack")
    def _pack(self, items: Sequence[PackItem]) -> list[MicroBatch]:
        width = self.model.config.hidden_size
        return pack(items, self.options.micro_batch_tokens, width, self.model.device)

    @ranged("forward")
    def _hidden(self, model: Transformer, micro_batch: MicroBatch) -> torch.Tensor:
        """Hidden states [N, E] that predict the completion tokens."""
        self._forward_started = self._forward_started or time.perf_counter()
        hidden_TE = model.forward_packed(
            micro_batch.token_ids_T, micro_batch.layout, self.options.checkpoint_activations
        )
        return take_rows(hidden_TE, micro_batch.source_rows_N)  # a prompt's last token several times

    def _reference_logprobs(self, items: Sequence[PackItem], like: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Under the model that the loss or reward penalises the distance to; adapters have it below them."""
        if not self.algorithm.loss.needs_reference:
            return None
        if self.model.adapters is None:
            return self._logprobs(self.reference, items, like)
        with self.model.adapters.unmerged():
            return self._logprobs(self.model, items, like)

    @torch.no_grad()
    def _logprobs(self, model: Transformer, items: Sequence[PackItem], like: list[torch.Tensor]) -> list[torch.Tensor]:
        """Log-probs of every completion of ``items`` under ``model``, by row; rows that take no part stay zero."""
        own: dict[int, torch.Tensor] = {}
        for micro_batch in self._pack(self._own_share([item for item in items if item.rows])):
            hidden_NE = self._hidden(model, micro_batch)
            logp_N, _ = ops.token_logprobs(hidden_NE, model.trained_head, micro_batch.targets_N, self.temperature)
            logp_N = logp_N.cpu() if self.processes.size > 1 else logp_N
            lengths = [len(like[row]) for row in micro_batch.rows]
            own.update(zip(micro_batch.rows, logp_N.split(lengths), strict=True))
        by_row = [torch.zeros_like(x) for x in like]
        for part in self.processes.gather(own):
            for row, logp in part.items():
                by_row[row] = logp.to(like[row].device)
        return by_row


def _gather(by_row: list[torch.Tensor], micro_batch: MicroBatch) -> torch.Tensor:
    return torch.cat([by_row[row] for row in micro_batch.rows])


def _difference(
    train: list[torch.Tensor], rollout: list[torch.Tensor], items: Sequence[PackItem]
) -> LogprobDifference | None:
    rows = [row for item in items for row in item.rows]
    if not rows:
        return None
    return logprob_difference(torch.cat([train[r] for r in rows]), torch.cat([rollout[r] for r in rows]))
