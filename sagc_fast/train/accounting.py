"""A step's figures: the record of metrics.jsonl, the length trace and the row timeline, each from what was sampled."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sagc_fast.types import RolloutStats

if TYPE_CHECKING:
    from sagc_fast.config import ControllerOptions
    from sagc_fast.train.sampling import Rollout, ScoredGroup
    from sagc_fast.train.update import UpdateResult

TEXT_CHARS = 400
"""Characters of a completion's text kept in the timeline."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
COSTS = ("fixed_seconds", "iteration_seconds", "token_seconds")
"""What the cost-aware controller has fitted: seconds per step, per decode iteration and per output token."""


def merge_stats(parts: Sequence[RolloutStats]) -> RolloutStats:
    """The rounds of a step as one rollout; shares are weighted by the row-steps or completions behind them."""
    if len(parts) == 1:
        return parts[0]
    area = sum(p.capacity_rows * len(p.active_rows) for p in parts)
    steps = sum(len(p.active_rows) for p in parts)
    prompts, completions = sum(p.num_prompts for p in parts), sum(p.num_completions for p in parts)

    def mean(name: str, weights: str, total: int) -> float:
        return sum(getattr(p, name) * getattr(p, weights) for p in parts) / total if total else 0.0

    summed = (
        "num_prompts", "num_completions", "num_prompt_tokens", "num_prefill_tokens", "num_recomputed_tokens",
        "num_output_tokens", "num_steps", "total_seconds", "prefill_seconds", "decode_seconds", "sample_seconds",
        "host_seconds", "num_preemptions", "num_draft_tokens", "num_accepted_tokens", "num_steps_saved",
        "draft_gain_seconds", "num_graph_captures", "num_graph_replays", "num_device_waits", "num_wasted_row_steps",
        "device_idle_seconds",
    )  # fmt: skip
    largest = (
        "capacity_rows",
        "kv_blocks_total",
        "kv_blocks_peak",
        "kv_bytes_total",
        "straggler_ratio_max",
        "max_length",
    )
    return RolloutStats(
        **{name: sum(getattr(p, name) for p in parts) for name in summed},
        **{name: max(getattr(p, name) for p in parts) for name in largest},
        active_rows=[rows for p in parts for rows in p.active_rows],
        idle_fraction=1.0 - sum(sum(p.active_rows) for p in parts) / area if area else 0.0,
        tail_fraction=sum(p.tail_fraction * len(p.active_rows) for p in parts) / steps if steps else 0.0,
        straggler_ratio_mean=mean("straggler_ratio_mean", "num_prompts", prompts),
        clipped_ratio=mean("clipped_ratio", "num_completions", completions),
        mean_length=mean("mean_length", "num_completions", completions),
        is_filtered=any(p.is_filtered for p in parts),
    )


def straggler_figures(groups: Sequence[ScoredGroup], tau: float) -> dict[str, Any]:
    """Of the groups that the controller observes: a group straggles when longest / median exceeds tau."""
    ratios = [max(g.group.lengths) / statistics.median(g.group.lengths) for g in groups]
    num_stragglers = sum(ratio > tau for ratio in ratios)
    return {
        "num_groups": len(groups),
        "num_straggler_groups": num_stragglers,
        "straggler_rate": num_stragglers / len(groups),
        "straggler_ratio_mean": statistics.fmean(ratios),
        "straggler_ratio_max": max(ratios),
    }


def completion_figures(rollout: Rollout) -> dict[str, Any]:
    """Of everything sampled in the step, filtered groups included, so that filtering does not flatter the figures."""
    rewards = [r for g in rollout.groups for r in g.rewards]
    outcomes = [o for g in rollout.groups for o in g.outcomes]
    lengths = sorted(n for g in rollout.groups for n in g.group.lengths)
    return {
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "outcome_mean": statistics.fmean(outcomes),
        "num_completions_sampled": len(lengths),
        "num_groups_sampled": len(rollout.groups),
        "num_groups_kept": len(rollout.kept),
        "num_prompts_passed_over": rollout.num_passed_over,
        "num_reward_errors": sum(s.error is not None for g in rollout.groups for s in g.scores),
        "length_mean": statistics.fmean(lengths),
        "length_max": lengths[-1],
        "length_quantiles": [lengths[min(int(q * len(lengths)), len(lengths) - 1)] for q in QUANTILES],
    }


def histograms(rollout: Rollout) -> dict[str, list[float]]:
    """Distributions behind the means: completion lengths, rewards, and longest over median length of the groups."""
    groups = [g.group.lengths for g in rollout.groups]
    return {
        "lengths": [float(n) for lengths in groups for n in lengths],
        "rewards": [r for g in rollout.groups for r in g.rewards],
        "straggler_ratios": [max(lengths) / statistics.median(lengths) for lengths in groups],
    }


def rollout_figures(rollout: Rollout) -> dict[str, Any]:
    """Tokens, seconds and row use of the step's rollout, all rounds together."""
    stats, seconds = rollout.stats, rollout.rollout_seconds
    return {
        "clipped_ratio": stats.clipped_ratio,
        "num_output_tokens": stats.num_output_tokens,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "rollout_seconds": seconds,
        "reward_seconds": rollout.reward_seconds,
        "pack_seconds": rollout.pack_seconds,
        "tokens_per_second": stats.num_output_tokens / seconds if seconds > 0 else 0.0,
        "idle_fraction": stats.idle_fraction,
        "tail_fraction": stats.tail_fraction,
        "num_preemptions": stats.num_preemptions,
    }


def update_figures(update: UpdateResult, rollout: Rollout) -> dict[str, Any]:
    """Of the step's optimizer updates; None where nothing was computed (no group with a signal)."""
    means = update.metrics.means() if update.metrics is not None else {}
    difference = update.logprob_difference
    return {
        "gap_seconds": rollout.gap_seconds + update.prepare_seconds,
        "update_seconds": update.seconds,
        "num_update_tokens": update.num_tokens,
        "loss": statistics.fmean(update.losses) if update.losses else None,
        "grad_norm": statistics.fmean(update.grad_norms) if update.grad_norms else None,
        "clip_low_fraction": means.get("clip_low"),
        "clip_high_fraction": means.get("clip_high"),
        "dual_clip_fraction": means.get("dual_clip"),
        "ratio_min": means.get("ratio_min"),
        "ratio_max": means.get("ratio_max"),
        "approx_kl": means.get("approx_kl"),
        "entropy": means.get("entropy"),
        "kl": means.get("ref_kl"),
        "rollout_is_mean": means.get("is_weight"),
        "rollout_is_limited": means.get("is_limited"),
        "logprob_diff_mean": difference.mean_abs if difference else None,
        "logprob_diff_max": difference.max_abs if difference else None,
        "logprob_diff_signed": difference.mean if difference else None,
        "rollout_kl": difference.kl if difference else None,
        "learning_rate": update.learning_rate,
        "is_skipped": update.num_updates == 0,
    }


def controller_figures(gauges: dict[str, Any], options: ControllerOptions) -> dict[str, Any]:
    """The price of a straggler and the posteriors after this step's evidence; what a controller lacks is null or
    absent."""
    figures = {"lambda": gauges.get("lambda"), "delta": options.delta, "tau": options.tau}
    if options.kind == "cost_aware":
        return figures | {"costs": {name: gauges[name] for name in COSTS}}
    return figures | {"arms": gauges["arms"]} if "arms" in gauges else figures


def group_size_figures(groups: Sequence[ScoredGroup], kind: str) -> dict[str, Any]:
    """What became of the prompts' own group sizes; nothing where all are of the one that ``group_size`` says."""
    if kind != "prompt_aware":
        return {}
    sizes = sorted(len(g.group.completions) for g in groups)
    counts = {str(size): count for size, count in Counter(sizes).items()}
    return {"group_size_mean": statistics.fmean(sizes), "group_size_counts": counts}


def example_error(rollout: Rollout) -> str | None:
    """One scorer's error, for a message; None when all went well."""
    return next((s.error for g in rollout.groups for s in g.scores if s.error), None)


def length_trace(step: int, group_size: int, groups: Sequence[ScoredGroup], max_new_tokens: int) -> dict[str, Any]:
    """The step's line of lengths.jsonl: what the controller saw, for `sagc-fast simulate`."""
    return {
        "step": step,
        "group_size": group_size,
        "lengths": [g.group.lengths for g in groups],
        "problem_ids": [g.problem.length_key for g in groups],
        "max_new_tokens": max_new_tokens,
    }


def timeline(step: int, rollout: Rollout) -> dict[str, Any]:
    """The step's line of timeline.jsonl: when each row of the first round was busy, and with what (of several
    processes, those of the first)."""
    stats = rollout.first_round_stats
    rows = [
        {
            "group": index,
            "sample": c.sample_index,
            "first_step": c.first_step,
            "last_step": c.last_step,
            "length": len(c.token_ids),
            "reward": score.reward,
            "text": (c.text or "")[:TEXT_CHARS],
        }
        for index, g in enumerate(rollout.own_first_round)
        for c, score in zip(g.group.completions, g.scores, strict=True)
    ]
    return {"step": step, "capacity_rows": stats.capacity_rows, "active_rows": list(stats.active_rows), "rows": rows}
