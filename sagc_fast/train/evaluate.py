"""Held-out accuracy: always the same problems under the same noise, so that evaluations differ by the weights alone."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from sagc_fast.config import EvaluationOptions
from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.tasks.base import Task
from sagc_fast.tasks.scoring import ScoringPool
from sagc_fast.train.sampling import Progress, score_while_sampling
from sagc_fast.types import SamplingParams

NOISE_SEED = 0
"""The same for every run, so that runs with different seeds are measured alike."""
FIRST_PROMPT_ID = 2**40
"""Held-out prompts have ids from here on, apart from those of training draws."""


def evaluate(
    engine: RolloutEngine,
    task: Task,
    pool: ScoringPool,
    options: EvaluationOptions,
    max_new_tokens: int,
    step: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The line of metrics.jsonl for an evaluation after ``step`` steps: one completion per held-out problem.

    ``accuracy_stderr`` is the binomial standard error, sqrt(p (1 - p) / n). A finite split smaller than
    ``num_problems`` is taken whole.
    """
    started = time.perf_counter()
    size = task.size("heldout")
    num_problems = options.num_problems if size is None else min(size, options.num_problems)
    scored, _ = score_while_sampling(
        engine,
        pool,
        [task.problem("heldout", i) for i in range(num_problems)],
        range(FIRST_PROMPT_ID, FIRST_PROMPT_ID + num_problems),
        1,
        SamplingParams(temperature=options.temperature, max_new_tokens=max_new_tokens, seed=NOISE_SEED),
        progress,
    )
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
