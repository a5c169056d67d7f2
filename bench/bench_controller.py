"""Microbenchmarks of the controller: pytest bench/bench_controller.py --benchmark-only, or `sagc-fast bench controller`

Budgets (docs/controller.md): observe + decide 5 us after compilation, a million simulated steps 2 s on one core, import
to first decision 2 s. Run on a calm machine; the best round counts, the others measure the neighbours.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sagc_fast.controller import SAGC, SAGCConfig
from sagc_fast.controller.fast import simulate_events

RATES = np.array([[0.23, 0.47, 0.73]])


def lengths_of(num_groups: int, group_size: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.ceil(200.0 * np.exp(0.5 * rng.standard_normal((num_groups, group_size)))).astype(np.int64)


@pytest.mark.parametrize("form", ["array", "lists"])
@pytest.mark.parametrize(("num_groups", "group_size"), [(1, 8), (8, 8), (16, 16), (64, 16)])
def test_observe_and_decide(benchmark, form, num_groups, group_size):
    controller = SAGC(SAGCConfig(delta=0.4))
    lengths = lengths_of(num_groups, group_size)
    lengths = lengths if form == "array" else lengths.tolist()

    def step() -> int:
        controller.observe(lengths)
        return controller.decide()

    step()  # compiles
    benchmark.pedantic(step, rounds=200, iterations=500)


def test_observe_counts_and_decide(benchmark):
    """From summaries: the controller's own work without the lengths."""
    controller = SAGC(SAGCConfig(delta=0.4))

    def step() -> int:
        controller.observe_counts(3, 16)
        return controller.decide()

    step()
    benchmark.pedantic(step, rounds=200, iterations=500)


def test_plain_python_twin(benchmark):
    controller = SAGC(SAGCConfig(delta=0.4), backend="python")
    lengths = lengths_of(16, 16).tolist()
    benchmark.pedantic(lambda: controller.observe(lengths), rounds=50, iterations=20)


@pytest.mark.parametrize("num_groups", [1, 16, 64])
def test_a_million_simulated_steps(benchmark, num_groups):
    config = SAGCConfig(delta=0.4)
    simulate_events(config, RATES, 10, num_groups)  # compiles
    benchmark.pedantic(lambda: simulate_events(config, RATES, 1_000_000, num_groups), rounds=5, iterations=1)


def test_import_to_first_decision(benchmark):
    """A fresh process: import, construct, decide (no numba); then the first observation, numba from the disk cache."""
    code = """
import time; start = time.perf_counter()
from sagc_fast.controller import SAGC
controller = SAGC(); controller.decide(); decided = time.perf_counter()
controller.observe([[1, 2, 3, 9]]); controller.decide()
print(decided - start, time.perf_counter() - start)
"""
    seconds: list[list[float]] = []

    def fresh_process() -> None:
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        seconds.append([float(part) for part in output.split()])

    fresh_process()  # fills the disk cache
    benchmark.pedantic(fresh_process, rounds=5, iterations=1)
    decided, observed = np.array(seconds[1:]).min(axis=0)
    benchmark.extra_info["import_to_first_decision_seconds"] = round(decided, 3)
    benchmark.extra_info["import_to_first_observation_seconds"] = round(observed, 3)
