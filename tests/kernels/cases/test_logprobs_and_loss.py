"""Log-probs from hidden states and the policy loss on top: equal to plain torch, gradients to float64."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sagc_fast import ops
from sagc_fast.algo.config import CISPO, DAPO, DR_GRPO, GRPO, GSPO, LossConfig
from sagc_fast.algo.loss import linear_policy_loss, loss_normalizer, policy_loss
from sagc_fast.ops import logprobs, triton_ops

CONFIGS: dict[str, LossConfig] = {
    "grpo_kl": replace(GRPO, kl_beta=0.05),
    "dr_grpo_k1": replace(DR_GRPO, kl_beta=0.1, kl_estimator="k1"),
    "dapo_dual_truncate": replace(DAPO, dual_clip=1.5, rollout_is="truncate", rollout_is_cap=1.1),
    "cispo_k2_mask": replace(
        CISPO,
        clip_high=0.2,
        kl_beta=0.1,
        kl_estimator="k2",
        rollout_is="mask",
        rollout_is_cap=1.3,
        rollout_is_floor=0.8,
    ),
    "entropy": replace(DAPO, entropy_coef=0.02),
    "gspo": GSPO,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_token_logprobs(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 16, generator=generator).to(dtype)
    head = torch.randn(4099, 16, generator=generator).to(dtype)
    targets = torch.randint(0, 4099, (7,), generator=generator)
    targets[0], targets[1] = 0, 4098
    grads = torch.randn(2, 7, generator=generator)
    exact = [x.double().requires_grad_() for x in (hidden, head)]
    wanted = logprobs.token_logprobs(*exact, targets, 0.7)
    torch.autograd.backward(wanted, [*grads.double()])
    mine = [x.to(device).requires_grad_() for x in (hidden, head)]
    found = triton_ops.token_logprobs(*mine, targets.to(device), 0.7, chunk=3)
    torch.autograd.backward(found, [*grads.to(device)])
    values = zip((*found, *(x.grad for x in mine)), (*wanted, *(x.grad for x in exact)), strict=True)
    for value, expected in values:
        bound = (2e-5 if dtype == torch.float32 else 5e-2) * max(1.0, float(expected.detach().abs().max()))
        assert (value.detach().cpu().double() - expected.detach()).abs().max() <= bound


def _inputs(seed: int) -> dict[str, torch.Tensor]:
    """Ratios on both sides of every bound, ties at ratio 1, a completion without advantage, values under a mask."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 1, 9, 3])
    num_tokens = int(lengths.sum())
    old = -torch.rand(num_tokens, generator=generator) * 3
    logp = old + torch.randn(num_tokens, generator=generator) * 0.4
    logp[2] = old[2]
    mask = torch.rand(num_tokens, generator=generator) > 0.2
    mask[5] = False
    logp[5], old[5] = float("nan"), float("inf")
    noise = torch.randn(2, num_tokens, generator=generator) * 0.3
    return {
        "logp": logp, "old": old, "advantages": torch.tensor([1.3, -0.4, -1.0, 0.0]),
        "index": torch.repeat_interleave(torch.arange(4), lengths), "mask": mask, "ref": logp + noise[0],
        "rollout": old + noise[1], "entropy": torch.rand(num_tokens, generator=generator),
    }  # fmt: skip


def _loss(x: dict[str, torch.Tensor], config: LossConfig, entropy: torch.Tensor | None):
    normalizer = loss_normalizer(torch.bincount(x["index"].cpu()), config, max_length=10)
    return policy_loss(
        x["logp"], x["old"], x["advantages"], x["index"], x["mask"], config=config, normalizer=normalizer,
        ref_logp_N=x["ref"], rollout_logp_N=x["rollout"], entropy_N=entropy,
    )  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_policy_loss_and_its_gradients(name: str, device: torch.device) -> None:
    x = _inputs(len(name))
    exact = {key: value.double() if value.is_floating_point() else value for key, value in x.items()}
    exact["logp"].requires_grad_()
    exact["entropy"].requires_grad_()
    wanted = _loss(exact, CONFIGS[name], exact["entropy"])
    wanted.loss.backward()
    mine = {key: value.to(device) for key, value in x.items()}
    mine["logp"].requires_grad_()
    mine["entropy"].requires_grad_()
    with ops.use_backend("triton"):
        found = _loss(mine, CONFIGS[name], mine["entropy"])
        found.loss.backward()
    torch.testing.assert_close(found.loss.detach().cpu().double(), wanted.loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine["logp"].grad.cpu().double(), exact["logp"].grad, rtol=1e-5, atol=1e-6)
    if CONFIGS[name].entropy_coef:
        torch.testing.assert_close(mine["entropy"].grad.cpu().double(), exact["entropy"].grad, rtol=1e-5, atol=1e-7)
    for field in fields(wanted.metrics):
        value, expected = (getattr(output.metrics, field.name).cpu() for output in (found, wanted))
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=field.name)


@pytest.mark.parametrize("name", ["grpo_kl", "entropy", "gspo"])
def test_linear_policy_loss_in_one_sweep(name: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(9)
    x = _inputs(4)
    x["old"][5], x["ref"][5] = -1.0, -1.0
    num_tokens = len(x["old"])
    hidden, head = torch.randn(num_tokens, 8, generator=generator), torch.randn(50, 8, generator=generator) * 0.3
    targets = torch.randint(0, 50, (num_tokens,), generator=generator)

    def run(cast, where: torch.device | str):
        tensors = {k: (cast(v) if v.is_floating_point() else v).to(where) for k, v in x.items()}
        leaves = [cast(t).to(where).requires_grad_() for t in (hidden, head)]
        output, logp = linear_policy_loss(
            *leaves, targets.to(where), tensors["old"], tensors["advantages"], tensors["index"], tensors["mask"],
            temperature=0.8, config=CONFIGS[name], normalizer=7.0, ref_logp_N=tensors["ref"],
            rollout_logp_N=tensors["rollout"],
        )  # fmt: skip
        (output.loss * 2).backward()
        return output.loss.detach(), logp, *(leaf.grad for leaf in leaves), output.metrics.entropy

    wanted = run(torch.Tensor.double, "cpu")
    with ops.use_backend("triton"):
        found = run(torch.Tensor.float, device)
    for value, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(value.cpu().double(), expected.double(), rtol=2e-5, atol=2e-5)


def test_nothing_to_train_on(device: torch.device) -> None:
    empty = torch.empty(0, device=device)
    index = torch.empty(0, dtype=torch.int64, device=device)
    with ops.use_backend("triton"):
        output = policy_loss(empty, empty, torch.zeros(1, device=device), index, config=GRPO, normalizer=1.0)
        hidden, head = torch.empty(0, 4, device=device), torch.ones(5, 4, device=device)
        logp, entropy = ops.token_logprobs(hidden, head, index)
    assert float(output.loss) == 0.0
    assert output.metrics.means()["ratio"] == 0.0
    assert logp.shape == entropy.shape == (0,)


class HeadPasses(TorchDispatchMode):
    """Names of the operations that write something as large as the head."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.names = shape, []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.shape == self.shape and not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return out


def test_the_heads_gradient_is_passed_over_no_more_than_its_chunks_ask_for(device: torch.device) -> None:
    """In fp32 it takes 1.6 GB at Llama-3.2-3B; zeros to add a single chunk to were two passes more."""
    hidden, head = torch.randn(5, 4, device=device), torch.randn(9, 4, device=device)
    for chunk, wanted in ((5, ["mm"]), (2, ["mm", "mm", "add_", "mm", "add_"])):
        grads = triton_ops.HeadGradients(hidden, head, needs_hidden=True, needs_head=True)
        logits_grad = torch.randn(5, 9, device=device)
        with HeadPasses(head.shape) as passes:
            for start in range(0, 5, chunk):
                grads.add(slice(start, start + chunk), logits_grad[start : start + chunk])
            grad_hidden, grad_head = grads.result()
        assert passes.names == wanted
        torch.testing.assert_close(grad_head, logits_grad.t() @ hidden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad_hidden, logits_grad @ head, rtol=1e-5, atol=1e-5)
    nothing = triton_ops.HeadGradients(hidden[:0], head, needs_hidden=True, needs_head=True).result()[1]
    assert torch.equal(nothing, torch.zeros_like(head))
    assert triton_ops.HeadGradients(hidden, head, needs_hidden=True, needs_head=False).result()[1] is None
