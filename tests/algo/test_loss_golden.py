"""The loss against numbers worked out by hand, one algorithm at a time.

The batch of all of them: completion 0 has two tokens and A = +1, completion 1 has one token and A = -2.
Ratios r = pi / pi_old are 1.5, 0.9 and 0.5: log-probs are log r + old, with old = -1 everywhere.
"""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch

from sagc_fast.algo.advantage import group_advantages
from sagc_fast.algo.config import CISPO, DAPO, DR_GRPO, GRPO, GSPO, LossConfig, make_algorithm
from sagc_fast.algo.loss import loss_normalizer, policy_loss
from sagc_fast.errors import ConfigError

OLD = torch.full((3,), -1.0, dtype=torch.float64)
RATIO = torch.tensor([1.5, 0.9, 0.5], dtype=torch.float64)
ADVANTAGE = torch.tensor([1.0, -2.0], dtype=torch.float64)
INDEX = torch.tensor([0, 0, 1])
LENGTHS = torch.tensor([2, 1])


def run(config, ratio=RATIO, advantage=ADVANTAGE, max_length=10, **inputs):
    logp = (OLD + ratio.log()).requires_grad_()
    normalizer = loss_normalizer(LENGTHS, config, max_length)
    output = policy_loss(logp, OLD, advantage, INDEX, config=config, normalizer=normalizer, **inputs)
    output.loss.backward()
    return output.loss.item(), logp.grad.tolist(), output.metrics.means()


def test_grpo():
    # Token 0: min(1.5, 1.2) x 1 = 1.2, held above. Token 1: min(0.9, 0.9) = 0.9.
    # Token 2: A < 0: min(0.5 x -2, 0.8 x -2) = min(-1, -1.6) = -1.6, held below.
    # Completion means 1.05 and -1.6; loss = -(1.05 - 1.6) / 2 = 0.275.
    # d/d log pi: 0 where held; token 1: -r A / (2 tokens x 2 completions) = -0.9 / 4 = -0.225.
    loss, gradient, metrics = run(GRPO)
    assert loss == pytest.approx(0.275, abs=1e-12)
    assert gradient == pytest.approx([0.0, -0.225, 0.0], abs=1e-12)
    assert metrics["clip_high"] == pytest.approx(1 / 3)
    assert metrics["clip_low"] == pytest.approx(1 / 3)
    assert metrics["ratio"] == pytest.approx(2.9 / 3)
    assert (metrics["ratio_min"], metrics["ratio_max"]) == pytest.approx((0.5, 1.5))
    # r - 1 - log r: 0.0945349 + 0.0053605 + 0.1931472, over 3
    assert metrics["approx_kl"] == pytest.approx(0.0976809, abs=1e-7)


def test_clipping_is_one_sided():
    # Ratios outside the bounds on the side that the advantage pushes away from are not held:
    # r = 0.5 with A = 1 gives 0.5, r = 1.5 with A = -2 gives -3. Loss = -((0.5 + 0.9) / 2 - 3) / 2 = 1.15.
    loss, gradient, metrics = run(GRPO, ratio=torch.tensor([0.5, 0.9, 1.5], dtype=torch.float64))
    assert loss == pytest.approx(1.15, abs=1e-12)
    assert gradient == pytest.approx([-0.125, -0.225, 1.5], abs=1e-12)
    assert metrics["clip_high"] == metrics["clip_low"] == 0.0


def test_dapo():
    # Held at 1.28: objectives 1.28, 0.9, -1.6 sum to 0.58; over 3 tokens: -0.1933333. Token 1: -0.9 / 3 = -0.3.
    loss, gradient, _ = run(DAPO)
    assert loss == pytest.approx(-0.58 / 3, abs=1e-12)
    assert gradient == pytest.approx([0.0, -0.3, 0.0], abs=1e-12)


def test_dr_grpo():
    # 1.2 + 0.9 - 1.6 = 0.5 over 10 tokens x 2 completions: -0.025. Token 1: -0.9 / 20 = -0.045.
    loss, gradient, _ = run(DR_GRPO)
    assert loss == pytest.approx(-0.025, abs=1e-12)
    assert gradient == pytest.approx([0.0, -0.045, 0.0], abs=1e-12)


def test_rloo():
    # Rewards 1, 0, 0.5 against the mean of the others (0.25, 0.75, 0.5): A = 0.75, -0.75, 0. On policy, lengths 2, 1
    # and 1, cap 10, three completions: loss = -(2 x 0.75 - 0.75) / 30 = -0.025; gradient -A / 30 per token.
    algorithm = make_algorithm({"name": "rloo"})
    loss, gradient = on_policy(algorithm, [1.0, 0.0, 0.5], [0, 0, 0], lengths=[2, 1, 1])
    assert loss == pytest.approx(-0.025, abs=1e-12)
    assert gradient == pytest.approx([-0.025, -0.025, 0.025, 0.0], abs=1e-12)


def test_reinforce_pp():
    # Two groups, rewards (1, 0) and (4, 0), centred +-0.5 and +-2; over all four S^2 = (0.5 + 8) / 3, S = 1.6832508.
    # A = +-0.2970443 and +-1.1881771; over 5 tokens of lengths 2, 1, 1, 1 the sum of A is 0.2970443: loss -0.0594089.
    algorithm = make_algorithm({"name": "reinforce_pp"})
    loss, gradient = on_policy(algorithm, [1.0, 0.0, 4.0, 0.0], [0, 0, 1, 1], lengths=[2, 1, 1, 1])
    assert loss == pytest.approx(-0.0594089, abs=1e-7)
    assert gradient == pytest.approx([-0.0594089, -0.0594089, 0.0594089, -0.2376354, 0.2376354], abs=1e-7)


def on_policy(algorithm, rewards, groups, lengths):
    """Loss and gradient of a whole algorithm, from rewards on, with every ratio 1 and a cap of 10 tokens."""
    rewards_C = torch.tensor(rewards, dtype=torch.float64)
    advantages_C = group_advantages(rewards_C, torch.tensor(groups), **asdict(algorithm.advantage))
    logp = torch.full((sum(lengths),), -1.0, dtype=torch.float64, requires_grad=True)
    lengths_C = torch.tensor(lengths)
    normalizer = loss_normalizer(lengths_C, algorithm.loss, 10)
    index = torch.repeat_interleave(lengths_C)
    output = policy_loss(logp, logp.detach(), advantages_C, index, config=algorithm.loss, normalizer=normalizer)
    output.loss.backward()
    return output.loss.item(), logp.grad.tolist()


def test_gspo():
    # Sequence ratios: sqrt(1.5 x 0.9) = 1.1618950 (held at 1.0004), and 0.5 with A = -2 (held at 1 - 0.0003).
    # Loss = -(1.0004 - 2 x 0.9997) / 2 = 0.4995; both held: no gradient.
    loss, gradient, metrics = run(GSPO)
    assert loss == pytest.approx(0.4995, abs=1e-12)
    assert gradient == [0.0, 0.0, 0.0]
    assert (metrics["clip_high"], metrics["clip_low"]) == pytest.approx((2 / 3, 1 / 3))


def test_gspo_within_its_bounds():
    # Ratios 1.0002 and 1.0001: s = exp of the mean log = sqrt(1.0002 x 1.0001) = 1.00015 to 1e-9; s A over 2 tokens
    # each: d loss / d log pi = -s A / (2 x 2). Completion 1: s = 0.9999, A = -2: 2 x 0.9999 / 2.
    ratio = torch.tensor([1.0002, 1.0001, 0.9999], dtype=torch.float64)
    loss, gradient, _ = run(GSPO, ratio=ratio)
    s = math.sqrt(1.0002 * 1.0001)
    assert loss == pytest.approx(-(s - 2 * 0.9999) / 2, abs=1e-12)
    assert gradient == pytest.approx([-s / 4, -s / 4, 0.9999], abs=1e-12)


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    # With an upper bound of 1 + 0.2: weights 1.2, 0.9, 0.5 (no lower bound), times A, times log pi = log r - 1.
    # log pi: -0.5945349, -1.1053605, -1.6931472. Sum of w A log pi: -0.7134419 - 0.9948245 + 1.6931472 = -0.0151191.
    # Loss over 3 tokens: 0.0050397. Gradient -w A / 3: -0.4, -0.3, 1/3.
    loss, gradient, metrics = run(LossConfig(objective="cispo", clip_low=1.0, clip_high=0.2, aggregation="token"))
    assert loss == pytest.approx(0.0050397, abs=1e-7)
    assert gradient == pytest.approx([-0.4, -0.3, 1 / 3], abs=1e-12)
    assert (metrics["clip_high"], metrics["clip_low"]) == pytest.approx((1 / 3, 0.0))


def test_cispos_preset_bounds_the_weight_at_five():
    # Ratio 8 is held at 5; gradient -5 x 1 / 3.
    _, gradient, _ = run(CISPO, ratio=torch.tensor([8.0, 4.0, 0.01], dtype=torch.float64))
    assert gradient == pytest.approx([-5 / 3, -4 / 3, 0.02 / 3], abs=1e-12)


def test_dual_clip_bounds_the_punishment():
    # Token 2 with r = 5, A = -2: min(5, 1.2) branch gives -10; c A = 3 x -2 = -6 is larger and constant.
    # GRPO aggregation: -((1.2 + 0.9) / 2 - 6) / 2 = 2.475.
    ratio = torch.tensor([1.5, 0.9, 5.0], dtype=torch.float64)
    loss, gradient, metrics = run(LossConfig(dual_clip=3.0), ratio=ratio)
    assert loss == pytest.approx(2.475, abs=1e-12)
    assert gradient == pytest.approx([0.0, -0.225, 0.0], abs=1e-12)
    assert metrics["dual_clip"] == pytest.approx(1 / 3)
    loss, gradient, _ = run(LossConfig(), ratio=ratio)
    assert loss == pytest.approx(-(1.05 - 10) / 2, abs=1e-12)
    assert gradient[2] == pytest.approx(5.0, abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "by_hand"),
    [
        # u = log ref - log pi = log 2, 0, -log 2 (tokens 0, 1, 2), at r = 1 so that the policy term is known.
        ("k1", [-math.log(2), 0.0, math.log(2)]),
        ("k2", [math.log(2) ** 2 / 2, 0.0, math.log(2) ** 2 / 2]),
        ("k3", [2 - math.log(2) - 1, 0.0, 0.5 + math.log(2) - 1]),
    ],
)
def test_kl_in_the_loss(estimator, by_hand):
    # Token mean of the policy term at r = 1: -(1 + 1 - 2) / 3 = 0; so the loss is beta x the mean of the estimates.
    config = LossConfig(aggregation="token", kl_beta=0.5, kl_estimator=estimator)
    ref = OLD + torch.tensor([math.log(2), 0.0, -math.log(2)], dtype=torch.float64)
    loss, _, metrics = run(config, ratio=torch.ones(3, dtype=torch.float64), ref_logp_N=ref)
    assert loss == pytest.approx(0.5 * sum(by_hand) / 3, abs=1e-12)
    assert metrics["ref_kl"] == pytest.approx(sum(by_hand) / 3, abs=1e-12)


def test_kl_in_the_reward_is_only_reported():
    config = LossConfig(aggregation="token", kl_beta=0.5, kl_in="reward")
    loss, _, metrics = run(config, ratio=torch.ones(3, dtype=torch.float64), ref_logp_N=OLD - 1)
    assert loss == pytest.approx(0.0, abs=1e-12)
    assert metrics["ref_kl"] == pytest.approx(math.exp(-1) + 1 - 1, abs=1e-12)


def test_truncated_importance_sampling_weighs_the_policy_term_alone():
    # pi_old / pi_rollout = 4, 0.5, 1, capped at 2: weights 2, 0.5, 1. Objectives 1.2, 0.9, -1.6 become
    # 2.4, 0.45, -1.6 = 1.25; loss -1.25 / 3, plus the KL term 1 x k1 with log pi - log ref = 0.1 each: 0.1.
    config = LossConfig(aggregation="token", rollout_is="truncate", rollout_is_cap=2.0, kl_beta=1.0, kl_estimator="k1")
    rollout = OLD - torch.tensor([4.0, 0.5, 1.0], dtype=torch.float64).log()
    ref = OLD + RATIO.log() - 0.1
    loss, gradient, metrics = run(config, rollout_logp_N=rollout, ref_logp_N=ref)
    assert loss == pytest.approx(-1.25 / 3 + 0.1, abs=1e-12)
    # Policy term: 0 and 0 where held, -0.5 x 0.9 / 3 = -0.15; KL term: 1 / 3 each.
    assert gradient == pytest.approx([1 / 3, 1 / 3 - 0.15, 1 / 3], abs=1e-12)
    assert metrics["is_weight"] == pytest.approx(5.5 / 3)
    assert metrics["is_limited"] == pytest.approx(1 / 3)


def test_masked_importance_sampling_drops_what_lies_outside():
    # Weights 4 (dropped), 0.5 and 0.05 (dropped below 0.1): 0.5 x 0.9 = 0.45; loss -0.45 / 3.
    config = LossConfig(aggregation="token", rollout_is="mask", rollout_is_cap=2.0, rollout_is_floor=0.1)
    rollout = OLD - torch.tensor([4.0, 0.5, 0.05], dtype=torch.float64).log()
    loss, gradient, metrics = run(config, rollout_logp_N=rollout)
    assert loss == pytest.approx(-0.15, abs=1e-12)
    assert gradient == pytest.approx([0.0, -0.15, 0.0], abs=1e-12)
    assert metrics["is_limited"] == pytest.approx(2 / 3)


def test_sequence_importance_weights_are_products():
    # Completion 0: 4 x 0.25 = 1; completion 1: 3, capped at 2. Objectives 1.2 + 0.9 - 2 x 1.6 = -1.1; loss 1.1 / 3.
    config = LossConfig(aggregation="token", rollout_is="truncate", rollout_is_cap=2.0, rollout_is_level="sequence")
    rollout = OLD - torch.tensor([4.0, 0.25, 3.0], dtype=torch.float64).log()
    loss, _, metrics = run(config, rollout_logp_N=rollout)
    assert loss == pytest.approx(1.1 / 3, abs=1e-12)
    assert metrics["is_weight"] == pytest.approx(5 / 3)


def test_entropy_bonus():
    # At r = 1 the token-mean policy term is 0; the loss is -0.1 x mean(1, 2, 6) = -0.3, gradient -0.1 / 3 each.
    config = LossConfig(aggregation="token", entropy_coef=0.1)
    entropy = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64, requires_grad=True)
    loss, _, metrics = run(config, ratio=torch.ones(3, dtype=torch.float64), entropy_N=entropy)
    assert loss == pytest.approx(-0.3, abs=1e-12)
    assert entropy.grad.tolist() == pytest.approx([-0.1 / 3] * 3)
    assert metrics["entropy"] == pytest.approx(3.0)


def test_the_normaliser_counts_what_is_there():
    lengths = torch.tensor([5, 0, 3])  # the second completion is left out
    assert loss_normalizer(lengths, GRPO, 100) == 2.0
    assert loss_normalizer(lengths, DAPO, 100) == 8.0
    assert loss_normalizer(lengths, DR_GRPO, 100) == 200.0
    assert loss_normalizer(torch.tensor([0, 0]), DAPO, 100) == 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LossConfig(kl_beta=0.1), "kl_beta is 0.1 and the reference's log-probs are not given"),
        (LossConfig(rollout_is="mask"), "rollout_is is 'mask' and the rollout's log-probs"),
        (LossConfig(entropy_coef=0.1), "entropy_coef is 0.1 and the policy's entropies"),
    ],
)
def test_a_missing_input_is_named(config, message):
    with pytest.raises(ConfigError, match=message):
        run(config)


def test_shapes_and_normaliser_are_checked():
    with pytest.raises(ConfigError, match="one flat list"):
        policy_loss(OLD[None], OLD[None], ADVANTAGE, INDEX, config=GRPO, normalizer=1.0)
    with pytest.raises(ConfigError, match="normaliser is 0"):
        policy_loss(OLD, OLD, ADVANTAGE, INDEX, config=GRPO, normalizer=0)
