"""Ceilings: rates are work over the best time, and no implementation among those compared multiplies wrongly."""

from __future__ import annotations

import pytest
import torch

from sagc_fast.bench import ceilings
from sagc_fast.bench.clock import Elapsed, alternate


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-4), ("bf16", 0.5)])
def test_every_way_to_multiply_gives_the_product(dtype, bound):
    torch.manual_seed(0)
    results = [call().float() for call in ceilings._products(7, 24, 32, dtype)]
    assert len(results) >= 3
    assert all((result - results[0]).abs().max() < bound for result in results)
    assert results[0].shape == (7, 24)


def test_a_rate_is_work_over_the_shortest_time(monkeypatch):
    times = iter([Elapsed(2.0, 1.0), Elapsed(4.0, 0.5)])
    monkeypatch.setattr(ceilings, "timed", lambda call: next(times))
    assert ceilings._rate(lambda: None, 8.0, repeats=2) == ceilings.Rate(4.0, 16.0)


def test_a_forward_pass_counts_every_shape_as_often_as_it_multiplies(monkeypatch):
    """Two products at 100 and one at 50 operations a second: 3 x equal work in 2/100 + 1/50 of it."""
    rates = {(8, 4): 100.0, (4, 8): 50.0}
    monkeypatch.setattr(ceilings, "_products", lambda rows, n, k, dtype: [(n, k)])
    monkeypatch.setattr(ceilings, "_rate", lambda call, work, repeats: ceilings.Rate(rates[call], rates[call]))
    rate = ceilings.gemm_rate([((8, 4), 2), ((4, 8), 1)], "fp32", rows=1)
    assert rate.per_wall_second == pytest.approx(3 / (2 / 100 + 1 / 50))


def test_measured_ceilings_are_positive_and_name_their_shapes():
    found = ceilings.measure_ceilings([((8, 4), 1)], ("fp32", "bf16"), rows=2, num_bytes=2**16, repeats=1).to_dict()
    assert found["read_bytes"]["per_wall_second"] > 0
    assert set(found["gemm_flops"]) == {"fp32", "bf16"}
    assert found["shapes"] == [[8, 4]]


def test_candidates_run_in_turn_and_every_second_turn_backwards():
    order: list[str] = []
    times = alternate({name: lambda name=name: order.append(name) for name in "ab"}, runs=2, warmups=1)
    assert order == ["a", "b", "a", "b", "b", "a"]
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}
