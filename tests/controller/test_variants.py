"""Beyond the paper: what each variant is for, shown on lengths where it matters."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from sagc_fast.controller import SAGC, ControllerWarning, FixedG, SAGCConfig
from sagc_fast.controller.cost_aware import CostAwareConfig, CostAwareSAGC, SecondsFit
from sagc_fast.controller.costs import CostModel, Difficulties
from sagc_fast.controller.explorers import UCB, EpsilonGreedy, best_mixture
from sagc_fast.controller.processes import Difficulty, LengthProcess, Mixture
from sagc_fast.controller.prompt_aware import PromptAwareSAGC
from sagc_fast.controller.simulate import Scenario, run_policy
from sagc_fast.errors import ConfigError


def test_prompt_awareness_buys_larger_groups_at_the_same_straggler_rate():
    process = Difficulty(sigma=0.5, spread_sigma=0.6, num_problems=48)
    scenario = Scenario(process, steps=300, num_prompts=12)
    config = SAGCConfig(delta=0.35)
    blind = run_policy("sagc", SAGC(config), scenario)
    aware = run_policy("prompt-aware", PromptAwareSAGC(config), scenario)
    for record in (blind, aware):
        assert record.straggler_rate[100:].mean() == pytest.approx(0.35, abs=0.03)
    assert aware.log2_group_size[100:].mean() > blind.log2_group_size[100:].mean() + 0.15


def test_a_prompt_without_history_is_the_global_arm_and_history_tells_prompts_apart():
    controller = PromptAwareSAGC(SAGCConfig(delta=0.3, lambda_0=5.0, radius=2))
    assert controller.decide_groups(["new", "also new"]) == [controller.decide()] * 2
    calm, wild = [50] * 8, [10, 10, 10, 10, 10, 10, 10, 900]
    for _ in range(25):
        controller.observe([calm, wild], problem_ids=["calm", "wild"])
    first = controller.decide_groups(["calm", "wild", "new"])
    assert first == controller.decide_groups(["calm", "wild", "new"])  # no side effect
    assert first[0] > first[1]
    assert first[2] == controller.decide()


def test_a_group_teaches_every_smaller_size():
    """[1, 1, 1, 9] straggles at 4, [1, 1, 1, 1] does not; together, median 1 and max 9, they straggle at 8."""
    controller = PromptAwareSAGC(SAGCConfig(candidates=(4, 8), gamma=1.0))
    controller.observe([[1, 1, 1, 9, 1, 1, 1, 1]], problem_ids=[0])
    state = controller.state_dict()
    assert state["alpha"] == pytest.approx([2.0, 2.0])
    assert state["beta"] == pytest.approx([2.0, 1.0])


def test_prompt_aware_resumes_through_json_and_refuses_other_states():
    scenario = Scenario(Difficulty(num_problems=8), steps=20, num_prompts=4)
    first, second = PromptAwareSAGC(SAGCConfig(), seed=1), PromptAwareSAGC(SAGCConfig())
    run_policy("a", first, scenario)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    ids = list(range(8))
    assert first.decide_groups(ids) == second.decide_groups(ids)
    first.observe([[4, 5]] * 8, problem_ids=ids)
    second.observe([[4, 5]] * 8, problem_ids=ids)
    assert first.state_dict() == second.state_dict()
    with pytest.raises(ConfigError, match="buckets"):
        second.load_state_dict(SAGC().state_dict())
    with pytest.raises(ValueError, match="problem_ids"):
        second.observe([[1, 2]])
    with pytest.raises(ConfigError, match="own group"):
        PromptAwareSAGC(SAGCConfig(signal="any"))


@pytest.mark.parametrize("lengths", [[[0, 0]], [[1]], [[]], [[7, 7, 7, 7]], [[1, 1, 1, 10**9]]])
def test_prompt_aware_survives_degenerate_lengths(lengths):
    controller = PromptAwareSAGC(SAGCConfig(prior_alpha=1e-3, prior_beta=1e-3))
    for _ in range(30):
        controller.observe(lengths, problem_ids=["x"])
        assert controller.decide_groups(["x", "y"])[0] in (4, 8, 16)
    json.dumps(controller.gauges(), allow_nan=False)


def test_the_cost_fit_recovers_the_engine_and_its_predictions_come_true():
    costs = CostModel(iteration_seconds=0.02, row_seconds=1e-5, update_token_seconds=2e-5, fixed_seconds=3.0)
    controller = CostAwareSAGC(CostAwareConfig())
    scenario = Scenario(LengthProcess(sigma=0.7), steps=150, num_prompts=8, costs=costs)
    record = run_policy("cost-aware", controller, scenario)
    gauges = controller.gauges()
    assert gauges["iteration_seconds"] == pytest.approx(0.02, rel=0.05)
    assert gauges["token_seconds"] == pytest.approx(3e-5, rel=0.25)
    played = record.group_size == record.group_size[-1]
    predicted = controller.predicted_seconds(8 * record.group_size[-1])
    assert predicted == pytest.approx(record.continuous_seconds[played].mean(), rel=0.1)


def test_steps_that_drafts_save_are_not_taken_for_cheap_ones():
    """Half the steps of the longest completion, in one step of training and not in the next: the cost of a step is the
    same, and what is predicted follows the share of steps saved lately."""
    rng = np.random.default_rng(0)
    told, guessing = CostAwareSAGC(), CostAwareSAGC()
    for _ in range(300):
        lengths = rng.integers(20, 400, size=(8, 8))
        steps = int(lengths.max() * rng.uniform(0.4, 0.8))
        seconds = 1.0 + 0.05 * steps
        told.observe(lengths, seconds=seconds, num_steps=steps)
        guessing.observe(lengths, seconds=seconds)
    assert told.gauges()["iteration_seconds"] == pytest.approx(0.05, rel=0.02)
    assert guessing.gauges()["iteration_seconds"] < 0.04
    assert told.predicted_seconds(64) == pytest.approx(1.0 + 0.05 * 0.6 * 390, rel=0.1)


def test_cost_awareness_chooses_what_is_best_per_second():
    """Where tokens are free but iterations dear, large groups win; where every token costs, small ones do."""
    for costs, best in (
        (CostModel(iteration_seconds=0.05, row_seconds=0.0, update_token_seconds=0.0), 16),
        (CostModel(iteration_seconds=0.0, row_seconds=1e-3, update_token_seconds=0.0, fixed_seconds=0.0), 4),
    ):
        scenario = Scenario(LengthProcess(sigma=0.5), steps=60, num_prompts=8, costs=costs)
        controller = CostAwareSAGC(CostAwareConfig(utility="informative"))
        cost_aware = run_policy("cost-aware", controller, scenario)
        gain = cost_aware.informative_groups[20:].sum() / cost_aware.continuous_seconds[20:].sum()
        assert controller.decide() == best
        for size in (4, 8, 16):
            fixed = run_policy("fixed", FixedG(size), scenario)
            assert gain >= 0.97 * fixed.informative_groups[20:].sum() / fixed.continuous_seconds[20:].sum()


def test_seconds_fit_keeps_the_guess_where_steps_cannot_tell_and_stays_positive():
    fit = SecondsFit(np.array([1.0, 0.01, 0.001]), 0.98)
    for _ in range(50):
        fit.add(np.array([1.0, 100.0, 1000.0]), 6.0)
    assert fit.coefficients @ [1.0, 100.0, 1000.0] == pytest.approx(6.0, rel=1e-6)
    assert fit.coefficients == pytest.approx([2.0, 0.02, 0.002], rel=0.01)
    rng = np.random.default_rng(0)
    for _ in range(200):
        longest = rng.uniform(50, 500)
        fit.add(np.array([1.0, longest, rng.uniform(1e3, 1e4)]), 0.5 + 0.03 * longest)
    assert (fit.coefficients >= 0.0).all()
    assert fit.coefficients[1] == pytest.approx(0.03, rel=0.1)
    for nonsense in (0.0, -1.0, float("nan"), float("inf")):
        before = fit.coefficients.copy()
        fit.add(np.array([1.0, 1.0, 1.0]), nonsense)
        assert (fit.coefficients == before).all()


def test_cost_aware_resumes_through_json_and_survives_degenerate_lengths():
    first, second = CostAwareSAGC(), CostAwareSAGC()
    for lengths in ([[0, 0]], [[1]], [[]], [], [[5, 5, 5, 5]], [[1, 10**9]]):
        first.observe(lengths, seconds=1.0)
        assert first.decide() in (4, 8, 16)
    json.dumps(first.gauges(), allow_nan=False)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for controller in (first, second):
        controller.observe([[10, 30, 20, 40]] * 4, seconds=2.0, num_steps=31)
    assert first.state_dict() == second.state_dict()
    with pytest.raises(ConfigError, match="candidates"):
        CostAwareSAGC(CostAwareConfig(candidates=(2, 3))).load_state_dict(first.state_dict())
    with pytest.raises(ConfigError, match="utility"):
        CostAwareConfig(utility="G")


def test_the_fair_ratio_removes_the_small_group_artefact():
    """Same lengths: the group's own ratio makes G=2 spotless, the reference shows what its completions really do."""
    process = Mixture(median=200, sigma=0.2, long=1500, share=0.2)
    rng = np.random.default_rng(0)
    own, fair = FixedG(2), FixedG(2, ratio="reference")
    rates = {"own": [], "fair": []}
    for _ in range(200):
        lengths = process.sample(rng, 0.0, np.arange(32), 2)
        for name, controller in (("own", own), ("fair", fair)):
            controller.observe(lengths)
            rates[name].append(controller.gauges()["straggler_rate"])
    assert max(rates["own"]) == 0.0
    assert np.mean(rates["fair"]) == pytest.approx(1 - 0.8**2, abs=0.02)  # either completion is a long one


@pytest.mark.parametrize("explorer", [EpsilonGreedy, UCB])
def test_other_explorers_hold_delta_too_and_resume(explorer):
    scenario = Scenario(LengthProcess(sigma=0.5), steps=400, num_prompts=16)
    policy = explorer(SAGCConfig(delta=0.4), seed=3)
    record = run_policy("explorer", policy, scenario)
    assert record.straggler_rate[100:].mean() == pytest.approx(0.4, abs=0.03)
    twin = explorer(SAGCConfig(delta=0.4), seed=0)
    twin.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    for _ in range(20):
        policy.observe([[1, 2, 1, 9]] * 4)
        twin.observe([[1, 2, 1, 9]] * 4)
        assert policy.decide() == twin.decide()
    with pytest.raises(ConfigError, match="must be"):
        explorer(SAGCConfig(), 0, -0.5)


def test_the_oracle_mixes_two_arms_to_spend_the_budget_exactly():
    mixture = best_mixture([2.0, 3.0, 4.0], [0.2, 0.5, 0.7], 0.4)
    assert mixture["weights"] == pytest.approx([0.6, 0.0, 0.4])  # 4 and 16 beat 4 and 8: 2.8 over 2.67
    assert mixture["rate"] == pytest.approx(0.4)
    assert mixture["utility"] == pytest.approx(2.8)
    assert best_mixture([2.0, 3.0], [0.5, 0.9], 0.4) == {
        "weights": [1.0, 0.0],
        "utility": 2.0,
        "rate": 0.5,
        "is_feasible": False,
    }
    assert best_mixture([2.0, 3.0], [0.1, 0.2], 0.4)["weights"] == [0.0, 1.0]


def test_informative_share_of_uniform_difficulties_is_known():
    """E[1 - p^G - (1-p)^G] = 1 - 2 / (G + 1) for uniform p."""
    for size in (2, 4, 16):
        assert Difficulties(1.0, 1.0).informative_share(size) == pytest.approx(1 - 2 / (size + 1))


def test_variants_are_off_by_default():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ControllerWarning)
        config = SAGCConfig()
    assert (config.ratio, config.signal, config.dwell, config.hold, config.adv_scale) == (
        "group",
        "group",
        1,
        "prompts",
        "none",
    )
