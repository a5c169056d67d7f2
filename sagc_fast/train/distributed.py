"""Several processes that train one policy: what they tell each other, and nothing else.

Started by torchrun, every process holds the whole policy and samples its share of the prompts. What was sampled is then
exchanged, so that every process sees the step as a single one would: advantages and the loss's normaliser are those of
the whole step, each process computes its share of the gradient, and the sum is the gradient of the whole step. Rank 0
decides (group size, refills, whether to stop) and writes (metrics, checkpoints).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from sagc_fast.errors import ConfigError

T = TypeVar("T")

TIMEOUT = timedelta(hours=2)
"""Longest that a process waits for the others: a checkpoint of a large model, a rollout of the slowest share (ours)."""


class Processes:
    """The processes of a run. With one, every method returns at once what it was given."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> range:
        """Places, out of ``count``, that are this process's: every ``size``-th."""
        return range(self.rank, count, self.size)

    def from_first(self, value: T) -> T:
        """The ``value`` of rank 0, in every process."""
        if self.size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank, in every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def dealt(self, shares: Sequence[Sequence[T]]) -> list[T]:
        """One list out of what :meth:`gather` returned for lists made by :meth:`share`: the order before sharing."""
        result: list[Any] = [None] * sum(map(len, shares))
        for rank, values in enumerate(shares):
            result[rank :: self.size] = values
        return result

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over the processes; the same bits in all of them."""
        if self.size == 1:
            return
        for work in [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()


ALONE = Processes()


@contextlib.contextmanager
def connected(device: str) -> Iterator[Processes]:
    """Within: the processes that torchrun started (one when it did not), over gloo, and NCCL for tensors on a GPU.

    A group that exists already is used and left open. Raises ConfigError when there are more processes than GPUs.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 and not distributed.is_initialized():
        yield ALONE
        return
    is_ours = not distributed.is_initialized()
    if is_ours:
        backend = "gloo"
        if device.startswith("cuda"):
            torch.cuda.set_device(local_device(device))
            backend = "cpu:gloo,cuda:nccl"
        distributed.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size())
    finally:
        if is_ours:
            distributed.destroy_process_group()


def local_device(device: str) -> str:
    """The device of this process: ``cuda`` is its own GPU of the machine when torchrun started several processes."""
    if device != "cuda" or "LOCAL_RANK" not in os.environ:
        return device
    index, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"torchrun started at least {index + 1} processes on this machine, which has {count} GPUs; "
            "lower --nproc-per-node."
        )
    return f"cuda:{index}"
