"""The update: the same gradient however it is packed, correct against a plain computation, safe against NaN."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from sagc_fast.algo.advantage import group_advantages
from sagc_fast.algo.config import make_algorithm
from sagc_fast.algo.loss import loss_normalizer, policy_loss
from sagc_fast.algo.rewards import kl_penalised_rewards, shape_rewards
from sagc_fast.config import OptimizerOptions, UpdateOptions
from sagc_fast.model.loader import load_model
from sagc_fast.tasks.base import Problem, Score
from sagc_fast.train.distributed import ALONE
from sagc_fast.train.optimizer import PolicyOptimizer
from sagc_fast.train.sampling import ScoredGroup
from sagc_fast.train.update import PolicyUpdater
from sagc_fast.types import Completion, Group

MAX_LENGTH = 12


def scored_groups(model, shapes=((3, (4, 1, 7)), (5, (2, 6)), (2, (12, 3, 3, 1))), seed=0) -> list[ScoredGroup]:
    """Groups of random tokens with random rewards, whose rollout log-probs are the model's own."""
    rng = torch.Generator().manual_seed(seed)
    groups = []
    for index, (prompt_length, lengths) in enumerate(shapes):
        prompt = torch.randint(0, 19, (prompt_length,), generator=rng).tolist()
        completions = []
        for i, n in enumerate(lengths):
            tokens = torch.randint(0, 19, (n,), generator=rng).tolist()
            logp = plain_logprobs(model, prompt, tokens).detach().tolist()
            completions.append(Completion(i, tokens, logp, "length" if n == MAX_LENGTH else "stop", text="x"))
        rewards = torch.rand(len(lengths), generator=rng).tolist()
        scores = [Score(r, r > 0.5) for r in rewards]
        groups.append(ScoredGroup(Group(index, prompt, completions, index), Problem("p", problem_id=index), scores))
    return groups


def plain_logprobs(model, prompt, tokens, temperature=1.0):
    logits = model.forward_dense(torch.tensor(prompt + tokens)) / temperature
    logp = torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1]
    return logp.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def plain_entropy(model, prompt, tokens):
    logp = torch.log_softmax(model.forward_dense(torch.tensor(prompt + tokens)).float(), -1)[len(prompt) - 1 : -1]
    return -(logp.exp() * logp).sum(-1)


def updater(model, algorithm=None, reference=None, learning_rate=1e-3, processes=ALONE, **options) -> PolicyUpdater:
    optimizer = PolicyOptimizer(model, OptimizerOptions(learning_rate=learning_rate, warmup_steps=0))
    return PolicyUpdater(
        model,
        reference,
        optimizer,
        make_algorithm(algorithm or {"name": "grpo"}),
        UpdateOptions(**options),
        max_length=MAX_LENGTH,
        temperature=1.0,
        seed=0,
        processes=processes,
    )


def captured_gradient(policy, groups, algorithm=None, reference=None, **options):
    """(gradient, result) of the first optimizer update, before it is applied."""
    model = load_model(policy)
    if reference is None and "kl_beta" in (algorithm or {}):
        reference = load_model(policy)
    u = updater(model, algorithm, reference, **options)
    gradients = {}

    def capture() -> float:
        gradients.update({n: p.grad.clone() for n, p in model.named_parameters()})
        u.optimizer.clear()
        return 1.0

    u.optimizer.step = capture
    return gradients, u.update(1, groups)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "grpo"},
        {"name": "dapo"},
        {"name": "dr_grpo"},
        {"name": "gspo"},
        {"name": "cispo"},
        {"name": "grpo", "kl_beta": 0.1, "entropy_coef": 0.01},
    ],
    ids=str,
)
def test_the_gradient_does_not_depend_on_the_token_budget(policy, algorithm):
    groups = scored_groups(load_model(policy))
    whole, one = captured_gradient(policy, groups, algorithm, micro_batch_tokens=10_000)
    for budget in (25, 14, 8):
        parts, other = captured_gradient(policy, groups, algorithm, micro_batch_tokens=budget)
        assert (other.num_tokens > one.num_tokens) == (budget < 21), "a split group repeats its prompt"
        assert other.losses == pytest.approx(one.losses, abs=1e-6)
        for name, g in whole.items():
            torch.testing.assert_close(parts[name], g, rtol=1e-4, atol=1e-6)


def test_the_gradient_is_that_of_the_formula_on_plain_sequences(policy):
    """GRPO on the first update: mean over completions of mean over tokens of -A (ratio 1), one sequence at a time."""
    model = load_model(policy)
    groups = scored_groups(model)
    loss, count = 0.0, sum(len(g.scores) for g in groups)
    for g in groups:
        r = torch.tensor(g.rewards, dtype=torch.float64)
        advantages = (r - r.mean()) / (r.std() + 1e-4)
        for completion, a in zip(g.group.completions, advantages.tolist(), strict=True):
            logp = plain_logprobs(model, g.group.prompt_token_ids, completion.token_ids)
            loss = loss - a * torch.exp(logp - logp.detach()).mean() / count
    loss.backward()
    packed, _ = captured_gradient(policy, groups, micro_batch_tokens=30)
    for name, p in model.named_parameters():
        torch.testing.assert_close(packed[name], p.grad, rtol=1e-4, atol=1e-6)


FORMULAS = {
    "dapo": {"name": "dapo", "overlong_cache_fraction": 0.5},
    "dr_grpo": {"name": "dr_grpo"},
    "gspo": {"name": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    "cispo": {"name": "cispo", "clip_high": 0.05},
    "rloo": {"name": "rloo", "mask_truncated": True},
    "reinforce_pp, dual clip": {"name": "reinforce_pp", "dual_clip": 1.1},
    "k3 in the loss, entropy": {"name": "grpo", "kl_beta": 0.3, "entropy_coef": 0.05},
    "k2 in the loss": {"name": "dapo", "kl_beta": 0.3, "kl_estimator": "k2"},
    "k1 in the reward": {"name": "grpo", "kl_beta": 0.3, "kl_in": "reward", "kl_estimator": "k1"},
    "adv_scale": {"name": "grpo", "adv_scale": "loo", "scale": "none"},
}


@pytest.mark.parametrize("options", FORMULAS.values(), ids=FORMULAS.keys())
@pytest.mark.parametrize("split", [10_000, 25], ids=["whole", "split"])
def test_every_part_of_an_algorithm_reaches_the_gradient(policy, options, split):
    """Off policy: the sampled log-probs are another policy's. One sequence at a time in place of packs, the loss as a
    function of plain log-probs (which has float64 tests of its own), and a reference that is not the policy."""
    model, reference, algorithm = load_model(policy), load_model(policy), make_algorithm(options)
    with torch.no_grad():
        reference.lm_head_weight.mul_(1.2)
    noise = torch.Generator().manual_seed(1)
    groups = [_shift(g, lambda: 0.1 * torch.randn((), generator=noise).item()) for g in scored_groups(model)]
    rows = [(g, completion) for g in groups for completion in g.group.completions]
    lengths_C = torch.tensor([len(c.token_ids) for _, c in rows])
    index_N = torch.repeat_interleave(lengths_C)

    def flat_logprobs(policy_model):
        return torch.cat([plain_logprobs(policy_model, g.group.prompt_token_ids, c.token_ids) for g, c in rows])

    valid_C = torch.tensor([not (algorithm.filters.mask_truncated and c.is_truncated) for _, c in rows])
    rollout_N = torch.tensor([x for _, c in rows for x in c.logprobs])
    ref_N = flat_logprobs(reference).detach()
    rewards_C = torch.tensor([r for g in groups for r in g.rewards], dtype=torch.float64)
    rewards_C = shape_rewards(rewards_C, lengths_C, MAX_LENGTH, algorithm.filters)
    rewards_C = kl_penalised_rewards(rewards_C, rollout_N, ref_N, index_N, config=algorithm.loss)
    ids_C = torch.tensor([g.group.prompt_index for g, _ in rows])
    advantages_C = group_advantages(rewards_C, ids_C, valid_C=valid_C, **asdict(algorithm.advantage))
    entropy_N = torch.cat([plain_entropy(model, g.group.prompt_token_ids, c.token_ids) for g, c in rows])
    output = policy_loss(
        flat_logprobs(model), rollout_N, advantages_C, index_N, valid_C[index_N], config=algorithm.loss,
        normalizer=loss_normalizer(torch.where(valid_C, lengths_C, 0), algorithm.loss, MAX_LENGTH),
        ref_logp_N=ref_N, rollout_logp_N=rollout_N, entropy_N=entropy_N,
    )  # fmt: skip
    output.loss.backward()

    packed, result = captured_gradient(policy, groups, options, reference=reference, micro_batch_tokens=split)
    assert result.losses[0] == pytest.approx(output.loss.item(), rel=1e-4, abs=1e-6)
    assert max(float(p.grad.abs().max()) for p in model.parameters()) > 1e-4
    for name, p in model.named_parameters():
        torch.testing.assert_close(packed[name], p.grad, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize(
    "options", [{"rollout_is": "truncate", "rollout_is_cap": 1.05}, {"rollout_is": "mask"}], ids=str
)
def test_recomputed_log_probs_are_weighed_by_their_difference_to_the_rollouts(policy, options):
    """On policy after recomputing: the gradient is A times the weight pi_old / pi_rollout, truncated or masked."""
    model = load_model(policy)
    noise = torch.Generator().manual_seed(1)
    groups = [_shift(g, lambda: 0.1 * torch.randn((), generator=noise).item()) for g in scored_groups(model)]
    loss, num_tokens = 0.0, 39
    for g in groups:
        r = torch.tensor(g.rewards, dtype=torch.float64)
        advantages = (r - r.mean()) / (r.std() + 1e-4)
        for completion, a in zip(g.group.completions, advantages.tolist(), strict=True):
            logp = plain_logprobs(model, g.group.prompt_token_ids, completion.token_ids)
            weight = torch.exp(logp.detach() - torch.tensor(completion.logprobs))
            weight = weight.clamp(max=1.05) if options["rollout_is"] == "truncate" else weight * (weight <= 2.0)
            loss = loss - (a * weight * torch.exp(logp - logp.detach())).sum() / num_tokens
    loss.backward()
    packed, result = captured_gradient(
        policy, groups, {"name": "grpo", "aggregation": "token", **options}, old_logprobs="recompute"
    )
    assert result.metrics.means()["is_weight"] != pytest.approx(1.0, abs=1e-4)
    for name, p in model.named_parameters():
        torch.testing.assert_close(packed[name], p.grad, rtol=1e-3, atol=2e-6)


def test_groups_without_signal_cost_nothing_and_still_count(policy):
    model = load_model(policy)
    groups = scored_groups(model)
    flat = replace(groups[1], scores=[Score(0.5, True)] * 2)
    mixed, result = captured_gradient(policy, [groups[0], flat, groups[2]])
    assert result.num_informative_groups == 2
    assert result.num_tokens == (3 + 12) + (2 + 19)
    alone, _ = captured_gradient(policy, [groups[0], groups[2]])
    for name, g in mixed.items():
        torch.testing.assert_close(g * 9 / 7, alone[name], rtol=1e-4, atol=1e-6)


def test_no_signal_at_all_is_an_update_with_zero_gradient(policy):
    model = load_model(policy)
    groups = [replace(g, scores=[Score(1.0, True)] * len(g.scores)) for g in scored_groups(model)]
    result = updater(model).update(1, groups)
    assert (result.num_updates, result.grad_norms, result.num_informative_groups) == (1, [0.0], 0)


def test_the_policy_s_device_is_the_current_one(policy, monkeypatch):
    """Triton launches on the current device: without, a policy on cuda:1 would be trained by launches on cuda:0."""
    current, seen = ["cuda:0"], []

    @contextmanager
    def made_current(device):
        current.append(device)
        yield
        current.pop()

    model = load_model(policy)
    groups, forward_packed = scored_groups(model), model.forward_packed
    monkeypatch.setattr("sagc_fast.train.update.made_current", made_current)
    monkeypatch.setattr(model, "forward_packed", lambda *args: (seen.append(current[-1]), forward_packed(*args))[1])
    assert updater(model, micro_batch_tokens=16).update(1, groups).num_updates == 1
    assert len(seen) > 1
    assert set(seen) == {model.device}
    assert current == ["cuda:0"]


def test_no_group_at_all_is_no_update(policy):
    assert updater(load_model(policy)).update(1, []).num_updates == 0


def test_truncated_completions_can_be_left_out(policy):
    model = load_model(policy)
    groups = scored_groups(model)
    _, everything = captured_gradient(policy, groups)
    _, masked = captured_gradient(policy, groups, {"name": "grpo", "mask_truncated": True})
    assert masked.num_tokens == everything.num_tokens - MAX_LENGTH


def test_rollout_and_recomputed_log_probs_agree_and_the_difference_is_reported(policy):
    groups = scored_groups(load_model(policy))
    for mode in ("rollout", "recompute"):
        gradient, result = captured_gradient(policy, groups, old_logprobs=mode)
        assert result.logprob_difference.num_tokens == 39
        assert result.logprob_difference.max_abs < 1e-5
    shifted = [_shift(g, lambda: 0.5) for g in groups]
    for mode in ("rollout", "recompute"):
        _, result = captured_gradient(policy, shifted, old_logprobs=mode)
        assert result.logprob_difference.mean_abs == pytest.approx(0.5, abs=1e-4)
    recomputed, _ = captured_gradient(policy, shifted, old_logprobs="recompute")
    for name, g in gradient.items():
        torch.testing.assert_close(recomputed[name], g, rtol=1e-4, atol=1e-6)


def _shift(scored: ScoredGroup, by: Callable[[], float]) -> ScoredGroup:
    completions = [replace(c, logprobs=[x + by() for x in c.logprobs]) for c in scored.group.completions]
    return replace(scored, group=replace(scored.group, completions=completions))


def test_epochs_and_minibatches_clip_against_the_same_old_policy(policy):
    """Three passes with a large rate: the first is on-policy, later ones are clipped; every group once per pass."""
    model = load_model(policy)
    groups = scored_groups(model)
    result = updater(model, learning_rate=0.05, num_epochs=3, num_minibatches=2).update(1, groups)
    assert result.num_updates == 6
    assert result.num_tokens == 3 * sum(len(g.group.prompt_token_ids) + sum(g.group.lengths) for g in groups)
    means = result.metrics.means()
    assert means["clip_low"] + means["clip_high"] > 0
    assert result.logprob_difference.max_abs < 1e-5, "compared before the first update only"
    single = updater(load_model(policy)).update(1, groups)
    assert single.metrics.means()["clip_low"] == single.metrics.means()["clip_high"] == 0.0


def test_minibatches_depend_on_seed_step_and_epoch_alone(policy):
    u = updater(load_model(policy), num_epochs=2, num_minibatches=3)
    order = list(u._minibatches(5, 8))
    assert order == list(u._minibatches(5, 8))
    assert order != list(u._minibatches(6, 8))
    assert order[:3] != order[3:]
    assert sorted(i for part in order[:3] for i in part) == list(range(8))


def test_kl_to_the_reference_pulls_back(policy):
    """With constant rewards only the penalty is left: nothing at the reference, a gradient away from it."""
    reference = load_model(policy)
    model = load_model(policy)
    groups = [replace(g, scores=[Score(1.0, True)] * len(g.scores)) for g in scored_groups(model)]
    at_start = updater(model, {"name": "grpo", "kl_beta": 0.5}, reference).update(1, groups)
    assert at_start.grad_norms[0] < 1e-5
    with torch.no_grad():
        model.lm_head_weight.mul_(1.5)
    away = updater(model, {"name": "grpo", "kl_beta": 0.5}, reference).update(2, groups)
    assert away.grad_norms[0] > 1e-3
    assert away.metrics.means()["ref_kl"] > 0
    algorithm = {"name": "grpo", "kl_beta": 0.5, "kl_in": "reward"}
    in_reward = updater(model, algorithm, reference, old_logprobs="recompute").update(3, groups)
    assert in_reward.num_informative_groups == 3, "the penalty tells completions of equal reward apart"


def test_a_loss_that_is_not_finite_names_its_groups_and_changes_nothing(policy):
    model = load_model(policy)
    groups = scored_groups(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    tokens = groups[1].group.completions[0]
    poisoned = replace(tokens, logprobs=[math.nan, *tokens.logprobs[1:]])
    group = replace(groups[1].group, completions=[poisoned, *groups[1].group.completions[1:]])
    groups[1] = replace(groups[1], group=group)
    result = updater(model, micro_batch_tokens=16, num_epochs=2).update(1, groups)
    assert result.num_updates == 0
    assert 1 in result.bad_groups
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_gradient_that_is_not_finite_skips_the_update(policy):
    model = load_model(policy)
    groups = scored_groups(model)
    u = updater(model)
    model.lm_head_weight.register_hook(lambda g: g * math.inf)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    result = u.update(1, groups)
    assert (result.num_updates, result.bad_groups) == (0, [0, 1, 2])
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_checkpointed_activations_give_the_same_gradient(policy):
    groups = scored_groups(load_model(policy))
    plain, _ = captured_gradient(policy, groups)
    saved, _ = captured_gradient(policy, groups, checkpoint_activations=True)
    for name, g in plain.items():
        assert torch.equal(saved[name], g), name


CHECKPOINT_PROBE = """
import torch
from sagc_fast.model.config import ModelConfig
from sagc_fast.model.loader import random_model
from sagc_fast.train.packing import PackItem, build_micro_batch
def peak_mib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024
config = ModelConfig(family="llama", vocab_size=64, hidden_size=64, intermediate_size=256, num_layers=24, num_heads=4,
                     num_kv_heads=4, head_dim=16, max_position_embeddings=512, rms_norm_eps=1e-5, eos_token_ids=(2,))
model = random_model(config, seed=0)
batch = build_micro_batch([PackItem([1] * 64, [[i] * 60 for i in range(16)], range(16))] * 2)
def train(batch, checkpoint):
    model.zero_grad()
    model.forward_packed(batch.token_ids_T, batch.layout, checkpoint).square().sum().backward()
    return peak_mib() - before, [p.grad.clone() for p in model.parameters() if p.grad is not None]
before = 0
train(build_micro_batch([PackItem([1], [[2]], [0])]), True)
before = peak_mib()
less, saved = train(batch, True)  # first: the process keeps what it has once had
more, plain = train(batch, False)
print(less, more, all(map(torch.equal, saved, plain)))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of resident memory is read from /proc")
def test_checkpointed_activations_need_a_fraction_of_the_memory():
    """2,048 tokens through 24 layers: one [T, E] a layer and the inside of one, not the inside of all.

    The C library is told to give every tensor pages of its own. By default it grows its heap instead once large blocks
    have been freed, and the holes in that heap, up to 120 MiB and other ones in every run, were most of the peak.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", CHECKPOINT_PROBE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    less, more, is_same = done.stdout.split()
    assert float(less) < 0.2 * float(more), done.stdout
    assert is_same == "True"
