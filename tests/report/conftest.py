"""Synthetic run directories with the schema that ``sagc-fast train`` writes: no model, the same numbers every time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def write_run(folder: Path, controller: str = "sagc", num_steps: int = 24, seed: int = 0) -> Path:
    """A run of ``num_steps`` steps with drifting lengths, evaluations every 8 steps and three timelines."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    metrics, timelines, seconds, price = [_eval_record(0, 0.52)], [], 0.0, 0.0
    for step in range(1, num_steps + 1):
        progress = step / num_steps
        size = 16 if controller == "fixed" else rng.choice((16, 8)) if price < 0.8 else rng.choice((4, 4, 8))
        record, rows = _step_record(rng, step, size, progress, price)
        if controller == "sagc":
            price = max(0.0, price + 0.1 * (record["straggler_rate"] - 0.25))
            record |= {"arms": _arms(rng, progress), "delta": 0.25, "tau": 2.0, "lambda": price}
        seconds += record["step_seconds"]
        metrics.append(record | {"controller": controller, "time_seconds": seconds})
        if step in (1, num_steps // 2, num_steps):
            timelines.append(_timeline_record(step, rows, rng))
        if step % 8 == 0:
            metrics.append(_eval_record(step, 0.52 + 0.4 * progress))
    _write_jsonl(folder / "metrics.jsonl", metrics)
    _write_jsonl(folder / "timeline.jsonl", timelines)
    group_size = "16" if controller == "fixed" else "null"
    (folder / "config.yaml").write_text(
        f"steps: {num_steps}\nseed: 7\ncontroller:\n  kind: {controller}\n  group_size: {group_size}\n",
        encoding="utf-8",
    )
    (folder / "versions.json").write_text(json.dumps({"sagc_fast": "0.1.0", "torch": "2.13.0"}), encoding="utf-8")
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """``make_run(name, controller, num_steps, seed)`` writes a run under tmp_path and returns its folder."""

    def make(name: str, controller: str = "sagc", num_steps: int = 24, seed: int = 0) -> Path:
        return write_run(tmp_path / name, controller, num_steps, seed)

    return make


def _step_record(
    rng: random.Random, step: int, size: int, progress: float, price: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rows = []
    stragglers = 0
    for group in range(8):
        lengths = [min(256, 4 + int(rng.lognormvariate(3.2 + 0.5 * progress, 0.7))) for _ in range(size)]
        stragglers += max(lengths) / sorted(lengths)[size // 2] > 2
        rows += [(group, sample, length) for sample, length in enumerate(lengths)]
    lengths = sorted(length for _, _, length in rows)
    tokens, longest = sum(lengths), lengths[-1]
    rollout, update = 0.4 * longest / 64 + tokens / 2600, tokens / 3900
    reward = 0.5 + 0.4 * progress + rng.gauss(0, 0.04)
    checkpoint = 0.3 if step % 10 == 0 else 0.0
    quantiles = [lengths[int(q * (len(lengths) - 1))] for q in (0.05, 0.25, 0.5, 0.75, 0.95)]
    record = {
        "event": "step", "step": step, "group_size": size, "num_groups": 8, "num_straggler_groups": stragglers,
        "straggler_rate": stragglers / 8, "straggler_ratio_mean": 2.1, "straggler_ratio_max": 3.4,
        "clipped_ratio": lengths.count(256) / len(lengths), "reward_mean": reward, "reward_std": 0.4,
        "outcome_mean": min(1.0, reward), "num_groups_kept": 6, "num_groups_sampled": 8,
        "length_mean": tokens / len(lengths), "length_max": longest, "length_quantiles": quantiles,
        "num_output_tokens": tokens, "num_prompt_tokens": 160, "num_update_tokens": tokens + 160,
        "rollout_seconds": rollout, "reward_seconds": 0.05, "update_seconds": update,
        "checkpoint_seconds": checkpoint, "step_seconds": rollout + update + checkpoint + 0.12,
        "tokens_per_second": tokens / rollout, "idle_fraction": 1 - tokens / (len(lengths) * longest),
        "tail_fraction": 0.3 + 0.2 * rng.random(), "num_preemptions": 0, "loss": rng.gauss(0, 0.02),
        "grad_norm": 0.3 + 0.1 * rng.random(), "clip_low_fraction": 0.0, "clip_high_fraction": 0.002,
        "entropy": 0.6 - 0.3 * progress, "kl": 0.0, "logprob_diff_mean": 1e-6,
        "logprob_diff_max": 3e-5 + 1e-5 * rng.random(), "learning_rate": 1e-4, "num_reward_errors": 0,
        "is_skipped": False, "lambda": price,
    }  # fmt: skip
    return record, [{"group": g, "sample": s, "length": n} for g, s, n in rows]


def _arms(rng: random.Random, progress: float) -> dict[str, dict[str, float]]:
    arms = {}
    for size, rate in ((4, 0.18), (8, 0.4), (16, 0.7)):
        mean, half = rate + 0.1 * progress + rng.gauss(0, 0.01), 0.25 - 0.15 * progress
        arms[str(size)] = {"mean": mean, "low": max(0.0, mean - half), "high": min(1.0, mean + half), "pulls": 5}
    return arms


def _eval_record(step: int, accuracy: float) -> dict[str, Any]:
    return {
        "event": "eval", "step": step, "name": "heldout", "num_problems": 256, "temperature": 1.0, "accuracy": accuracy,
        "accuracy_stderr": (accuracy * (1 - accuracy) / 256) ** 0.5, "reward_mean": accuracy, "length_mean": 40.0,
        "clipped_ratio": 0.0, "eval_seconds": 1.5,
    }  # fmt: skip


def _timeline_record(step: int, rows: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
    rows = [
        row
        | {
            "first_step": row["group"] // 4,
            "last_step": row["group"] // 4 + row["length"] - 1,
            "reward": float(rng.random() < 0.6),
            "text": f"{step}+{row['sample']}=<b>{'carry the one, ' * rng.randrange(1, 9)}&</b>\nanswer {row['length']}",
        }
        for row in rows
    ]
    last = max(row["last_step"] for row in rows)
    active = [sum(row["first_step"] <= t <= row["last_step"] for row in rows) for t in range(last + 1)]
    return {"step": step, "capacity_rows": len(rows), "active_rows": active, "rows": rows}


def _write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
