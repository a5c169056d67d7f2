"""What users of the controller rely on: its interface, its numbers, its state."""

from __future__ import annotations

import json
import random
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast.controller import SAGC, ControllerWarning, FixedG, SAGCConfig
from sagc_fast.errors import ConfigError


def lognormal(rng: np.random.Generator, num_groups: int, group_size: int, sigma: float) -> np.ndarray:
    return np.ceil(200.0 * np.exp(sigma * rng.standard_normal((num_groups, group_size)))).astype(np.int64)


def test_one_observation_by_hand():
    """Two groups of four at tau=2: ratios 90/15 = 6 (straggles) and 12/10.5 (does not)."""
    config = SAGCConfig(candidates=(4, 8), delta=0.25, eta=2.0, gamma=0.9, start=4, max_length=90)
    controller = SAGC(config)
    controller.observe([[10, 20, 10, 90], [10, 11, 12, 9]])
    state = controller.state_dict()
    assert state["lambda"] == pytest.approx(2.0 * (2 / 4) * (0.5 - 0.25))  # half a step: two groups of four
    assert state["alpha"] == pytest.approx([2.0, 1.0])
    assert state["beta"] == pytest.approx([2.0, 1.0])
    gauges = controller.gauges()
    assert gauges["num_groups"] == 2
    assert gauges["num_straggler_groups"] == 1
    assert gauges["straggler_rate"] == gauges["straggler_rate_ema"] == 0.5
    assert gauges["straggler_ratio_mean"] == pytest.approx((6.0 + 12 / 10.5) / 2)
    assert gauges["straggler_ratio_max"] == pytest.approx(6.0)
    assert gauges["clipped_ratio"] == pytest.approx(1 / 8)
    assert gauges["arms"]["4"]["mean"] == pytest.approx(0.5)
    assert gauges["arms"]["4"]["pulls"] == 1
    controller.observe([])
    assert controller.state_dict()["alpha"] == pytest.approx([1.0 + 0.9 * 1.0, 1.0])  # forgets, learns nothing
    assert controller.gauges()["lambda"] == pytest.approx(0.25)


def test_decide_has_no_side_effect_and_state_is_untouched_by_reading():
    controller = SAGC(SAGCConfig(), seed=5)
    rng = np.random.default_rng(0)
    for _ in range(20):
        before = controller.state_dict()
        choices = {controller.decide() for _ in range(5)}
        controller.gauges()
        assert len(choices) == 1
        assert controller.state_dict() == before
        controller.observe(lognormal(rng, 6, controller.decide(), 0.6))


@given(st.integers(0, 2**64 - 1), st.integers(0, 40), st.sampled_from(["numba", "python"]))
@settings(max_examples=30, deadline=None)
def test_a_controller_resumed_through_json_continues_bit_for_bit(seed, cut, backend):
    config = SAGCConfig(delta=0.8, dwell=2)
    whole, rng = SAGC(config, seed, backend), np.random.default_rng(seed % 1000)
    history = [lognormal(rng, 5, 8, 0.7) for _ in range(60)]
    for lengths in history[:cut]:
        whole.observe(lengths)
    resumed = SAGC(config, 0, backend)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert resumed.decide() == whole.decide()
    for lengths in history[cut:]:
        whole.observe(lengths)
        resumed.observe(lengths)
        assert resumed.decide() == whole.decide()
    assert resumed.state_dict() == whole.state_dict()


def test_a_foreign_state_is_refused():
    controller = SAGC(SAGCConfig(candidates=(4, 8)))
    state = SAGC(SAGCConfig(candidates=(4, 8, 16))).state_dict()
    with pytest.raises(ConfigError, match="candidates"):
        controller.load_state_dict(state)
    with pytest.raises(ConfigError, match="version"):
        controller.load_state_dict({})
    incomplete = {name: value for name, value in controller.state_dict().items() if name != "alpha"}
    with pytest.raises(ConfigError, match="alpha"):
        controller.load_state_dict(incomplete)


def test_all_forms_of_lengths_are_the_same_to_the_controller():
    rng = np.random.default_rng(1)
    array = lognormal(rng, 7, 8, 0.8)
    forms = [
        array,
        array.astype(np.float32),
        array.tolist(),
        tuple(map(tuple, array.tolist())),
        list(array),
        np.asfortranarray(array),
    ]
    states = []
    for form in forms:
        controller = SAGC(SAGCConfig(), seed=3)
        controller.observe(form)
        states.append(controller.state_dict())
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize("lengths", [[1, 2, 3], 5, None, [["a", "b"]], [[[1]], [2]]])
def test_what_is_not_lengths_per_group_is_refused(lengths):
    with pytest.raises(ValueError, match="one sequence of completion lengths per group"):
        SAGC().observe(lengths)


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), None])
@pytest.mark.parametrize("backend", ["numba", "python"])
def test_an_impossible_length_is_refused_and_nothing_is_learnt(bad, backend):
    controller = SAGC(backend=backend)
    controller.observe([[1, 2], [3, 9]])
    before = controller.state_dict()
    with pytest.raises(ValueError, match="negative, infinite or not a number"):
        controller.observe([[1, 2], [3, bad]])
    assert controller.state_dict() == before


DEGENERATE = [
    [[0, 0, 0, 0]],
    [[0, 0, 0, 7]],
    [[5, 5, 5, 5]] * 3,
    [[1]],
    [[]],
    [],
    [[], [3, 4]],
    [[10**9, 1, 1, 1]],
    [[4096] * 4] * 2,
    [[0.5, 0.25, 3.5, 0.125]],
]


@given(
    st.lists(st.sampled_from(DEGENERATE), min_size=1, max_size=40),
    st.floats(1e-6, 1e6),
    st.floats(1e-6, 1e6),
    st.lists(st.integers(2, 200), min_size=1, max_size=6, unique=True).map(sorted),
    st.sampled_from(["group", "any", "batch"]),
    st.sampled_from(["group", "reference"]),
)
@settings(max_examples=60, deadline=None)
def test_no_input_gives_nan_or_an_exception(steps, alpha, beta, candidates, signal, ratio):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ControllerWarning)
        config = SAGCConfig(
            candidates=tuple(candidates), prior_alpha=alpha, prior_beta=beta, signal=signal, ratio=ratio
        )
        controller = SAGC(config, seed=1)
        for lengths in steps:
            controller.observe(lengths)
            assert controller.decide() in candidates
        gauges = controller.gauges()
    text = json.dumps(gauges, allow_nan=False)
    assert "lambda" in text
    assert all(0.0 <= arm["low"] <= arm["high"] <= 1.0 for arm in gauges["arms"].values())


def test_all_completions_at_the_cap_count_as_no_straggler_but_show_in_clipped_ratio():
    controller = SAGC(SAGCConfig(max_length=4096))
    controller.observe([[4096] * 4] * 3)
    assert controller.gauges()["straggler_rate"] == 0.0
    assert controller.gauges()["clipped_ratio"] == 1.0
    controller.observe([[4096] * 4] * 3, num_clipped=6)
    assert controller.gauges()["clipped_ratio"] == 0.5


def test_signals_differ_as_documented():
    """Ratios by group: 3, 1, 1; over the batch of nine: 300 / 100."""
    lengths = [[100, 100, 300], [20, 20, 20], [200, 200, 200]]
    rates = {}
    for signal in ("group", "any", "batch"):
        controller = SAGC(SAGCConfig(signal=signal, tau=2.5))
        controller.observe(lengths)
        rates[signal] = controller.gauges()["straggler_rate"]
    assert rates == {"group": pytest.approx(1 / 3), "any": 1.0, "batch": 1.0}
    controller = SAGC(SAGCConfig(signal="batch", tau=3.5))
    controller.observe(lengths)
    assert controller.gauges()["straggler_rate"] == 0.0


def test_the_reference_ratio_lets_a_group_of_two_straggle():
    own = FixedG(2)
    fair = FixedG(2, ratio="reference")
    for controller in (own, fair):
        controller.observe([[100, 100], [100, 110], [90, 100]])
        controller.observe([[1, 1000], [100, 100]])
    assert own.gauges()["straggler_rate"] == 0.0
    assert fair.gauges()["straggler_rate"] == 0.5


def test_dwell_and_radius_bound_the_moves():
    rng = random.Random(0)
    controller = SAGC(SAGCConfig(candidates=(2, 4, 8, 16, 32), tau=1.5, delta=0.4, dwell=5), seed=2)
    sizes = []
    for _ in range(400):
        sizes.append(controller.decide())
        controller.observe([[rng.lognormvariate(5, 0.6) for _ in range(sizes[-1])] for _ in range(8)])
    changes = [i for i in range(1, len(sizes)) if sizes[i] != sizes[i - 1]]
    assert len(changes) > 10
    assert min(np.diff(changes)) >= 5
    places = [(2, 4, 8, 16, 32).index(size) for size in sizes]
    assert max(abs(np.diff(places))) == 1


def test_observed_counts_teach_the_same_as_lengths_with_those_events():
    by_lengths, by_counts = SAGC(seed=4), SAGC(seed=4)
    for k in (0, 3, 2, 4, 1):
        by_lengths.observe([[1, 1, 1, 9]] * k + [[1, 1, 1, 1]] * (4 - k))
        by_counts.observe_counts(k, 4)
        assert by_lengths.decide() == by_counts.decide()
    with pytest.raises(ValueError, match="5 stragglers of 4"):
        by_counts.observe_counts(5, 4)


@pytest.mark.parametrize("signal", ["any", "batch"])
def test_delta_bounds_the_event_that_was_chosen(signal):
    rng, controller, events = np.random.default_rng(0), SAGC(SAGCConfig(signal=signal, delta=0.6, tau=2.5)), []
    for _ in range(2500):
        controller.observe(lognormal(rng, 3, controller.decide(), 0.5))
        events.append(controller.state_dict()["straggler_rate"])
    assert set(events) == {0.0, 1.0}
    assert np.mean(events) == pytest.approx(0.6, abs=0.02)


def test_counts_follow_the_signal_too():
    by_lengths, by_counts = (SAGC(SAGCConfig(signal="any"), seed=2) for _ in range(2))
    for k in (0, 3, 0, 1):
        by_lengths.observe([[1, 1, 1, 9]] * k + [[1, 1, 1, 1]] * (4 - k))
        by_counts.observe_counts(k, 4)
        assert by_lengths.decide() == by_counts.decide()
        assert by_counts.gauges()["num_straggler_groups"] == k
    with pytest.raises(ValueError, match="batch"):
        SAGC(SAGCConfig(signal="batch")).observe_counts(1, 2)


def test_the_trainer_is_told_prompts_and_scale_of_the_next_step():
    controller = SAGC(SAGCConfig(candidates=(4, 8), start=8, hold="tokens", adv_scale="loo"))
    with pytest.raises(ConfigError, match="mean_length"):
        controller.num_prompts(8000)
    assert controller.num_prompts(8000, mean_length=100) == 10
    assert controller.advantage_scale() == pytest.approx(8 / 7)
    controller.observe([[50] * 8])
    assert controller.num_prompts(8000) == round(8000 / (controller.decide() * 50))


def test_fixed_g_measures_like_sagc_and_never_moves():
    fixed = FixedG(4)
    for _ in range(50):
        assert fixed.decide() == 4
        fixed.observe([[10, 10, 10, 90], [10, 10, 10, 10]])
    gauges = fixed.gauges()
    assert gauges["controller"] == "fixed"
    assert gauges["straggler_rate_ema"] == pytest.approx(0.5)
    assert "arms" not in gauges
    twin = FixedG(4)
    twin.load_state_dict(json.loads(json.dumps(fixed.state_dict())))
    assert twin.state_dict() == fixed.state_dict()


def test_a_bad_seed_or_backend_is_refused():
    with pytest.raises(ConfigError, match="seed"):
        SAGC(seed=-1)
    with pytest.raises(ConfigError, match="backend"):
        SAGC(backend="torch")
