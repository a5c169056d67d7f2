"""What this machine can do at best, measured in the run whose figures are held against it.

Memory: reading at least 256 MB once, far beyond the caches of most machines. Arithmetic: the dense products of the very
shapes that a model multiplies, by the fastest of the implementations at hand. Best of several tries, not the median: a
ceiling is what remains when nothing disturbs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sagc_fast.bench.clock import timed

READ_BYTES = 256 * 2**20
Shape = tuple[int, int]
"""(output width N, input width K) of a weight matrix."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Work per second: on the wall clock, and per CPU second of one thread (all threads' seconds added up)."""

    per_wall_second: float
    per_cpu_second: float

    def per_second(self, clock: str) -> float:
        """``clock`` is ``wall`` or ``cpu``."""
        return self.per_cpu_second if clock == "cpu" else self.per_wall_second


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates in bytes and floating-point operations (a multiply-add counts two) per second."""

    read_bytes: Rate
    gemm_flops: dict[str, Rate]
    """Name of the dtype (``fp32``, ``bf16``) -> rate over ``shapes`` at ``rows`` rows."""
    rows: int
    shapes: list[Shape]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shapes": [list(shape) for shape in self.shapes]}


def measure_ceilings(
    shapes: Sequence[tuple[Shape, int]],
    dtypes: Iterable[str],
    rows: int = 128,
    num_bytes: int = READ_BYTES,
    repeats: int = 5,
) -> Ceilings:
    """``shapes``: ((N, K), how often a forward pass multiplies by such a matrix); threads are torch's current ones."""
    return Ceilings(
        read_bytes=read_rate(num_bytes, repeats),
        gemm_flops={dtype: gemm_rate(shapes, dtype, rows, repeats) for dtype in dtypes},
        rows=rows,
        shapes=[shape for shape, _ in shapes],
    )


def read_rate(num_bytes: int = READ_BYTES, repeats: int = 5) -> Rate:
    """Bytes per second when memory is read once from end to end: the better of a sum and a matrix-vector product."""
    matrix = torch.ones(num_bytes // 4 // 1024, 1024)
    vector, out = torch.ones(1024), torch.empty(matrix.shape[0])
    calls = (matrix.sum, lambda: torch.mv(matrix, vector, out=out))
    return _best([_rate(call, matrix.nbytes, repeats) for call in calls])


def gemm_rate(shapes: Sequence[tuple[Shape, int]], dtype: str, rows: int, repeats: int = 5) -> Rate:
    """Floating-point operations per second of one forward pass's dense products with ``rows`` rows, weights in cache as
    far as they fit: the arithmetic alone. Each shape counts with the implementation that is fastest on it."""
    flops, wall_seconds, cpu_seconds = 0.0, 0.0, 0.0
    for (n, k), count in shapes:
        work = 2.0 * rows * n * k
        rate = _best([_rate(call, work, repeats) for call in _products(rows, n, k, dtype)])
        flops += count * work
        wall_seconds += count * work / rate.per_wall_second
        cpu_seconds += count * work / rate.per_cpu_second
    return Rate(flops / wall_seconds, flops / cpu_seconds)


def _products(rows: int, n: int, k: int, dtype: str) -> list[Callable[[], object]]:
    """Ways to multiply [rows, k] by the transpose of [n, k]: torch's, on packed weights, and this package's."""
    from sagc_fast import ops

    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    x, weight = torch.randn(rows, k).to(torch_dtype), torch.randn(n, k).to(torch_dtype)
    transposed = weight.t().contiguous()
    calls = [
        lambda: torch.nn.functional.linear(x, weight),
        lambda: torch.mm(x, transposed),
        lambda: ops.linear(x, weight),
    ]
    packed_ops = torch.ops.mkldnn  # what torch.compile uses when it freezes weights; not every CPU may pack bf16
    packs = torch.backends.mkldnn.is_available() and hasattr(packed_ops, "_reorder_linear_weight")
    if packs and (dtype == "fp32" or packed_ops._is_mkldnn_bf16_supported()):
        packed = packed_ops._reorder_linear_weight(weight, rows)
        calls.append(lambda: packed_ops._linear_pointwise(x, packed, None, "none", [], ""))
    if dtype == "fp32" and torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight"):
        blocked = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
        calls.append(lambda: torch.ops.mkl._mkl_linear(x, blocked, weight, None, rows))
    return calls


def _rate(call: Callable[[], object], work: float, repeats: int) -> Rate:
    call()
    times = [timed(call) for _ in range(repeats)]
    return Rate(work / min(t.wall_seconds for t in times), work / min(t.cpu_seconds for t in times))


def _best(rates: list[Rate]) -> Rate:
    return Rate(max(r.per_wall_second for r in rates), max(r.per_cpu_second for r in rates))
