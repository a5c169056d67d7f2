"""A device made of CPU tensors and queues: runs the graph runner without a GPU and refuses what a GPU would not do.

Streams are queues. With ``lag="late"`` nothing that is queued runs before somebody waits for it, as on a device that is
slower than the host; a host buffer that is overwritten too early, or a copy that does not wait for the work before it,
then yields wrong tokens. With ``lag="early"`` everything runs at once.

A graph is a tape of operators with the very tensors of the capture. A replay runs the tape, not the Python behind it,
so a number that the host computed during the capture stays what it was, as on a GPU. Capturing leaves memory as it
was. :class:`GraphRuleError` says which rule of a CUDA graph the step has broken.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from sagc_fast.rollout.device import DeviceCounts

HOST_READS = frozenset(
    {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}
)
"""Methods of a tensor that wait for its values."""
FROM_HOST = frozenset({"tensor", "as_tensor", "from_numpy", "frombuffer", "scalar_tensor"})
"""Functions that make a tensor of the host's numbers: on a GPU a copy from memory that is gone at replay."""
SIZED_BY_VALUES = frozenset(
    {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal"}
)
"""Operators that wait for values, to size their result or to answer the host."""

Operation = tuple[Callable[..., Any], tuple, dict[str, Any], list[torch.Tensor]]


class GraphRuleError(AssertionError):
    """What was captured or replayed would fail, or silently do something else, on a GPU."""


class StandInEvent:
    """A point in a queue."""

    def __init__(self, stream: _Stream) -> None:
        self.stream = stream
        self.passed_at: float | None = None


class _Stream:
    """Work in the order in which it was queued."""

    def __init__(self, is_late: bool) -> None:
        self._queue: deque[Callable[[], None] | StandInEvent] = deque()
        self._is_late = is_late

    def put(self, work: Callable[[], None] | StandInEvent) -> None:
        self._queue.append(work)
        if not self._is_late:
            self.run()

    def run(self, until: StandInEvent | None = None) -> None:
        """Everything, or what lies before the event."""
        while self._queue and not (until is not None and until.passed_at is not None):
            work = self._queue.popleft()
            if isinstance(work, StandInEvent):
                work.passed_at = time.perf_counter()
            else:
                work()


class StandInGraph:
    """Operators with their arguments and results, and where the memory was that they found."""

    def __init__(
        self, operations: list[Operation], memory: Sequence[torch.Tensor], beside: StandInGraph | None
    ) -> None:
        self.beside = beside
        self._operations = operations
        self._memory = [(tensor, tensor.data_ptr()) for tensor in memory]

    @torch.inference_mode()
    def run(self) -> None:
        for function, args, kwargs, results in self._operations:
            found = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for result, again in zip(results, found, strict=True):
                if result.data_ptr() != again.data_ptr():
                    result.copy_(again)

    def check_addresses(self) -> None:
        for index, (tensor, address) in enumerate(self._memory):
            if tensor.data_ptr() != address:
                raise GraphRuleError(
                    f"A graph is replayed whose memory has moved (tensor {index} of shape {list(tensor.shape)}); a GPU "
                    "would go on with the old memory. Capture it anew."
                )


class StandInDevice:
    """See the module; the methods are those of :class:`sagc_fast.rollout.device.Device`."""

    def __init__(self, lag: Literal["late", "early"] = "late") -> None:
        self.torch_device = torch.device("cpu")
        self.counts = DeviceCounts()
        self._compute, self._copy = _Stream(lag == "late"), _Stream(lag == "late")
        self._tape: _Tape | None = None

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    @contextmanager
    def eager(self) -> Iterator[None]:
        self._compute.run()
        yield

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._compute.put(lambda: target.copy_(source))

    def record(self) -> StandInEvent:
        event = StandInEvent(self._compute)
        self._compute.put(event)
        return event

    def download(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], after: StandInEvent) -> StandInEvent:
        self._copy.put(lambda: after.stream.run(after))
        for target, source in pairs:
            self._copy.put(lambda target=target, source=source: target.copy_(source))
        event = StandInEvent(self._copy)
        self._copy.put(event)
        return event

    def wait(self, event: StandInEvent) -> None:
        self.counts.waits += 1
        event.stream.run(event)

    def seconds_between(self, first: StandInEvent, second: StandInEvent) -> float:
        if first.passed_at is None or second.passed_at is None:
            raise GraphRuleError("The time of an event is asked for that the device has not come to.")
        return second.passed_at - first.passed_at

    def capture(
        self,
        step: Callable[[], None],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        beside: StandInGraph | None = None,
    ) -> StandInGraph:
        self.counts.captures += 1
        self._compute.run()
        step()
        before = [tensor.clone() for tensor in writes]
        self._tape = _Tape([*reads, *writes])
        try:
            with _NoHostReads(), self._tape:
                step()
        finally:
            operations, self._tape = self._tape.operations, None
            for tensor, value in zip(writes, before, strict=True):
                tensor.copy_(value)
        return StandInGraph(operations, [*reads, *writes], beside)

    def replay(self, graph: StandInGraph) -> None:
        self.counts.replays += 1
        graph.check_addresses()
        self._compute.put(graph.run)

    def launch(self, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run something that torch does not see, such as an interpreted Triton kernel, and tape it in a capture."""
        if self._tape is None:
            function(*args, **kwargs)
            return
        self._tape.add(function, args, kwargs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # what it does inside is its own affair
            function(*args, **kwargs)


class _NoHostReads(TorchFunctionMode):
    """Refuses what waits for the device, or brings numbers from the host, by its name in Python."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_READS:
            raise GraphRuleError(f"Tensor.{name} in a captured step: the host would wait for a value of the device.")
        if name in FROM_HOST:
            raise GraphRuleError(f"torch.{name} in a captured step: its numbers would come from the host.")
        return func(*args, **(kwargs or {}))


class _Tape(TorchDispatchMode):
    """Writes operators down and checks the memory that each of them finds."""

    def __init__(self, memory: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._known = {_storage(tensor) for tensor in memory}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        inputs = self._check_inputs(name, args, kwargs)
        if name == "_local_scalar_dense":
            raise GraphRuleError("A value is read in a captured step: the host would wait for the device.")
        counts_are_values = name == "repeat_interleave" and "Tensor" in func._schema.overload_name
        if name in SIZED_BY_VALUES or (counts_are_values and kwargs.get("output_size") is None):
            raise GraphRuleError(f"{name} in a captured step waits for values.")
        if name.startswith("index") and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1:2])):
            raise GraphRuleError(f"{name} with a mask in a captured step: the size of its result depends on values.")
        out = func(*args, **kwargs)
        results = _tensors(out)
        self._known.update(_storage(tensor) for tensor in results)
        is_view = results and not func._schema.is_mutable and all(_storage(r) in inputs for r in results)
        if not is_view:
            self.operations.append((func, args, kwargs, results))
        return out

    def add(self, function: Callable[..., None], args: tuple, kwargs: dict[str, Any]) -> None:
        """Something that is not an operator; it returns nothing."""
        self._check_inputs(getattr(function, "__name__", "launch"), args, kwargs)
        self.operations.append((function, args, kwargs, []))

    def _check_inputs(self, name: str, args: tuple, kwargs: dict[str, Any]) -> set[int]:
        tensors = [tensor for tensor in _tensors((args, kwargs)) if tensor.numel()]
        for tensor in tensors:
            if _storage(tensor) not in self._known:
                raise GraphRuleError(
                    f"{name} in a captured step finds a tensor of shape {list(tensor.shape)} that is neither declared "
                    "nor made in the step; its memory may be anything at replay."
                )
        return {_storage(tensor) for tensor in tensors}


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
