"""What the graph runner asks of a device: one stream that computes, one that copies results back, events, graphs.

Thin on purpose: it is all that :mod:`sagc_fast.rollout.graph_runner` knows of CUDA, so that the runner's logic is
tested where there is no GPU, on :class:`sagc_fast.rollout.stand_in_device.StandInDevice`. Nothing here waits for the
device except :meth:`Device.wait` and :meth:`Device.capture`, and both are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass
class DeviceCounts:
    """What the host asked of the device so far."""

    captures: int = 0
    replays: int = 0
    waits: int = 0
    """Times the host stood still until the device had come to some point."""


class Device(Protocol):
    """Work is queued on the compute stream in the order of the calls; :meth:`download` goes to the copy stream."""

    torch_device: torch.device
    counts: DeviceCounts

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros in host memory that the device can copy from and to while the host goes on (pinned)."""

    def eager(self) -> AbstractContextManager[None]:
        """Operators called within go on the compute stream, behind what is queued there."""

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of a host buffer, which must keep its contents until the copy is known to be done."""

    def record(self) -> Any:
        """An event: the point on the compute stream that all calls so far lie before."""

    def download(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], after: Any) -> Any:
        """Queue copies (host buffer, tensor) on the copy stream, behind the event ``after``; the event of their end."""

    def wait(self, event: Any) -> None:
        """Let the host wait for an event."""

    def seconds_between(self, first: Any, second: Any) -> float:
        """Device time between two events of :meth:`record` that are known to have passed."""

    def capture(
        self,
        step: Callable[[], None],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        beside: Any = None,
    ) -> Any:
        """A graph of the work that ``step`` queues, for :meth:`replay`. ``step`` runs once before, to compile and tune
        what it needs, so it must do no harm. It may read ``reads`` and ``writes``, memory that stays in place as long
        as the graph is used, write to ``writes`` and to what it makes itself, and look at no value.

        ``beside``: a graph that is still held. The two share the memory of what they make themselves, so that neither
        may leave anything there that is read after the other has run."""

    def replay(self, graph: Any) -> None:
        """Queue the graph's work once more."""


def made_current(torch_device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the device that is current, wherever the tensors are."""
    return torch.cuda.device(torch_device) if torch_device.type == "cuda" else nullcontext()


class CudaDevice:
    """A CUDA device through torch. The compute stream is the one that is current in the calling thread."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.counts = DeviceCounts()
        self._copy_stream = torch.cuda.Stream(torch_device)
        self._capture_stream = torch.cuda.Stream(torch_device)

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def eager(self) -> AbstractContextManager[None]:
        return nullcontext()

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def download(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], after: torch.cuda.Event) -> torch.cuda.Event:
        done = torch.cuda.Event()
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(after)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record(self._copy_stream)
        return done

    def wait(self, event: torch.cuda.Event) -> None:
        self.counts.waits += 1
        event.synchronize()

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second) * 1e-3

    def capture(
        self,
        step: Callable[[], None],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        beside: torch.cuda.CUDAGraph | None = None,
    ) -> torch.cuda.CUDAGraph:
        self.counts.captures += 1
        current, stream = torch.cuda.current_stream(self.torch_device), self._capture_stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            step()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The pool of a live graph only: torch refuses a pool whose graphs are all gone while it holds memory.
        pool = None if beside is None else beside.pool()
        try:
            # Other threads (reward workers' pipes, a profiler) may call CUDA meanwhile: only this one is watched.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                step()
        finally:
            torch.cuda.set_stream(current)  # a capture that breaks off may leave its own stream current
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        self.counts.replays += 1
        graph.replay()
