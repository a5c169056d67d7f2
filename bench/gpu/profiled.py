"""How long the device is at work during a call: the union of its kernels' and copies' times under torch.profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu.device import DEVICE, synchronize


def busy_seconds(call: Callable[[], Any]) -> float:
    """0 where the profiler sees no kernels. The host is slower under it; the times of the kernels are not."""
    is_gpu = DEVICE.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as profiler:
        call()
        synchronize()
    wanted = DeviceType.CUDA if is_gpu else DeviceType.CPU
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == wanted
    ]
    return union_seconds(spans)


def union_seconds(spans: list[tuple[int, int]]) -> float:
    """Length of a union of intervals in nanoseconds."""
    total, end = 0, -1
    for start, stop in sorted(spans):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total / 1e9
