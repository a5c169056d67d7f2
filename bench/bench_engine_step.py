"""What an engine step costs by its live rows, and how much of it is spent outside the kernels.

    python bench/bench_engine_step.py                      model S in fp32 and bf16, one thread, about a minute
    python bench/bench_engine_step.py --model smollm2 --dtype bf16 --rows 1 16 128

One prompt of 160 tokens per 16 rows, 64 tokens each, sampled at temperature 1. CPU seconds of this process, the best of
three repeats. "native" is the decoder's calls (steps of decode rows; forward; language-model head and draw), "outside"
everything else: scheduling, batch building, stop checks, dispatch. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from sagc_fast import RolloutEngine, SamplingParams, ops
from sagc_fast.bench.models import model_folder

PROMPT_TOKENS, NEW_TOKENS, SIBLINGS, REPEATS = 160, 64, 16, 3


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        started = time.thread_time()
        result = function(*args)
        seconds[0] += time.thread_time() - started
        return result

    return call


def measure(engine: RolloutEngine, rows: int, native_seconds: list[float]) -> dict[str, float]:
    """Milliseconds per step of one call with ``rows`` live rows throughout."""
    generator = torch.Generator().manual_seed(rows)
    sizes = [SIBLINGS] * (rows // SIBLINGS) + ([rows % SIBLINGS] if rows % SIBLINGS else [])
    prompts = [torch.randint(4, 4096, (PROMPT_TOKENS,), generator=generator).tolist() for _ in sizes]
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    runs: list[tuple[float, float, int]] = []
    for _ in range(REPEATS):
        native_seconds[0] = 0.0
        started = time.process_time()
        engine.generate(prompts, sizes, params)
        total = time.process_time() - started
        runs.append((total, native_seconds[0], engine.stats.num_steps))
    total, native, steps = min(runs)
    return {
        "rows": rows,
        "step_ms": round(1e3 * total / steps, 3),
        "native_ms": round(1e3 * native / steps, 3),
        "outside_ms": round(1e3 * (total - native) / steps, 3),
        "outside_share": round(1.0 - native / total, 3),
        "ms_per_row": round(1e3 * total / steps / rows, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="S", help="a model that sagc-fast bench knows")
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128])
    args = parser.parse_args()
    native_seconds = [0.0]
    for name in ("forward", "sample", "steps"):
        setattr(ops.Decoder, name, timed(getattr(ops.Decoder, name), native_seconds))
    curves = {}
    for dtype in args.dtype:
        engine = RolloutEngine.from_pretrained(str(model_folder(args.model, dtype)), dtype=dtype, threads=1)
        engine.generate([[5] * 8], 1, SamplingParams(max_new_tokens=2))
        curves[dtype] = []
        for rows in args.rows:
            row = measure(engine, rows, native_seconds)
            curves[dtype].append(row)
            print(
                f"{args.model} {dtype} {rows:>4} rows: {row['step_ms']:>8.2f} ms a step, outside the kernels "
                f"{row['outside_ms']:.2f} ms ({row['outside_share']:.0%}), {row['ms_per_row']:.2f} ms a row",
                flush=True,
            )
    print(json.dumps({"model": args.model, "threads": 1, "curves": curves}))


if __name__ == "__main__":
    main()
