"""Held-out accuracy: always the same problems under the same noise, so that evaluations differ by the weights alone."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from sagc_fast.config import EvaluationOptions
from sagc_fast.errors import DatasetError
from sagc_fast.profiling import ranged
from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.tasks.scoring import ScoringPool
from sagc_fast.train.distributed import ALONE, Processes
from sagc_fast.train.draw import PromptSource
from sagc_fast.train.sampling import Progress, score_while_sampling
from sagc_fast.types import SamplingParams

NOISE_SEED = 0
"""The same for every run, so that runs with different seeds are measured alike."""
FIRST_PROMPT_ID = 2**40
"""Held-out prompts have ids from here on, apart from those of training draws."""


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
) -> dict[str, Any]:
    """The line of metrics.jsonl for an evaluation after ``step`` steps: one completion per held-out problem.

    ``accuracy_stderr`` is the binomial standard error, sqrt(p (1 - p) / n). A split of ``size`` problems smaller than
    ``num_problems`` is taken whole. Raises DatasetError when no prompt of the split fits the model.
    """
    started = time.perf_counter()
    end = options.num_problems if size is None else min(size, options.num_problems)
    drawn = source.draw("heldout", 0, end, end=end)
    num_problems = len(drawn.problems)
    if num_problems == 0:
        raise DatasetError(
            f"None of the first {end} held-out prompts fits the model; set evaluation.num_problems to 0."
        )
    share = drawn.part(processes.share(num_problems))
    part = score_while_sampling(
        engine,
        pool,
        share,
        [FIRST_PROMPT_ID + p for p in share.positions],
        1,
        SamplingParams(temperature=options.temperature, max_new_tokens=max_new_tokens, seed=NOISE_SEED),
        progress,
    )
    scored = processes.dealt(processes.gather(part.groups))
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
