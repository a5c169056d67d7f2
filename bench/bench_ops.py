"""Operators one by one: achieved GFLOP/s and GB/s against ceilings measured in the same run, torch beside them.

    make bench                                                          this and the controller's, a few minutes
    pytest bench/bench_ops.py --benchmark-only -k "S-fp32 and decode"   some of it

The cases are those of `sagc-fast bench kernels` (sagc_fast/bench/kernels.py), which takes native and torch in turns and
keeps a history; here each is a benchmark that pytest-benchmark can save and compare. Figures stand in extra_info and,
one line per case, on the terminal; the last line is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sagc_fast import ops
from sagc_fast.bench.ceilings import Rate, gemm_rate, read_rate
from sagc_fast.bench.kernels import BUILDERS, shapes

MODELS = shapes()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS, MAX_SECONDS = 30, 0.5
"""Timed calls of a case: so many, or what fits into the seconds, but at least three."""


@dataclass
class Report:
    """Ceilings of this run and the figures collected so far."""

    read_bytes: Rate
    gemm_flops: dict[str, Rate]
    rows: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    products = MODELS["smollm2"].products()
    collected = Report(read_rate(), {dtype: gemm_rate(products, dtype, rows=128) for dtype in DTYPES})
    yield collected
    rates = {dtype: rate.per_wall_second / 1e9 for dtype, rate in collected.gemm_flops.items()}
    gbytes = collected.read_bytes.per_wall_second / 1e9
    ceilings = ", ".join(f"{dtype} {rate:.0f} GFLOP/s" for dtype, rate in rates.items())
    print(f"\nceilings: {ceilings}, {gbytes:.1f} GB/s, {torch.get_num_threads()} threads")
    for row in collected.rows:
        print(
            f"{row['case']:<72} {row['microseconds']:>10.1f} us {row['gflops']:>8.1f} GFLOP/s ({row['of_gflops']:.0%})"
            f" {row['gbytes']:>7.2f} GB/s ({row['of_gbytes']:.0%})"
        )
    print(json.dumps({"gflops": rates, "gbytes": gbytes, "threads": torch.get_num_threads(), "rows": collected.rows}))


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("rows", [1, 16, 128])
@pytest.mark.parametrize("operation", BUILDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["S", "smollm2"])
def test_operation(
    benchmark: Any, report: Report, model: str, dtype: str, operation: str, rows: int, backend: str
) -> None:
    torch.manual_seed(0)
    case = BUILDERS[operation](MODELS[model], DTYPES[dtype], rows)
    with torch.inference_mode(), ops.use_backend(backend):
        once = min(_seconds(case.call) for _ in range(2))
        benchmark.pedantic(case.call, warmup_rounds=1, rounds=max(3, min(ROUNDS, int(MAX_SECONDS / once))))
    seconds = benchmark.stats.stats.min
    flops, num_bytes = case.flops / seconds, case.num_bytes / seconds
    figures = {
        "case": f"{model} {dtype} {case.name} {backend}",
        "microseconds": seconds * 1e6,
        "gflops": flops / 1e9,
        "of_gflops": flops / report.gemm_flops[dtype].per_wall_second,
        "gbytes": num_bytes / 1e9,
        "of_gbytes": num_bytes / report.read_bytes.per_wall_second,
    }
    benchmark.extra_info.update(figures)
    report.rows.append(figures)


def _seconds(call: Any) -> float:
    from sagc_fast.bench.clock import timed

    return timed(call).wall_seconds
