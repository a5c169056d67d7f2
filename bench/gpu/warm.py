"""Compiles the Triton kernels ahead, in many processes; :func:`tune` lets each choose its configuration on the device.

Triton keeps both on disk, so that the parts behind begin warm. What is compiled without the device has the key of a
launch in Triton's cache (tests/kernels/test_compile_counts.py).
"""

from __future__ import annotations

import importlib.util
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from gpu.device import CONFIGS, DEVICE, REHEARSAL
from gpu.report import Outcome, part, row

MOST_PROCESSES = 10
ADDITION = (4, 2, 16, 64, 176, 20)
"""Heads, kv heads, their width, width, feed-forward width and vocabulary of the addition policy, which runs in fp32."""


def compile_share(share: int, num_shares: int, architecture: int) -> tuple[int, list[str]]:
    """Compile every ``num_shares``-th launch; how many, and what did not compile."""
    from sagc_fast.kernels import aot

    count, errors = 0, []
    for launch in _all_launches()[share::num_shares]:
        try:
            aot.compile_launch(launch, architecture)
            count += 1
        except Exception as error:
            errors.append(f"{launch.title}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return count, errors


def _all_launches() -> list:
    from sagc_fast.kernels import aot

    models = [(_shape(name), torch.bfloat16) for name in CONFIGS] + [(aot.Shape(*ADDITION), torch.float32)]
    found = [launch for shape, dtype in models for launch in aot.launches(shape, dtype, first=REHEARSAL)]
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
                done = [job.result() for job in jobs]
            count = sum(number for number, _ in done)
            row("compile ahead", time.perf_counter() - started, "s", beside=f"{count} kernels, {processes} processes")
            for error in (error for _, errors in done for error in errors):
                outcome.errors.append(error)
                row("not compiled", None, beside=error)


def tune(outcome: Outcome) -> None:
    """Every kernel of both models once, at a size that fills the device."""
    if REHEARSAL or importlib.util.find_spec("triton") is None:
        return
    from sagc_fast.kernels import launch_all

    for name in CONFIGS:
        with outcome.section(f"tune, {name}"):
            started = time.perf_counter()
            launch_all.tune(_shape(name), torch.bfloat16, DEVICE)
            torch.cuda.synchronize()
            row(f"tune, {name}", time.perf_counter() - started, "s")


if __name__ == "__main__":
    main()
