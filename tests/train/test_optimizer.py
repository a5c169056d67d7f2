"""The optimizer: AdamW by the formula, clipping, warm-up, fp32 masters, bit-exact continuation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sagc_fast.config import OptimizerOptions
from sagc_fast.train.optimizer import PolicyOptimizer


def model(dtype=torch.float32, seed=0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def backward(net: nn.Module, seed: int, scale: float = 1.0) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    (net(x.to(next(net.parameters()).dtype)).float().square().sum() * scale).backward()


def test_one_update_by_the_formula():
    """theta <- theta (1 - lr wd) - lr m^ / (sqrt(v^) + eps), the decay on matrices alone; by hand in float64."""
    options = OptimizerOptions(learning_rate=0.1, warmup_steps=0, weight_decay=0.5, max_grad_norm=1e9)
    net = model()
    optimizer = PolicyOptimizer(net, options)
    backward(net, 1)
    wanted = {}
    for name, p in net.named_parameters():
        g = p.grad.double()
        decayed = p.detach().double() * (1 - 0.1 * (0.5 if p.ndim == 2 else 0.0))
        wanted[name] = decayed - 0.1 * g / (g.abs() + 1e-8)
    optimizer.step()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.detach().double(), wanted[name], rtol=1e-5, atol=1e-6)


def test_clipping_scales_to_the_norm_and_reports_the_norm_before():
    net = model()
    optimizer = PolicyOptimizer(net, OptimizerOptions(max_grad_norm=0.5))
    backward(net, 1, scale=100.0)
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in net.parameters()))
    assert optimizer.step() == pytest.approx(norm, rel=1e-5)
    moments = [s["exp_avg"] for s in optimizer._adamw.state.values()]
    clipped = math.sqrt(sum(float((m.double() / 0.1).square().sum()) for m in moments))
    assert clipped == pytest.approx(0.5, rel=1e-3)


def test_warm_up_is_linear_and_counts_applied_updates():
    net = model()
    optimizer = PolicyOptimizer(net, OptimizerOptions(learning_rate=1.0, warmup_steps=4))
    rates = []
    for i in range(6):
        rates.append(optimizer.learning_rate)
        backward(net, i)
        optimizer.step()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(bad, dtype):
    net = model(dtype)
    optimizer = PolicyOptimizer(net, OptimizerOptions())
    backward(net, 0)
    optimizer.step()
    before = [p.detach().clone() for p in net.parameters()]
    backward(net, 1, scale=bad)
    assert not math.isfinite(optimizer.step())
    assert optimizer.num_updates == 1
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert all(p.grad is None for p in net.parameters())


def test_bf16_parameters_follow_fp32_masters():
    """Updates far below bf16's resolution add up in the master and move the parameter in the end."""
    net = model(torch.bfloat16)
    optimizer = PolicyOptimizer(net, OptimizerOptions(learning_rate=1e-5, warmup_steps=0))
    start = net[0].weight.detach().clone()
    for _ in range(200):
        backward(net, 0)
        optimizer.step()
    master = optimizer._masters["0.weight"]
    assert master.dtype == torch.float32
    assert torch.equal(net[0].weight.detach(), master.detach().bfloat16())
    moved = (master.detach() - start.float()).abs()
    assert moved.max() > 1e-3


def test_gradients_of_micro_batches_add_up_in_fp32_for_bf16_parameters():
    net = model(torch.bfloat16)
    optimizer = PolicyOptimizer(net, OptimizerOptions())
    total = None
    for seed in range(8):
        for p in net.parameters():
            p.grad = None
        single = model(torch.bfloat16)
        backward(single, seed)
        g = single[0].weight.grad.float()
        total = g if total is None else total + g
        backward(net, seed)
    assert torch.equal(optimizer._masters["0.weight"].grad, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_continues_to_the_bit(dtype):
    def run(net, optimizer, seeds):
        for seed in seeds:
            backward(net, seed)
            optimizer.step()

    options = OptimizerOptions(learning_rate=1e-2, weight_decay=0.1)
    straight = model(dtype)
    optimizer = PolicyOptimizer(straight, options)
    run(straight, optimizer, range(3))
    saved = {k: v.clone() for k, v in optimizer.state_tensors().items()}
    weights = {k: v.clone() for k, v in straight.state_dict().items()}
    run(straight, optimizer, range(3, 6))

    resumed = model(dtype, seed=9)
    resumed.load_state_dict(weights)
    again = PolicyOptimizer(resumed, options)
    again.load_state_tensors(saved, num_updates=3)
    run(resumed, again, range(3, 6))
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    for key, value in optimizer.state_tensors().items():
        assert torch.equal(value, again.state_tensors()[key]), key


def test_state_of_another_model_is_refused():
    optimizer = PolicyOptimizer(model(), OptimizerOptions())
    with pytest.raises(KeyError):
        optimizer.load_state_tensors({}, num_updates=1)
    other = PolicyOptimizer(nn.Linear(2, 2), OptimizerOptions())
    with pytest.raises(ValueError, match="shape"):
        other.load_state_tensors(
            {f"{k}.{n}": torch.zeros(3) for k in ("exp_avg", "exp_avg_sq") for n in ("weight", "bias")}, 1
        )
