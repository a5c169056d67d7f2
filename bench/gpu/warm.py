"""Compiles the Triton kernels ahead, many at a time, then lets each choose its configuration on the idle device.

Triton keeps both on disk, so that the parts behind this one begin warm. What is compiled without the device has the key
of a launch in Triton's cache; where one has not, it is compiled again when it is tuned.
"""

from __future__ import annotations

import importlib.util
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from gpu.device import CONFIGS, DEVICE, REHEARSAL
from gpu.report import part, row

MOST_PROCESSES = 12


def compile_share(share: int, num_shares: int, architecture: int) -> int:
    """Compile every ``num_shares``-th launch of the two models; how many."""
    from sagc_fast.kernels import aot

    count = 0
    for launch in _all_launches()[share::num_shares]:
        aot.compile_launch(launch, architecture)
        count += 1
    return count


def _all_launches() -> list:
    from sagc_fast.kernels import aot

    found = [launch for name in CONFIGS for launch in aot.launches(_shape(name), first=REHEARSAL)]
    return list(dict.fromkeys(found))[: 1 if REHEARSAL else None]


def _shape(name: str):
    from sagc_fast.kernels.aot import Shape

    c = CONFIGS[name]
    fields = ("num_heads", "num_kv_heads", "head_dim", "hidden_size", "intermediate_size", "vocab_size")
    return Shape(*(c[field] for field in fields))


def main() -> None:
    with part() as outcome:
        if importlib.util.find_spec("triton") is None:
            row("Triton kernels", None, beside="triton is not installed")
            return
        with outcome.section("compile ahead"):
            processes = 1 if REHEARSAL else max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) - 2))
            major, minor = (9, 0) if REHEARSAL else torch.cuda.get_device_capability(DEVICE)
            started = time.perf_counter()
            with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
                jobs = [pool.submit(compile_share, i, processes, 10 * major + minor) for i in range(processes)]
                count = sum(job.result() for job in jobs)
            row("compile ahead", time.perf_counter() - started, "s", beside=f"{count} kernels, {processes} processes")
        if REHEARSAL:
            return
        from sagc_fast.kernels.aot import launch_all

        for name in CONFIGS:
            with outcome.section(f"tune, {name}"):
                started = time.perf_counter()
                launch_all(_shape(name), torch.bfloat16, DEVICE)
                torch.cuda.synchronize()
                row(f"tune, {name}", time.perf_counter() - started, "s")


if __name__ == "__main__":
    main()
