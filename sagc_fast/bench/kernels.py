"""``sagc-fast bench kernels``: each operation of the rollout, native and plain torch in turns, against the ceilings.

The cases also serve bench/bench_ops.py. Operands are what a decode step meets: weights come from memory (they rotate
over more than a cache holds) unless a case says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch

from sagc_fast import ops
from sagc_fast.bench.ceilings import Ceilings, measure_ceilings
from sagc_fast.bench.clock import Elapsed, alternate, timed
from sagc_fast.bench.models import SHAPES, Shape
from sagc_fast.bench.record import metric, new_record, result, rounded
from sagc_fast.bench.stats import ratio_interval
from sagc_fast.errors import BackendError
from sagc_fast.ops.backend import native_module
from sagc_fast.ops.layouts import PagedLayout

BLOCK_SIZE = 16
COLD_BYTES = 200e6
CONTEXT, PROMPT, GROUP = 256, 160, 16
"""Positions that a decode row attends to; how many of them are its group's prompt; siblings."""
BATCH_SECONDS = 0.002
"""A timed batch of calls lasts at least so long: beyond what clock and interruptions cost."""
MAX_CALLS = 200
WARMUPS = 2
PRODUCTS = ("qkv", "output", "gate and up", "down", "head")
"""In the order of Shape.products."""
SMOLLM2 = Shape(width=576, layers=30, heads=9, kv_heads=3, head_dim=64, hidden=1536, vocab=49_152)


@dataclass(frozen=True, slots=True)
class Case:
    """One call of one operation. ``flops`` and ``num_bytes`` are what it cannot do without."""

    name: str
    call: Callable[[], object]
    flops: float
    num_bytes: float


def shapes() -> dict[str, Shape]:
    """S, M and SmolLM2's widths."""
    made = {
        name: Shape(
            f["hidden_size"], f["num_layers"], f["num_heads"], f["num_kv_heads"], f["head_dim"],
            f["intermediate_size"], f["vocab_size"],
        )
        for name, f in SHAPES.items()
    }  # fmt: skip
    return {"S": made["S"], "smollm2": SMOLLM2, "M": made["M"]}


def linear_case(shape: Shape, dtype: torch.dtype, rows: int, name: str, is_cold: bool = True) -> Case:
    """One of the dense products of a layer, or the head (``PRODUCTS``)."""
    n, k = shape.products()[PRODUCTS.index(name)][0]
    itemsize = dtype.itemsize
    copies = max(1, math.ceil(COLD_BYTES / (n * k * itemsize))) if is_cold else 1
    weight = torch.randn(n, k).to(dtype)
    weights = cycle([weight, *(weight.clone() for _ in range(copies - 1))])
    x = torch.randn(rows, k).to(dtype)
    return Case(
        f"linear {name}, {rows} x {k} -> {n}{'' if is_cold else ', in cache'}",
        lambda: ops.linear(x, next(weights)),
        2.0 * rows * n * k,
        itemsize * (n * k + rows * (n + k)),
    )


def attention_case(shape: Shape, dtype: torch.dtype, rows: int, num_shared: int) -> Case:
    """Paged decode: groups of siblings, of whose positions the first ``num_shared`` are one prompt's."""
    layout = decode_layout(rows, CONTEXT, min(GROUP, rows), num_shared // BLOCK_SIZE)
    blocks = rows * CONTEXT // BLOCK_SIZE
    cache = torch.randn(2, blocks, shape.kv_heads, BLOCK_SIZE, shape.head_dim).to(dtype)
    q = torch.randn(rows, shape.heads, shape.head_dim).to(dtype)
    positions = rows * (CONTEXT - num_shared) + math.ceil(rows / GROUP) * num_shared
    return Case(
        f"paged decode, {rows} x {CONTEXT} positions, {num_shared} shared by {min(GROUP, rows)}",
        lambda: ops.paged_attention(q, cache[0], cache[1], layout, shape.head_dim**-0.5),
        4.0 * rows * CONTEXT * shape.heads * shape.head_dim,
        2.0 * positions * shape.kv_heads * shape.head_dim * cache.itemsize,
    )


def norm_case(shape: Shape, dtype: torch.dtype, rows: int) -> Case:
    x, residual = torch.randn(rows, shape.width).to(dtype), torch.randn(rows, shape.width).to(dtype)
    weight = torch.ones(shape.width).to(dtype)
    return Case(f"add + RMSNorm, {rows} rows", lambda: ops.add_rms_norm(x, residual, weight, 1e-5), 0.0, 4.0 * x.nbytes)


def activation_case(shape: Shape, dtype: torch.dtype, rows: int) -> Case:
    gate_up = torch.randn(rows, 2 * shape.hidden).to(dtype)
    return Case(f"SwiGLU, {rows} rows", lambda: ops.silu_mul(gate_up), 0.0, 1.5 * gate_up.nbytes)


def rope_case(shape: Shape, dtype: torch.dtype, rows: int) -> Case:
    angles, slots = torch.randn(512, shape.head_dim // 2), torch.arange(rows)
    cos, sin = angles.cos(), angles.sin()
    cache = torch.zeros(2, math.ceil(rows / BLOCK_SIZE), shape.kv_heads, BLOCK_SIZE, shape.head_dim).to(dtype)
    q = torch.randn(rows, shape.heads, shape.head_dim).to(dtype)
    k = torch.randn(rows, shape.kv_heads, shape.head_dim).to(dtype)
    return Case(
        f"RoPE + cache write, {rows} rows",
        lambda: ops.rope_and_cache(q, k, k, cos, sin, slots, cache[0], cache[1], slots),
        0.0,
        2.0 * q.nbytes + 4.0 * k.nbytes,
    )


def draw_case(shape: Shape, dtype: torch.dtype, rows: int) -> Case:
    """Logits are fp32 whatever the model is."""
    logits, uniform = torch.randn(rows, shape.vocab), torch.rand(rows, dtype=torch.float64)
    temperature = torch.ones(rows)
    return Case(
        f"draw with log-prob, {rows} rows",
        lambda: ops.sample_tokens(logits, uniform, temperature),
        0.0,
        float(logits.nbytes),
    )


BUILDERS: dict[str, Callable[[Shape, torch.dtype, int], Case]] = {
    **{f"linear {name}": partial(linear_case, name=name) for name in PRODUCTS},
    "decode": partial(attention_case, num_shared=0),
    "decode shared": partial(attention_case, num_shared=PROMPT),
    "norm": norm_case,
    "activation": activation_case,
    "rope": rope_case,
    "draw": draw_case,
}
"""Name of a case -> function of (shape, dtype, rows) that makes it, operands included."""


def decode_layout(num_sequences: int, context: int, group: int, shared_blocks: int) -> PagedLayout:
    """One query token per sequence; siblings of a group share their first blocks; blocks lie scattered."""
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


def run(
    model: str,
    dtype: str,
    threads: int,
    rows: tuple[int, ...],
    runs: int,
    label: str | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The record: per case and backend the time of a call (median of ``runs`` batches, in turns) and its rates."""
    shape, torch_dtype = shapes()[model], {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    clock = "cpu" if threads == 1 else "wall"
    settings = {"model": model, "dtype": dtype, "threads": threads, "rows": list(rows)}
    record = new_record("kernels", settings, threads, label)
    backends = ["native", "torch"] if native_module() is not None else ["torch"]
    if len(backends) == 1:
        record["notes"].append("The native operators are not built; `sagc-fast doctor` says why.")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    try:
        with torch.inference_mode():
            say("measuring what the machine can do")
            ceilings = measure_ceilings(shape.products(), (dtype,))
            record["ceilings"] = ceilings.to_dict()
            for count in rows:
                say(f"{model} {dtype}, {count} rows")
                for build in BUILDERS.values():
                    case = build(shape, torch_dtype, count)
                    record["results"] += _measure(case, backends, runs, ceilings, dtype, clock)
    finally:
        torch.set_num_threads(before)
    return record


def _measure(
    case: Case, backends: list[str], runs: int, ceilings: Ceilings, dtype: str, clock: str
) -> Iterator[dict[str, Any]]:
    """One result per backend that serves the case."""
    calls: dict[str, Callable[[], object]] = {}
    for backend in backends:
        batch = _batch(case.call, backend)
        if batch is not None:
            calls[backend] = batch
    seconds = {
        name: [_seconds(one, clock) / calls[name].count for one in times]
        for name, times in alternate(calls, runs, WARMUPS).items()
    }
    for name, values in seconds.items():
        best = min(values)
        facts = {
            "gflops": rounded(case.flops / best / 1e9),
            "of_gemm_rate": rounded(case.flops / best / ceilings.gemm_flops[dtype].per_second(clock)),
            "gbytes_per_second": rounded(case.num_bytes / best / 1e9),
            "of_read_rate": rounded(case.num_bytes / best / ceilings.read_bytes.per_second(clock)),
        }
        if name == "native" and "torch" in seconds:
            faster = ratio_interval(seconds["torch"], values, is_paired=True)
            facts["faster_than_torch_by"] = [rounded(v) for v in (faster.ratio, faster.low, faster.high)]
        yield result(
            f"{case.name} [{name}]",
            {"time": metric([1e6 * v for v in values], "us", "lower", name == "native")},
            **facts,
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """``count`` calls with one backend."""

    call: Callable[[], object]
    backend: str
    count: int

    def __call__(self) -> None:
        with ops.use_backend(self.backend):
            for _ in range(self.count):
                self.call()


def _batch(call: Callable[[], object], backend: str) -> _Batch | None:
    """Enough calls to last BATCH_SECONDS; None when the backend does not serve the operation."""
    try:
        once = timed(_Batch(call, backend, 1)), timed(_Batch(call, backend, 1))
    except BackendError:
        return None
    count = math.ceil(BATCH_SECONDS / max(min(one.cpu_seconds for one in once), 1e-6))
    return _Batch(call, backend, max(1, min(count, MAX_CALLS)))


def _seconds(elapsed: Elapsed, clock: str) -> float:
    return elapsed.cpu_seconds if clock == "cpu" else elapsed.wall_seconds
