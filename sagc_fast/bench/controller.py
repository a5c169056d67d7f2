"""``sagc-fast bench controller``: what choosing G costs a training step, and how fast it can be simulated."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from sagc_fast.bench.clock import timed
from sagc_fast.bench.record import metric, new_record, result
from sagc_fast.controller import SAGC, SAGCConfig
from sagc_fast.controller.fast import simulate_events

DELTA, SIGMA = 0.4, 0.3
"""Goal, and spread of the lognormal lengths that are observed: G = 4 keeps within the goal, G = 16 does not."""
RATES = np.array([[0.23, 0.47, 0.73]])
"""Straggler probabilities of G = 4, 8, 16 in the simulation."""
STEPS = {False: 1_000_000, True: 100_000}
"""Simulated steps, by whether the run is a quick one."""
CALLS = 500
"""Calls per timed batch of a microsecond's work."""
FRESH = """
import time; start = time.perf_counter()
from sagc_fast.controller import SAGC
controller = SAGC(); controller.decide(); decided = time.perf_counter()
controller.observe([[1, 2, 3, 9]]); controller.decide()
print(decided - start, time.perf_counter() - start)
"""


def run(runs: int, is_quick: bool, label: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Metrics in microseconds (observe and decide), seconds (a simulation) and seconds (a fresh process)."""
    steps = STEPS[is_quick]
    record = new_record("controller", {"delta": DELTA, "simulated_steps": steps}, 1, label)
    config, controller = SAGCConfig(delta=DELTA), SAGC(SAGCConfig(delta=DELTA))
    twin = SAGC(SAGCConfig(delta=DELTA), backend="python")
    for num_groups, size in ((8, 8), (16, 16)):
        say(f"observe and decide, {num_groups} groups of {size}")
        array = _lengths(num_groups, size)
        for form, lengths in (("array", array), ("lists", array.tolist())):
            values = _microseconds(lambda lengths=lengths: (controller.observe(lengths), controller.decide()), runs)
            record["results"].append(
                result(f"observe + decide, {num_groups} x {size} lengths, {form}", {"time": _us(values)})
            )
    values = _microseconds(lambda: (twin.observe(_lengths(16, 16).tolist()), twin.decide()), runs, CALLS // 10)
    record["results"].append(result("plain-Python twin, 16 x 16 lengths, lists", {"time": _us(values, False)}))
    values = _microseconds(lambda: (controller.observe_counts(3, 16), controller.decide()), runs)
    record["results"].append(result("observe counts + decide", {"time": _us(values)}))
    say(f"{steps:,} simulated steps")
    simulate_events(config, RATES, 10, 16)  # compiles, or loads from the disk cache
    values = [timed(lambda: simulate_events(config, RATES, steps, 16)).cpu_seconds for _ in range(runs)]
    record["results"].append(
        result(f"{steps:,} simulated steps of 16 groups", {"time": metric(values, "s", "lower", True)})
    )
    say("fresh processes")
    fresh = np.array([_fresh_process() for _ in range(runs + 1)])[1:]  # the first fills the disk cache
    for place, name in enumerate(("import to first decision", "import to first observation")):
        record["results"].append(result(name, {"time": metric(fresh[:, place].tolist(), "s", "lower", False)}))
    return record


def _lengths(num_groups: int, group_size: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.ceil(200.0 * np.exp(SIGMA * rng.standard_normal((num_groups, group_size)))).astype(np.int64)


def _microseconds(call: Callable[[], object], runs: int, calls: int = CALLS) -> list[float]:
    """CPU microseconds per call, one value per batch of ``calls``; the first call, which compiles, apart."""

    def batch() -> None:
        for _ in range(calls):
            call()

    call()
    return [timed(batch).cpu_seconds * 1e6 / calls for _ in range(runs)]


def _us(values: list[float], is_primary: bool = True) -> dict[str, Any]:
    return metric(values, "us", "lower", is_primary)


def _fresh_process() -> list[float]:
    """Wall seconds from a new interpreter's first import to the first decision, and to the first observation."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    return [float(part) for part in done.stdout.split()]
