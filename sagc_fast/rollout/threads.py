"""torch's intra-op threads for the length of a call, and what is left of them in a forked process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MAX_THREADS = 1024
"""More than any machine's cores; OpenMP ends the process where it is asked for millions."""

_most_threads = 1
"""That any call of this process has used."""
_has_lost_threads = False
"""Whether this process was forked from one with several threads: OpenMP still counts them, and would wait for ever."""


def _note_fork() -> None:
    global _has_lost_threads
    _has_lost_threads |= max(_most_threads, torch.get_num_threads()) > 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Let torch, and the operators with it, use so many threads inside the block; None: as many as it does already.

    In the fork of a process that had several threads there is one, with a RuntimeWarning.
    """
    global _most_threads
    before = torch.get_num_threads()
    wanted = before if threads is None else threads
    if wanted > 1 and _has_lost_threads:
        warnings.warn(
            "This process is a fork of one that had several threads, and torch would wait for ever for those, which "
            f"did not come along; generate uses 1 thread here. Start processes by spawn, not fork, to use {wanted}.",
            RuntimeWarning,
            stacklevel=4,
        )
        wanted = 1
    _most_threads = max(_most_threads, wanted)
    try:
        if wanted != before:
            torch.set_num_threads(wanted)
        yield
    finally:
        if wanted != before:
            torch.set_num_threads(before)
