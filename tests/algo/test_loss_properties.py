"""The loss against the formula written plainly in float64, and what must hold for any batch."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast.algo.config import CISPO, DAPO, DR_GRPO, GRPO, GSPO, LossConfig
from sagc_fast.algo.logprobs import logprob_difference
from sagc_fast.algo.loss import loss_normalizer, policy_loss

MAX_LENGTH = 23
FULL = {"kl_beta": 0.3, "entropy_coef": 0.07, "rollout_is": "truncate", "rollout_is_cap": 1.3}
CONFIGS = {
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "dapo": DAPO,
    "gspo": dataclasses.replace(GSPO, clip_low=0.05, clip_high=0.1),
    "gspo_tokens": LossConfig(ratio_level="sequence", aggregation="token"),
    "cispo": dataclasses.replace(CISPO, clip_high=0.3),
    "cispo_low": LossConfig(objective="cispo", aggregation="sequence"),
    "dual": LossConfig(dual_clip=1.4, aggregation="token"),
    "unclipped": LossConfig(clip_low=1.0, clip_high=math.inf),
    "grpo_full": dataclasses.replace(GRPO, **FULL),
    "dapo_full_k1": dataclasses.replace(DAPO, **FULL, kl_estimator="k1", rollout_is_level="sequence"),
    "dr_grpo_full_k2": dataclasses.replace(DR_GRPO, **FULL | {"rollout_is": "mask"}, kl_estimator="k2"),
    "gspo_full": dataclasses.replace(GSPO, **FULL, clip_low=0.05, clip_high=0.1),
    "cispo_full_floor": dataclasses.replace(CISPO, **FULL | {"rollout_is": "mask"}, rollout_is_floor=0.8),
}


@dataclasses.dataclass
class Batch:
    logp: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    ref: torch.Tensor
    entropy: torch.Tensor
    advantage: torch.Tensor
    index: torch.Tensor
    mask: torch.Tensor

    @property
    def lengths(self):
        return torch.bincount(self.index[self.mask], minlength=len(self.advantage))


def random_batch(seed, lengths, dtype=torch.float64, masked=0.2):
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def noise(scale):
        return scale * torch.randn(n, generator=g, dtype=torch.float64)

    logp = -noise(1.0).abs()
    mask = torch.rand(n, generator=g) >= masked
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    if len(lengths) > 2:
        mask[index == 1] = False  # a completion that is left out altogether
    batch = Batch(
        logp, logp + noise(0.3), logp + noise(0.3), logp + noise(0.5), noise(1.0).abs(),
        torch.randn(len(lengths), generator=g, dtype=torch.float64), index, mask,
    )  # fmt: skip
    floats = {k: v.to(dtype) for k, v in vars(batch).items() if v.is_floating_point()}
    return dataclasses.replace(batch, **floats)


def loss_of(batch, config, normalizer, **changes):
    b = dataclasses.replace(batch, **changes)
    return policy_loss(
        b.logp, b.old, b.advantage, b.index, b.mask, config=config, normalizer=normalizer,
        ref_logp_N=b.ref, rollout_logp_N=b.rollout, entropy_N=b.entropy,
    )  # fmt: skip


def plain_loss(b, c):
    """The formula of PAPER.md, one completion and one token at a time, over the whole batch."""
    total, num_sequences, num_tokens = 0.0, 0, 0
    for i, advantage in enumerate(b.advantage):
        tokens = [t for t in range(len(b.logp)) if b.index[t] == i and b.mask[t]]
        if not tokens:
            continue
        num_sequences += 1
        num_tokens += len(tokens)
        sequence_ratio = torch.exp(sum(b.logp[t] - b.old[t] for t in tokens) / len(tokens))
        sequence_weight = torch.exp(sum(b.old[t] - b.rollout[t] for t in tokens))
        subtotal = 0.0
        for t in tokens:
            ratio = sequence_ratio if c.ratio_level == "sequence" else torch.exp(b.logp[t] - b.old[t])
            clipped = torch.clip(ratio, 1 - c.clip_low, 1 + c.clip_high)
            if c.objective == "cispo":
                objective = clipped.detach() * advantage * b.logp[t]
            else:
                objective = torch.min(ratio * advantage, clipped * advantage)
                if c.dual_clip is not None and advantage < 0:
                    objective = torch.max(objective, c.dual_clip * advantage)
            if c.rollout_is != "none":
                weight = (
                    sequence_weight if c.rollout_is_level == "sequence" else torch.exp(b.old[t] - b.rollout[t])
                ).detach()
                if c.rollout_is == "truncate":
                    weight = torch.min(weight, torch.tensor(c.rollout_is_cap, dtype=weight.dtype))
                elif not c.rollout_is_floor <= weight <= c.rollout_is_cap:
                    weight = torch.zeros_like(weight)
                objective = objective * weight
            u = b.ref[t] - b.logp[t]
            kl = {"k1": -u, "k2": u**2 / 2, "k3": torch.exp(u) - u - 1}[c.kl_estimator]
            penalty = c.kl_beta * kl if c.kl_in == "loss" else 0.0
            subtotal = subtotal - objective + penalty - c.entropy_coef * b.entropy[t]
        total = total + (subtotal / len(tokens) if c.aggregation == "sequence" else subtotal)
    return (
        total / {"sequence": num_sequences, "token": num_tokens, "constant": MAX_LENGTH * num_sequences}[c.aggregation]
    )


def value_and_gradients(batch, function):
    logp, entropy = (x.detach().clone().requires_grad_() for x in (batch.logp, batch.entropy))
    loss = function(dataclasses.replace(batch, logp=logp, entropy=entropy))
    loss.backward()
    return loss.detach(), logp.grad, torch.zeros_like(entropy) if entropy.grad is None else entropy.grad


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [[1], [3, 1, 7], [5, 2, 1, 11, 4]], ids=str)
def test_loss_and_gradient_equal_the_plain_formula(name, lengths):
    config = CONFIGS[name]
    batch = random_batch(len(lengths), lengths, masked=0.0 if lengths == [1] else 0.2)
    normalizer = loss_normalizer(batch.lengths, config, MAX_LENGTH)
    ours = value_and_gradients(batch, lambda b: loss_of(b, config, normalizer).loss)
    plain = value_and_gradients(batch, lambda b: plain_loss(b, config))
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-13)
    if len(lengths) == 5:  # enough completions for some to be within their bounds
        assert ours[1][batch.mask].abs().sum() > 0


@st.composite
def any_config(draw):
    """Every option at once, each of its values as likely as the others."""
    objective = draw(st.sampled_from(["clip", "cispo"]))
    return LossConfig(
        objective=objective,
        ratio_level=draw(st.sampled_from(["token", "sequence"])),
        clip_low=draw(st.sampled_from([0.0, 0.05, 0.2, 1.0])),
        clip_high=draw(st.sampled_from([0.0, 0.1, 0.28, math.inf])),
        dual_clip=draw(st.sampled_from([None, 1.2, 3.0])) if objective == "clip" else None,
        aggregation=draw(st.sampled_from(["sequence", "token", "constant"])),
        kl_beta=draw(st.sampled_from([0.0, 0.4])),
        kl_estimator=draw(st.sampled_from(["k1", "k2", "k3"])),
        kl_in=draw(st.sampled_from(["loss", "reward"])),
        entropy_coef=draw(st.sampled_from([0.0, 0.1, -0.1])),
        rollout_is=draw(st.sampled_from(["none", "truncate", "mask"])),
        rollout_is_cap=draw(st.sampled_from([1.1, 2.0])),
        rollout_is_floor=draw(st.sampled_from([0.0, 0.7])),
        rollout_is_level=draw(st.sampled_from(["token", "sequence"])),
    )


@settings(max_examples=150, deadline=None)
@given(any_config(), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 10**6))
def test_any_combination_of_options_equals_the_plain_formula(config, lengths, seed):
    batch = random_batch(seed, lengths)
    normalizer = loss_normalizer(batch.lengths, config, MAX_LENGTH)
    if not batch.mask.any():
        return
    ours = value_and_gradients(batch, lambda b: loss_of(b, config, normalizer).loss)
    plain = value_and_gradients(batch, lambda b: plain_loss(b, config))
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_computes_in_float32(dtype):
    batch = random_batch(3, [4, 9, 2, 6], dtype)
    exact = dataclasses.replace(batch, **{k: v.double() for k, v in vars(batch).items() if v.is_floating_point()})
    config = CONFIGS["grpo_full"]
    normalizer = loss_normalizer(batch.lengths, config, MAX_LENGTH)
    ours, reference = (loss_of(b, config, normalizer).loss for b in (batch, exact))
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(reference.item(), rel=1e-5, abs=1e-6)


def shards_of(batch, cuts):
    """The batch split into micro-batches between completions."""
    edges = sorted({0, len(batch.advantage), *cuts})
    for low, high in itertools.pairwise(edges):
        rows = (batch.index >= low) & (batch.index < high)
        part = {k: v[rows] for k, v in vars(batch).items() if k != "advantage"}
        yield (
            dataclasses.replace(
                batch, **part | {"index": batch.index[rows] - low, "advantage": batch.advantage[low:high]}
            ),
            rows,
        )


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(CONFIGS)),
    st.lists(st.integers(1, 7), min_size=2, max_size=8),
    st.lists(st.integers(1, 7), max_size=5),
    st.integers(0, 10**6),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_any_split_into_micro_batches_gives_the_same_loss_gradient_and_metrics(name, lengths, cuts, seed, dtype):
    config, batch = CONFIGS[name], random_batch(seed, lengths, dtype)
    normalizer = loss_normalizer(batch.lengths, config, MAX_LENGTH)
    logp = batch.logp.clone().requires_grad_()
    whole = loss_of(batch, config, normalizer, logp=logp)
    whole.loss.backward()

    total, metrics = 0.0, None
    for part, rows in shards_of(batch, [c for c in cuts if c < len(lengths)]):
        part_logp = part.logp.clone().requires_grad_()
        output = loss_of(part, config, normalizer, logp=part_logp)
        output.loss.backward()
        assert torch.equal(part_logp.grad, logp.grad[rows])  # not merely close: each token's gradient is its own
        total += output.loss.item()
        metrics = output.metrics if metrics is None else metrics + output.metrics
    assert total == pytest.approx(whole.loss.item(), rel=1e-5 if dtype == torch.float32 else 1e-12, abs=1e-6)
    assert metrics.means() == pytest.approx(whole.metrics.means(), rel=1e-9, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_the_order_of_completions_does_not_matter(name, seed, rng):
    config, batch = CONFIGS[name], random_batch(seed, [3, 5, 1, 4])
    normalizer = loss_normalizer(batch.lengths, config, MAX_LENGTH)
    order = list(range(4))
    rng.shuffle(order)
    rows = torch.cat([(batch.index == i).nonzero()[:, 0] for i in order])
    part = {k: v[rows] for k, v in vars(batch).items() if k != "advantage"}
    place = torch.tensor([order.index(i) for i in range(4)])
    moved = dataclasses.replace(
        batch, **part | {"index": place[batch.index[rows]], "advantage": batch.advantage[torch.tensor(order)]}
    )
    a, b = (value_and_gradients(x, lambda y: loss_of(y, config, normalizer).loss) for x in (batch, moved))
    torch.testing.assert_close(a[0], b[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a[1][rows], b[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_tokens_have_exactly_zero_gradient_whatever_they_hold(name, garbage):
    config, batch = CONFIGS[name], random_batch(1, [4, 3, 6])
    normalizer = loss_normalizer(batch.lengths, config, MAX_LENGTH)
    spoilt = {
        k: torch.where(batch.mask, getattr(batch, k), garbage) for k in ("logp", "old", "rollout", "ref", "entropy")
    }
    clean = value_and_gradients(batch, lambda b: loss_of(b, config, normalizer).loss)
    dirty = value_and_gradients(dataclasses.replace(batch, **spoilt), lambda b: loss_of(b, config, normalizer).loss)
    for x, y in zip(clean, dirty, strict=True):
        assert torch.equal(x, y)
    assert (dirty[1][~batch.mask] == 0).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_without_tokens_or_fully_masked_is_zero_and_finite(name):
    config, batch = CONFIGS[name], random_batch(1, [2, 3])
    masked = dataclasses.replace(batch, mask=torch.zeros_like(batch.mask), logp=batch.logp.requires_grad_())
    output = loss_of(masked, config, 1.0)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert (batch.logp.grad == 0).all()
    assert set(output.metrics.means().values()) == {0.0}
    empty = {k: v[:0] for k, v in vars(batch).items()}
    assert loss_of(Batch(**empty), config, 1.0).loss.item() == 0.0


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("far", [50.0, -50.0, 1000.0])
def test_extreme_ratios_stay_finite(name, far):
    config, batch = CONFIGS[name], random_batch(5, [4, 3, 2], torch.float32)
    normalizer = loss_normalizer(batch.lengths, config, MAX_LENGTH)
    loss, gradient, _ = value_and_gradients(
        dataclasses.replace(batch, old=batch.logp - far, rollout=batch.logp + far, ref=batch.logp + min(far, 60.0)),
        lambda b: loss_of(b, config, normalizer).loss,
    )
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_on_policy_all_clipped_objectives_share_one_gradient():
    """At pi = pi_old every ratio is 1, so GRPO, dual clip, CISPO and plain REINFORCE agree."""
    batch = random_batch(2, [3, 4, 5])
    on_policy = dataclasses.replace(batch, old=batch.logp)
    gradients = [
        value_and_gradients(on_policy, lambda b, c=c: loss_of(b, c, 7.0).loss)[1]
        for c in (GRPO, LossConfig(dual_clip=3.0), LossConfig(objective="cispo"), LossConfig(ratio_level="sequence"))
    ]
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-12, atol=1e-14)


def test_no_gradient_reaches_anything_but_the_policy():
    batch = random_batch(2, [3, 4, 5])
    inputs = {k: getattr(batch, k).clone().requires_grad_() for k in ("logp", "old", "rollout", "ref", "advantage")}
    loss_of(batch, CONFIGS["grpo_full"], 3.0, **inputs).loss.backward()
    assert {k for k, v in inputs.items() if v.grad is not None} == {"logp"}


def test_logprob_difference_by_hand():
    # d = 0.5, -1.0 and a masked 9: mean |d| 0.75, max 1, mean -0.25;
    # k3: exp(0.5) - 1 - 0.5 = 0.1487213 and exp(-1) - 1 + 1 = 0.3678794, mean 0.2583003.
    train = torch.tensor([-1.0, -2.0, 8.0])
    rollout = torch.tensor([-1.5, -1.0, -1.0])
    result = logprob_difference(train, rollout, torch.tensor([True, True, False]))
    assert (result.mean_abs, result.max_abs, result.mean, result.num_tokens) == (0.75, 1.0, -0.25, 2)
    assert result.kl == pytest.approx(0.2583003, abs=1e-7)
    assert logprob_difference(train[:0], rollout[:0]).num_tokens == 0
    assert math.isnan(logprob_difference(torch.tensor([math.nan]), torch.tensor([0.0])).max_abs)
