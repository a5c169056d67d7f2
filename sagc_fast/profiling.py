"""Names for the phases of a run, seen by profilers: NVTX ranges under Nsight, record_function under torch.profiler.

    @ranged("rollout")
    def sample(self): ...

    with annotate("backward"):
        loss.backward()

Off by default, and then a range costs one look at a global. ``sagc-fast profile`` switches them on; so does the
environment variable SAGC_NVTX=1, for a profiler that you start yourself. docs/profiling.md lists the names.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

P, R = ParamSpec("P"), TypeVar("R")

NVTX_VARIABLE = "SAGC_NVTX"
WINDOW_VARIABLE = "SAGC_NVTX_STEPS"
"""SKIP:COUNT with SAGC_NVTX=1: the CUDA profiler is started after SKIP optimizer steps and stopped COUNT later."""
PREFIX = "sagc:"
"""Before every name in a trace, to find ours among torch's. No slash: Nsight Compute reads one as nesting."""
STEP = "step"
"""The range of one optimizer step; windows are counted in it."""

_NOTHING: AbstractContextManager[None] = nullcontext()
_make: Callable[[str], AbstractContextManager[None]] | None = None


def annotate(name: str) -> AbstractContextManager[None]:
    """A context manager that marks its block as the phase ``name``; nothing while profiling is off."""
    return _NOTHING if _make is None else _make(name)


def ranged(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark every call of a function as the phase ``name``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def marked(*args: P.args, **kwargs: P.kwargs) -> R:
            if _make is None:
                return function(*args, **kwargs)
            with _make(name):
                return function(*args, **kwargs)

        return marked

    return decorate


@dataclass
class Phase:
    """Calls and wall-clock seconds of one range, by its place in the nesting."""

    calls: int = 0
    seconds: float = 0.0
    children: dict[str, Phase] = field(default_factory=dict)

    def rows(self, depth: int = 0) -> Iterator[tuple[int, str, Phase, Phase]]:
        """(depth, name, phase, parent) of everything below, in the order of first entry."""
        for name, child in self.children.items():
            yield depth, name, child, self
            yield from child.rows(depth + 1)


class Recorder:
    """Times ranges by nesting, and marks them with ``mark`` for the profiler that looks on.

    Args:
        mark: makes the profiler's own context manager for a name.
        skip_steps, num_steps: the window in optimizer steps; None records everything from the start.
        on_start, on_stop: called where the window opens and closes, to switch the profiler on and off.
    """

    def __init__(
        self,
        mark: Callable[[str], AbstractContextManager[Any]],
        skip_steps: int = 0,
        num_steps: int | None = None,
        on_start: Callable[[], Any] = lambda: None,
        on_stop: Callable[[], Any] = lambda: None,
    ) -> None:
        self._mark = mark
        self._first, self._num_steps = skip_steps, num_steps
        self._on_start, self._on_stop = on_start, on_stop
        self.root = Phase()
        self._stack = [self.root]
        self._steps_seen = 0
        self.is_recording = False

    def open(self) -> None:
        """Begin to record, now rather than at a step."""
        if not self.is_recording:
            self.is_recording = True
            self._on_start()

    def shut(self) -> None:
        """End recording; does nothing when it has ended."""
        if self.is_recording:
            self.is_recording = False
            self._on_stop()

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """One range: counted when the window is open at its beginning."""
        is_step = name == STEP and self._num_steps is not None
        if is_step:
            if self._steps_seen == self._first:
                self.open()
            self._steps_seen += 1
        if not self.is_recording:
            yield
            return
        phase = self._stack[-1].children.setdefault(name, Phase())
        self._stack.append(phase)
        started = time.perf_counter()
        try:
            with self._mark(PREFIX + name):
                yield
        finally:
            phase.calls += 1
            phase.seconds += time.perf_counter() - started
            self._stack.pop()
            if is_step and self._steps_seen == self._first + self._num_steps:
                self.shut()


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Every range goes to ``recorder`` within the block."""
    global _make
    before, _make = _make, recorder.range
    try:
        yield recorder
    finally:
        recorder.shut()
        _make = before


def nvtx_mark() -> Callable[[str], AbstractContextManager[Any]]:
    """The maker of NVTX ranges: torch's on a CUDA build, else the ``nvtx`` package's, else nothing.

    torch.cuda.nvtx raises on CPU builds, and ranges must not.
    """
    import torch

    if torch.version.cuda is not None:
        return torch.cuda.nvtx.range
    try:
        from nvtx import annotate as nvtx_annotate
    except ImportError:
        return lambda name: nullcontext()
    return nvtx_annotate


def _nvtx_range(name: str) -> AbstractContextManager[Any]:
    """The first range of a process that was started with SAGC_NVTX=1: torch is looked for here, not on import."""
    global _make
    mark = nvtx_mark()
    window = os.environ.get(WINDOW_VARIABLE)
    if window:
        import torch

        skip, count = map(int, window.split(":"))
        cuda = torch.cuda.profiler
        _make = Recorder(mark, skip, count, cuda.start, cuda.stop).range
    else:
        _make = lambda name: mark(PREFIX + name)  # noqa: E731
    return _make(name)


if os.environ.get(NVTX_VARIABLE, "0") not in ("", "0"):
    _make = _nvtx_range
