"""Wall and CPU seconds, and runs of several candidates in turn. Standard library only.

On a machine with other work, CPU seconds say what a computation costs, wall seconds what its neighbours cost it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Elapsed:
    """Seconds of one call; CPU seconds of all threads of this process."""

    wall_seconds: float
    cpu_seconds: float


def timed(call: Callable[[], object]) -> Elapsed:
    """Run ``call`` once."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Elapsed(time.perf_counter() - wall, time.process_time() - cpu)


def alternate(candidates: Mapping[str, Callable[[], object]], runs: int, warmups: int = 1) -> dict[str, list[Elapsed]]:
    """``runs`` timed calls of each candidate, one of each in turn, so that the machine's drift hits all alike.

    Every second turn goes in reverse order, so that none always follows the same neighbour.
    """
    names = list(candidates)
    for _ in range(warmups):
        for name in names:
            candidates[name]()
    measured: dict[str, list[Elapsed]] = {name: [] for name in names}
    for turn in range(runs):
        for name in names if turn % 2 == 0 else reversed(names):
            measured[name].append(timed(candidates[name]))
    return measured
