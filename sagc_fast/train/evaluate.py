"""Held-out accuracy: always the same problems under the same noise, so that evaluations differ by the weights alone."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from sagc_fast.config import EvaluationOptions
from sagc_fast.errors import DatasetError
from sagc_fast.profiling import ranged
from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.tasks.scoring import ScoringPool
from sagc_fast.train.distributed import ALONE, Processes
from sagc_fast.train.draw import PromptSource
from sagc_fast.train.sampling import Progress, ScoredGroup, score_while_sampling
from sagc_fast.types import SamplingParams

NOISE_SEED = 0
"""The same for every run, so that runs with different seeds are measured alike."""
FIRST_PROMPT_ID = 2**40
"""Held-out prompts have ids from here on, apart from those of training draws."""


class _StopAskedError(Exception):
    """Ends an evaluation in its middle."""


@ranged("evaluation")
def evaluate(
    engine: RolloutEngine,
    source: PromptSource,
    size: int | None,
    pool: ScoringPool,
    options: EvaluationOptions,
    max_new_tokens: int,
    step: int,
    progress: Progress | None = None,
    processes: Processes = ALONE,
    is_stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """The line of metrics.jsonl for an evaluation after ``step`` steps: one completion per held-out problem.

    ``accuracy_stderr`` is the binomial standard error, sqrt(p (1 - p) / n). A split of ``size`` problems smaller than
    ``num_problems`` is taken whole. Raises DatasetError when no prompt of the split fits the model.

    None when ``is_stopping`` has said yes meanwhile in any of the processes. The engine then knows of no completion of
    this evaluation, so that one that repeats it, after a restart, finds what this one found.
    """
    started = time.perf_counter()
    history = engine.lengths.state()
    try:
        groups = _share_of_groups(engine, source, size, pool, options, max_new_tokens, progress, processes, is_stopping)
    except _StopAskedError:
        groups = None
    shares = processes.gather(groups)
    if None in shares:
        engine.lengths.restore(history)
        return None
    scored = processes.dealt(shares)
    num_problems = len(scored)
    accuracy = statistics.fmean(g.outcomes[0] for g in scored)
    completions = [g.group.completions[0] for g in scored]
    return {
        "event": "eval",
        "step": step,
        "name": "heldout",
        "num_problems": num_problems,
        "temperature": options.temperature,
        "accuracy": accuracy,
        "accuracy_stderr": math.sqrt(accuracy * (1 - accuracy) / num_problems),
        "reward_mean": statistics.fmean(g.rewards[0] for g in scored),
        "length_mean": statistics.fmean(len(c.token_ids) for c in completions),
        "clipped_ratio": statistics.fmean(c.is_truncated for c in completions),
        "num_reward_errors": sum(g.scores[0].error is not None for g in scored),
        "eval_seconds": time.perf_counter() - started,
    }


def _share_of_groups(
    engine: RolloutEngine,
    source: PromptSource,
    size: int | None,
    pool: ScoringPool,
    options: EvaluationOptions,
    max_new_tokens: int,
    progress: Progress | None,
    processes: Processes,
    is_stopping: Callable[[], bool],
) -> list[ScoredGroup]:
    """This process's share of the held-out problems, answered and scored. Raises _StopAskedError."""

    def go_on() -> None:
        if is_stopping():
            raise _StopAskedError

    end = options.num_problems if size is None else min(size, options.num_problems)
    drawn = source.draw("heldout", 0, end, end=end, go_on=go_on)
    num_problems = len(drawn.problems)
    if num_problems == 0:
        why = f"None of the first {end} held-out prompts fits the model" if end else "The task holds no problem out"
        raise DatasetError(
            f"{why}; give it others (task.heldout_fraction or task.heldout_path of a data set) "
            "or set evaluation.num_problems to 0."
        )
    share = drawn.part(processes.share(num_problems))
    return score_while_sampling(
        engine,
        pool,
        share,
        [FIRST_PROMPT_ID + p for p in share.positions],
        1,
        SamplingParams(temperature=options.temperature, max_new_tokens=max_new_tokens, seed=NOISE_SEED),
        progress,
        go_on=go_on,
    ).groups
