"""One step's completions: prompts drawn in order, groups sampled and scored at the same time, refilled when DAPO asks.

All noise is keyed by (run seed, position of the draw), so a step can be repeated to the bit from its position alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sagc_fast.algo.config import FilterConfig
from sagc_fast.algo.filters import has_signal, refill_size
from sagc_fast.errors import DivergenceError
from sagc_fast.profiling import ranged
from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.tasks.base import Problem, Score
from sagc_fast.tasks.scoring import ScoringPool
from sagc_fast.train.accounting import merge_stats
from sagc_fast.train.distributed import ALONE, Processes
from sagc_fast.train.draw import Draw, PromptSource
from sagc_fast.train.packing import PackedGroup, pack_group
from sagc_fast.train.prompt_history import PromptHistory
from sagc_fast.types import Group, RolloutStats, SamplingParams

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (groups finished, groups wanted) while a rollout runs."""

GroupSizes = Callable[[Sequence[int]], Sequence[int]]
"""Group size of every prompt drawn in the step so far, from their length keys; earlier ones keep theirs."""


@dataclass(frozen=True)
class ScoredGroup:
    """A group with its problem and one score per completion."""

    group: Group
    problem: Problem
    scores: Sequence[Score]
    packed: PackedGroup | None = field(default=None, repr=False, compare=False)
    """Laid out for the update; None where that is still to be done."""

    def __getstate__(self) -> dict[str, Any]:
        """Other processes lay out what they compute themselves: cheaper than to send it."""
        return {**self.__dict__, "packed": None}

    @property
    def rewards(self) -> list[float]:
        return [s.reward for s in self.scores]

    @property
    def outcomes(self) -> list[bool]:
        return [s.outcome for s in self.scores]


@dataclass(frozen=True)
class Rollout:
    """Everything sampled in one step."""

    groups: list[ScoredGroup]
    """All of them, in the order of the draw."""
    num_first_round: int
    """The first so many are the first round: what the controller observes. Later rounds depend on how earlier ones
    turned out (hard prompts are replaced), so their lengths would bias it."""
    kept: list[ScoredGroup]
    """Those that the update uses."""
    next_position: int
    """Where the next step's draw begins."""
    stats: RolloutStats
    """Of all rounds together."""
    first_round_stats: RolloutStats
    """Of this process's share."""
    num_processes: int
    num_passed_over: int
    """Problems that the prompt history left out of the draw."""
    rollout_seconds: float
    reward_seconds: float
    """Waiting for scores after the last completion of each round."""
    pack_seconds: float
    """Laying out finished groups, within ``rollout_seconds``."""
    gap_seconds: float
    """Neither generating nor updating: from the last completion of each round to the next round, or to the end."""

    @property
    def first_round(self) -> list[ScoredGroup]:
        return self.groups[: self.num_first_round]

    @property
    def own_first_round(self) -> list[ScoredGroup]:
        """Those behind ``first_round_stats``, on rank 0."""
        return self.first_round[:: self.num_processes]


@dataclass(frozen=True)
class Round:
    """Groups of one call of the engine, scored, in order of the draw."""

    groups: list[ScoredGroup]
    ended: float
    """When the last completion was there (``time.perf_counter``)."""
    pack_seconds: float
    reward_seconds: float
    """Waiting for scores after that."""


def score_while_sampling(
    engine: RolloutEngine,
    pool: ScoringPool,
    drawn: Draw,
    prompt_ids: Sequence[int],
    group_size: int | Sequence[int],
    params: SamplingParams,
    progress: Progress | None = None,
    prepare: Callable[[Group], PackedGroup | None] = lambda group: None,
    go_on: Callable[[], None] = lambda: None,
) -> Round:
    """Sample a group per problem, of one size or of each its own. As soon as it is complete it goes to the scoring
    workers and is laid out by ``prepare``, while the engine goes on with the others. ``go_on`` is called at each group,
    and again before its scores are waited for; what it raises ends the round.

    Raises DivergenceError when the policy's logits are not finite.
    """
    problems = drawn.problems
    tickets: dict[int, Any] = {}
    packed: dict[int, PackedGroup | None] = {}
    pack_seconds = 0.0

    def on_group(group: Group) -> None:
        nonlocal pack_seconds
        go_on()
        texts = [c.text or "" for c in group.completions]
        tickets[group.prompt_index] = pool.submit_many(problems[group.prompt_index], texts)
        started = time.perf_counter()
        packed[group.prompt_index] = prepare(group)
        pack_seconds += time.perf_counter() - started
        if progress is not None:
            progress(len(tickets), len(problems))

    own_params = [replace(params, stop=problem.stop) for problem in problems]
    with _remedy_named(engine):
        groups = engine.generate(drawn.token_ids, group_size, own_params, prompt_ids=prompt_ids, on_group=on_group)
    ended = time.perf_counter()
    scored = []
    for i, group in enumerate(groups):
        go_on()
        scored.append(ScoredGroup(group, problems[i], pool.results(tickets[i]), packed[i]))
    return Round(scored, ended, pack_seconds, time.perf_counter() - ended)


@contextlib.contextmanager
def _remedy_named(engine: RolloutEngine) -> Iterator[None]:
    """Within: logits that are no longer finite say what to do about it in a run; at its start the model is to blame."""
    try:
        yield
    except DivergenceError as error:
        if engine.policy_version == 0:
            raise
        raise DivergenceError(
            f"{error} Training has diverged: lower optimizer.learning_rate or optimizer.max_grad_norm and start anew, "
            "or continue with --resume --force, after moving away the checkpoints that were written since."
        ) from None


class Sampler:
    """Draws a step's prompts from the train split, starting at a position that the caller keeps.

    Args:
        params: temperature, length cap and the run's noise seed; stop strings come from each problem.
        filters: dynamic sampling and its budget.
        history: which problems are passed over for now; None: none.
        processes: each samples its share of the prompts; all return the same groups.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        source: PromptSource,
        pool: ScoringPool,
        params: SamplingParams,
        filters: FilterConfig,
        history: PromptHistory | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self._engine, self._source, self._pool = engine, source, pool
        self._params, self._filters, self._processes = params, filters, processes
        self._history = PromptHistory(0, 1) if history is None else history

    @ranged("rollout")
    def sample(
        self, position: int, num_prompts: int, group_size: int | GroupSizes, progress: Progress | None = None
    ) -> Rollout:
        """Groups for ``num_prompts`` prompts from ``position`` on; the next step goes on at ``rollout.next_position``.

        ``group_size``: one for all prompts, or who to ask for one per prompt once they are drawn.
        With dynamic sampling, groups without signal are replaced by further prompts within the budget; when it is used
        up, the step goes on with the groups there are.
        """
        started = time.perf_counter()
        groups: list[ScoredGroup] = []
        kept: list[ScoredGroup] = []
        stats: list[RolloutStats] = []
        own_stats = None
        num_passed_over, ended = 0, None
        waited = packing = gap = 0.0
        num_more = num_prompts
        while num_more > 0:
            drawn = self._source.draw("train", position, num_more, passes_over=self._history.passes_over)
            position = drawn.next_position
            num_passed_over += drawn.num_passed_over
            gap += 0.0 if ended is None else time.perf_counter() - ended
            scored, round_stats, own = self._sample_round(drawn, group_size, groups, progress)
            own_stats = own_stats or self._engine.stats
            groups += scored
            kept += [g for g in scored if self._is_wanted(g)]
            stats += round_stats
            ended, waited, packing = own.ended, waited + own.reward_seconds, packing + own.pack_seconds
            num_more = self._processes.from_first(
                refill_size(
                    num_prompts, len(kept), len(groups), time.perf_counter() - started, num_prompts, self._filters
                )
            )
        if self._filters.dynamic_sampling and len(kept) < num_prompts:
            logger.info(
                "dynamic sampling: %d of %d wanted groups after %d prompts; going on with these",
                len(kept), num_prompts, len(groups),
            )  # fmt: skip
        for scored in groups:
            self._history.observe(scored.problem.problem_id, self._counted_outcomes(scored))
        return Rollout(
            groups=groups,
            num_first_round=num_prompts,
            kept=kept[:num_prompts],
            next_position=position,
            stats=merge_stats(stats),
            first_round_stats=own_stats,
            num_processes=self._processes.size,
            num_passed_over=num_passed_over,
            rollout_seconds=time.perf_counter() - started - waited,
            reward_seconds=waited,
            pack_seconds=packing,
            gap_seconds=gap + time.perf_counter() - ended,
        )

    def _sample_round(
        self, drawn: Draw, group_size: int | GroupSizes, before: Sequence[ScoredGroup], progress: Progress | None
    ) -> tuple[list[ScoredGroup], list[RolloutStats], Round]:
        """Groups of the prompts drawn, each process sampling its share; statistics by rank; this process's share."""
        own = self._processes.share(len(drawn.problems))
        if isinstance(group_size, int):
            sizes: int | list[int] = group_size
        else:
            of_all = self._processes.from_first(_sizes_of_new(group_size, before, drawn.problems))
            sizes = [of_all[i] for i in own]
        share = drawn.part(own)
        done = score_while_sampling(
            self._engine, self._pool, share, share.positions, sizes, self._params, progress, self._prepare
        )
        shares, stats = zip(*self._processes.gather((done.groups, self._engine.stats)), strict=True)
        groups = self._processes.dealt(shares)
        for place, scored in zip(own, done.groups, strict=True):
            groups[place] = scored  # those that are laid out
        return groups, list(stats), done

    def _prepare(self, group: Group) -> PackedGroup:
        return pack_group(group, self._filters)

    def _is_wanted(self, scored: ScoredGroup) -> bool:
        """Dynamic sampling judges by outcomes, never by shaped rewards; masked completions do not count."""
        return not self._filters.dynamic_sampling or has_signal(self._counted_outcomes(scored))

    def _counted_outcomes(self, scored: ScoredGroup) -> list[bool]:
        completions = zip(scored.group.completions, scored.outcomes, strict=True)
        return [o for c, o in completions if not (self._filters.mask_truncated and c.is_truncated)]


def _sizes_of_new(decide: GroupSizes, groups: Sequence[ScoredGroup], drawn: Sequence[Problem]) -> Sequence[int]:
    """Sizes of the prompts just drawn. All of the step are asked about: a prompt's draw is keyed by its place in it."""
    ids = [problem.length_key for problem in (*(g.problem for g in groups), *drawn)]
    return decide(ids)[len(groups) :]
