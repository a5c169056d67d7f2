"""What the device can do at best: bytes per second of a read, bf16 matrix products, and a launch; then, on the device
that is idle now, the kernels choose their configurations."""

from __future__ import annotations

import json

import torch

from gpu.device import DEVICE, DTYPE, REHEARSAL, free_memory, kernel_seconds
from gpu.report import out_folder, part, row
from gpu.warm import tune

READ_BYTES = 2**20 if REHEARSAL else 4 * 2**30
SIZES = (64,) if REHEARSAL else (4096, 8192, 16384)


def measure() -> dict[str, float]:
    """``read_bytes``: the best of sums and a copy (which reads and writes); ``matrix_flops``: of square products."""
    x = torch.ones(READ_BYTES // 2, dtype=torch.bfloat16, device=DEVICE)
    rows, target = x.view(-1, 4096), torch.empty_like(x)
    reads = {
        "sum": x.nbytes / kernel_seconds(lambda: x.view(torch.int32).sum(dtype=torch.int32)),
        "sum of rows": x.nbytes / kernel_seconds(lambda: rows.amax(1)),
        "copy": 2 * x.nbytes / kernel_seconds(lambda: target.copy_(x)),
    }
    products = {}
    for size in SIZES:
        a, b = (torch.randn(size, size, device=DEVICE, dtype=DTYPE) for _ in "ab")
        out = torch.empty(size, size, device=DEVICE, dtype=DTYPE)
        products[size] = 2.0 * size**3 / kernel_seconds(lambda a=a, b=b, out=out: torch.mm(a, b.t(), out=out))
    return {
        "read_bytes": max(reads.values()),
        "matrix_flops": max(products.values()),
        **{f"read, {name}": rate for name, rate in reads.items()},
        **{f"product of {size}": rate for size, rate in products.items()},
    }


def main() -> None:
    with part() as outcome:
        with outcome.section("ceilings"):
            found = measure()
            (out_folder() / "ceilings.json").write_text(json.dumps(found))
            for name, value in found.items():
                if name.startswith("read, "):
                    row(name, value / 1e9, "GB/s")
                elif name.startswith("product"):
                    row(name, value / 1e12, "TFLOP/s")
            row("read ceiling", found["read_bytes"] / 1e9, "GB/s")
            row("matrix ceiling", found["matrix_flops"] / 1e12, "TFLOP/s")
            x = torch.zeros(1, device=DEVICE)
            row("an empty launch", 1e6 * kernel_seconds(lambda: x.add_(1)), "us")
        free_memory()
        tune(outcome)


if __name__ == "__main__":
    main()
