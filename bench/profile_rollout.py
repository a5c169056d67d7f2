"""Where the CPU seconds of a rollout go, by operation and by the live rows of the step.

    python bench/profile_rollout.py S fp32
    python bench/profile_rollout.py M bf16 --prompts 4 --group-size 8

Runs the workload of `sagc-fast bench rollout` on one thread twice: as it is, and operator by operator with a timer
around each (a native decoder does whole steps in a call, in which nothing can be told apart). Prints shares of the
second run and ends with one JSON line. The figures in docs/performance.md come from here.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sagc_fast import RolloutEngine, SamplingParams, ops
from sagc_fast.bench.models import SHAPES, WORKLOADS, model_folder
from sagc_fast.bench.workload import Workload

OPERATIONS = ("linear", "paged_attention", "rms_norm", "add_rms_norm", "silu_mul", "rope_and_cache", "sample_tokens")


def timed(name: str, call: Callable[..., Any], seconds: dict[str, float]) -> Callable[..., Any]:
    """``call`` with its CPU seconds added up; products are told apart by their output width."""

    def wrapper(*args: Any, **options: Any) -> Any:
        started = time.thread_time()
        result = call(*args, **options)
        key = f"{name} -> {args[1].shape[0]}" if name == "linear" else name
        seconds[key] += time.thread_time() - started
        return result

    return wrapper


def rollout(engine: RolloutEngine, workload: Workload, run: int) -> float:
    """CPU seconds of one generate call."""
    lengths = workload.lengths()
    params = [[SamplingParams(max_new_tokens=n, ignore_eos=True) for n in group] for group in lengths]
    started = time.thread_time()
    engine.generate(workload.prompts(run), [len(group) for group in lengths], params)
    return time.thread_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=[*SHAPES, "smollm2"])
    parser.add_argument("dtype", choices=("fp32", "bf16"))
    parser.add_argument("--prompts", type=int, help="prompts of the workload")
    parser.add_argument("--group-size", type=int, help="completions per prompt")
    args = parser.parse_args()
    given = {"num_prompts": args.prompts, "group_size": args.group_size}
    workload = replace(WORKLOADS[args.model], **{name: value for name, value in given.items() if value})
    engine = RolloutEngine.from_pretrained(model_folder(args.model, args.dtype), dtype=args.dtype, threads=1)
    torch.set_num_threads(1)
    rollout(engine, replace(workload, max_length=16, mean_length=8.0), 0)
    whole = rollout(engine, workload, 1)
    seconds: dict[str, float] = defaultdict(float)
    for name in OPERATIONS:
        setattr(ops, name, timed(name, getattr(ops, name), seconds))
    if hasattr(ops, "has_decoder"):
        ops.has_decoder = lambda *_: False
    apart = rollout(engine, workload, 2)
    seconds["outside the operators"] = apart - sum(seconds.values())
    tokens = workload.describe()["output_tokens"]
    print(f"{args.model} {args.dtype}, {tokens:,} output tokens: {whole:.2f} CPU s, operator by operator {apart:.2f}")
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{name:<28} {value:7.2f} s {value / apart:6.1%}")
    figures = {"model": args.model, "dtype": args.dtype, "tokens": tokens, "whole": whole, "apart": apart}
    print(json.dumps(figures | {"seconds": seconds}))


if __name__ == "__main__":
    main()
