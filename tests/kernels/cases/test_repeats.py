"""Two launches of the same work are equal to the bit: no kernel adds in an order that chance decides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sagc_fast import ops
from sagc_fast.algo.config import DAPO
from sagc_fast.algo.loss import policy_loss
from sagc_fast.ops import triton_ops, triton_varlen
from sagc_fast.ops.layouts import PackedLayout, PagedLayout

Results = tuple[torch.Tensor, ...]


def _norms_and_gates(randn: Callable[..., torch.Tensor]) -> Results:
    x, residual, weight = (t.requires_grad_() for t in (randn(40, 64), randn(40, 64), randn(64)))
    normed, total = triton_ops.add_rms_norm(x, residual, weight, 1e-6)
    gated = triton_ops.silu_mul(normed)
    q, k, v = triton_ops.rotary_split(total, randn(40, 4), randn(40, 4), 4, 2)
    ((gated * gated).sum() + (q * q).sum() + (k * k * k).sum() + v.sum()).backward()
    return gated, q, k, x.grad, residual.grad, weight.grad


def _training_attention(randn: Callable[..., torch.Tensor]) -> Results:
    layout = PackedLayout(torch.zeros(60, dtype=torch.int64), ((0, 20),), (((20, 30), (50, 10)),))
    q, k, v = (t.requires_grad_() for t in (randn(60, 4, 16), randn(60, 2, 16), randn(60, 2, 16)))
    out = triton_varlen.varlen_attention(q, k, v, layout, 0.3)
    (out * out).sum().backward()
    return out, q.grad, k.grad, v.grad


def _paged_attention(randn: Callable[..., torch.Tensor]) -> Results:
    device = randn(1).device

    def integers(rows: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(rows, dtype=dtype, device=device)

    none = integers([], torch.int64)
    layout = PagedLayout(
        none, integers([0, 1, 2, 7]), integers([40, 35, 20]), integers([[0, 1, 2], [0, 3, 4], [5, 6, 0]]), none, none,
        integers([0, 0, -1]), integers([1, 1, 0]), 5, 40,
    )  # fmt: skip
    return (triton_ops.paged_attention(randn(7, 4, 16), randn(8, 2, 16, 16), randn(8, 2, 16, 16), layout, 0.3),)


def _sampling(randn: Callable[..., torch.Tensor]) -> Results:
    logits = randn(3, 5000)
    keys = tuple((randn(3) * 1e6).long() for _ in range(4))
    ones = torch.ones(3, device=logits.device)
    filtered = triton_ops.sample_keyed_tokens(logits, keys, ones, ones.long() * 50, ones * 0.9, ones * 0.01)
    return *triton_ops.sample_keyed_tokens(logits, keys, ones), *filtered


def _logprobs_and_loss(randn: Callable[..., torch.Tensor]) -> Results:
    hidden, head = randn(30, 8).requires_grad_(), randn(300, 8).requires_grad_()
    targets = torch.arange(30, device=hidden.device)
    logp, entropy = triton_ops.token_logprobs(hidden, head, targets, 0.7, chunk=13)
    with ops.use_backend("triton"):
        output = policy_loss(logp, logp.detach() + 0.1, randn(3), targets // 10, config=DAPO, normalizer=30.0)
    (output.loss + entropy.sum()).backward()
    return logp, entropy, output.loss, hidden.grad, head.grad


WORKS = (_norms_and_gates, _training_attention, _paged_attention, _sampling, _logprobs_and_loss)


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__.strip("_"))
def test_two_launches_are_equal_to_the_bit(
    work: Callable[[Callable[..., torch.Tensor]], Results], device: torch.device
) -> None:
    def run() -> Results:
        generator = torch.Generator().manual_seed(0)
        return work(lambda *size: torch.randn(size, generator=generator).to(device))

    for one, other in zip(run(), run(), strict=True):
        assert torch.equal(one, other)
