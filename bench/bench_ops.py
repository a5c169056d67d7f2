"""Native operators one by one: achieved GFLOP/s and GB/s against ceilings measured in the same run, torch beside them.

    pytest bench/bench_ops.py --benchmark-only          two small models' shapes, about two minutes
    OMP_NUM_THREADS=1 ... -k "linear and cold"          one thread, weights from memory

The arithmetic ceiling is the best rate of torch's own matrix product (1024 cubed), the memory ceiling its best sum over
256 MB. "cold" rotates weights over 200 MB so that no cache holds them, as in a decode step of a larger model. Figures
stand in each benchmark's extra_info and, one line per case, on the terminal; the last line is JSON.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pytest
import torch

from sagc_fast import ops
from sagc_fast.ops.layouts import PagedLayout

BACKENDS = ("native", "torch")
BLOCK_SIZE = 16
COLD_BYTES = 200e6
# width, query heads, KV heads, head width, feed-forward width, vocabulary
MODELS = {"S": (288, 6, 6, 48, 768, 4096), "smollm2": (576, 9, 3, 64, 1536, 49_152)}


@dataclass
class Report:
    """Ceilings of this run and the figures collected so far."""

    gflops: float
    gbytes: float
    rows: list[dict[str, Any]] = field(default_factory=list)


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    a, b, out = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.empty(1024, 1024)
    big = torch.ones(64_000_000)
    gflops = 2 * 1024**3 / best_seconds(lambda: torch.mm(a, b, out=out), 10) / 1e9
    gbytes = 4 * big.numel() / best_seconds(big.sum, 5) / 1e9
    collected = Report(gflops, gbytes)
    yield collected
    print(f"\nceilings: {gflops:.0f} GFLOP/s, {gbytes:.1f} GB/s, {torch.get_num_threads()} threads")
    for row in collected.rows:
        print(
            f"{row['case']:<46} {row['microseconds']:>10.1f} us {row['gflops']:>8.1f} GFLOP/s ({row['of_gflops']:.0%})"
            f" {row['gbytes']:>7.2f} GB/s ({row['of_gbytes']:.0%})"
        )
    print(json.dumps({"gflops": gflops, "gbytes": gbytes, "threads": torch.get_num_threads(), "rows": collected.rows}))


def run(
    benchmark: Any, report: Report, backend: str, call: Callable[[], object], *, case: str, flops: float, read: float
) -> None:
    """Time ``call`` with one backend and note its rates; ``read`` is the bytes that have to move."""
    with ops.use_backend(backend):
        benchmark.pedantic(call, warmup_rounds=3, rounds=50)
    seconds = benchmark.stats.stats.min
    figures = {
        "case": f"{case} {backend}",
        "microseconds": seconds * 1e6,
        "gflops": flops / seconds / 1e9,
        "of_gflops": flops / seconds / 1e9 / report.gflops,
        "gbytes": read / seconds / 1e9,
        "of_gbytes": read / seconds / 1e9 / report.gbytes,
    }
    benchmark.extra_info.update(figures)
    report.rows.append(figures)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("temperature", ["hot", "cold"])
@pytest.mark.parametrize("model", MODELS)
def test_linear(benchmark: Any, report: Report, model: str, temperature: str, rows: int, backend: str) -> None:
    """The widest product of a layer, gate and up together."""
    width, *_, hidden, _ = MODELS[model]
    num_copies = math.ceil(COLD_BYTES / (8 * width * hidden)) if temperature == "cold" else 1
    weights = cycle([torch.randn(2 * hidden, width) for _ in range(num_copies)])
    x = torch.randn(rows, width)
    case = f"linear {temperature} {rows}x{width} -> {2 * hidden}"
    size = 2 * hidden * width
    run(
        benchmark, report, backend, lambda: ops.linear(x, next(weights)),
        case=case, flops=2 * rows * size, read=4 * size,
    )  # fmt: skip


def decode_layout(num_sequences: int, context: int, group: int, shared_blocks: int) -> PagedLayout:
    """One query token per sequence; siblings of a group share their first blocks."""
    columns = math.ceil(context / BLOCK_SIZE)
    tables = torch.randperm(num_sequences * columns).to(torch.int32).view(num_sequences, columns)
    groups = torch.arange(num_sequences) // group
    tables[:, :shared_blocks] = tables[groups * group, :shared_blocks]
    int32, none = {"dtype": torch.int32}, torch.empty(0, dtype=torch.int64)
    return PagedLayout(
        positions_T=torch.full((num_sequences,), context - 1),
        cu_query_S1=torch.arange(num_sequences + 1, **int32),
        context_lens_S=torch.full((num_sequences,), context, **int32),
        block_tables_SB=tables,
        slots_T=none,
        logits_rows_R=none,
        share_group_S=groups.to(torch.int32),
        shared_blocks_S=torch.full((num_sequences,), shared_blocks, **int32),
        max_query_len=1,
        max_context_len=context,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shared", [0, 160])
@pytest.mark.parametrize("sequences", [1, 16, 128])
@pytest.mark.parametrize("model", MODELS)
def test_paged_decode(benchmark: Any, report: Report, model: str, sequences: int, shared: int, backend: str) -> None:
    """Groups of 16 with 256 positions each, of which ``shared`` are the group's prompt."""
    _, heads, kv_heads, head_dim, *_ = MODELS[model]
    context, group = 256, min(16, sequences)
    layout = decode_layout(sequences, context, group, shared // BLOCK_SIZE)
    cache = torch.randn(2, sequences * context // BLOCK_SIZE, kv_heads, BLOCK_SIZE, head_dim)
    q = torch.randn(sequences, heads, head_dim)
    positions = sequences * (context - shared) + sequences // group * shared
    run(
        benchmark, report, backend, lambda: ops.paged_attention(q, cache[0], cache[1], layout, head_dim**-0.5),
        case=f"decode {model} {sequences} x {context}, {shared} shared",
        flops=4 * sequences * context * heads * head_dim, read=8 * positions * kv_heads * head_dim,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("op", ["add_rms_norm", "silu_mul", "rope_and_cache", "sample_tokens"])
@pytest.mark.parametrize("model", MODELS)
def test_rowwise(benchmark: Any, report: Report, model: str, op: str, rows: int, backend: str) -> None:
    width, heads, kv_heads, head_dim, hidden, vocab = MODELS[model]
    angles, slots = torch.randn(512, head_dim // 2), torch.arange(rows)
    cache = torch.zeros(2, math.ceil(rows / BLOCK_SIZE), kv_heads, BLOCK_SIZE, head_dim)
    q, k = torch.randn(rows, heads, head_dim), torch.randn(rows, kv_heads, head_dim)
    # operands, bytes that have to move per row
    cases: dict[str, tuple[tuple, int]] = {
        "add_rms_norm": ((torch.randn(rows, width), torch.randn(rows, width), torch.ones(width), 1e-5), 16 * width),
        "silu_mul": ((torch.randn(rows, 2 * hidden),), 12 * hidden),
        "rope_and_cache": (
            (q, k, k, angles.cos(), angles.sin(), slots, cache[0], cache[1], slots),
            8 * (heads + 2 * kv_heads) * head_dim,
        ),
        "sample_tokens": (
            (torch.randn(rows, vocab), torch.rand(rows, dtype=torch.float64), torch.ones(rows)),
            4 * vocab,
        ),
    }
    operands, row_bytes = cases[op]
    call = getattr(ops, op)
    run(
        benchmark, report, backend, lambda: call(*operands),
        case=f"{op} {model} {rows} rows", flops=0, read=rows * row_bytes,
    )  # fmt: skip
