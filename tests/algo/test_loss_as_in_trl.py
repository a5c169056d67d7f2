"""The loss against what TRL 1.16.0 computes for the same tensors in float64, with the options that docs/algorithms.md
pairs. The numbers are those of ``GRPOTrainer._compute_loss`` on the batch of :func:`batch`, padded there, flat here."""

from __future__ import annotations

import pytest
import torch

from sagc_fast.algo.config import make_algorithm
from sagc_fast.algo.loss import loss_normalizer, policy_loss

LENGTHS = (9, 1, 4, 7, 2, 5)
MAX_LENGTH = 12


def batch() -> tuple[torch.Tensor, ...]:
    """(log-probs, old, reference's, advantages, completion index): ratios between 0.2 and 3."""
    rng = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))
    logp = -torch.rand(shape, generator=rng, dtype=torch.float64) * 2
    old = logp + 0.5 * torch.randn(shape, generator=rng, dtype=torch.float64)
    ref = logp + 0.3 * torch.randn(shape, generator=rng, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), generator=rng, dtype=torch.float64)
    is_token = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    index = torch.repeat_interleave(torch.tensor(LENGTHS))
    return logp[is_token], old[is_token], ref[is_token], advantages, index


@pytest.mark.parametrize(
    ("ours", "theirs", "loss", "gradient_norm"),
    [
        ({"name": "grpo"}, "loss_type=grpo", 0.6809219255473424, 0.19475056533169527),
        (
            {"name": "grpo", "kl_beta": 0.1},
            "loss_type=grpo beta=0.1 use_bias_correction_kl=False",
            0.6859604150006261,
            0.19747410589819614,
        ),
        ({"name": "dapo"}, "loss_type=dapo epsilon_high=0.28", 1.0054588638414332, 0.21670964741335666),
        ({"name": "dr_grpo"}, "loss_type=dr_grpo", 0.39288857427183604, 0.08427597399408315),
        (
            {"name": "cispo", "clip_high": 0.5},
            "loss_type=cispo epsilon_high=1.5",
            -0.9920709515185633,
            0.24150478516221416,
        ),
        (
            {"name": "gspo"},
            "loss_type=grpo importance_sampling_level=sequence epsilon=3e-4 epsilon_high=4e-4",
            0.7182743415090153,
            0.14447504780955814,
        ),
        ({"name": "grpo", "dual_clip": 1.5}, "loss_type=grpo delta=1.5", 0.6496418600551971, 0.17027908813940687),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_the_paired_options_give_the_same_loss_and_gradient(ours, theirs, loss, gradient_norm):
    logp, old, ref, advantages, index = batch()
    config = make_algorithm(ours).loss
    logp.requires_grad_()
    normalizer = loss_normalizer(torch.tensor(LENGTHS), config, MAX_LENGTH)
    output = policy_loss(logp, old, advantages, index, config=config, normalizer=normalizer, ref_logp_N=ref)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, rel=1e-12), theirs
    assert logp.grad.norm().item() == pytest.approx(gradient_norm, rel=1e-12), theirs
