"""Products of training: torch's own, or widened to fp32 where torch has no fast product for the dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast import ops
from sagc_fast.ops import logprobs, products


@pytest.fixture
def widened(monkeypatch):
    """As on a CPU without units for bf16, with blocks of a few rows."""
    monkeypatch.setattr(products, "_has_units", lambda dtype: False)
    monkeypatch.setattr(products, "BLOCK_BYTES", 4 * 24 * 5)


def close_to(exact, got, dtype):
    """One rounding of the result apart from the exact one, and what fp32 sums leave."""
    bound = torch.finfo(dtype).eps * exact.abs() + 1e-4 * exact.abs().max()
    assert got.dtype == dtype
    assert bool(((got.double() - exact).abs() <= bound).all())


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40), width=st.integers(1, 40), num_out=st.integers(1, 70), has_bias=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]), seed=st.integers(0, 2**16), block=st.integers(1, 4000),
)  # fmt: skip
def test_a_widened_product_is_the_exact_one_rounded_once(rows, width, num_out, has_bias, dtype, seed, block):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    factors = [draw(rows, width), draw(num_out, width), *([draw(num_out)] if has_bias else [])]
    dy = draw(rows, num_out)
    narrow = [x.clone().requires_grad_() for x in factors]
    exact = [x.double().requires_grad_() for x in factors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_has_units", lambda dtype: False)
        patch.setattr(products, "BLOCK_BYTES", block)
        y = products.linear(*narrow)
        y.backward(dy)
    wanted = torch.nn.functional.linear(*exact)
    wanted.backward(dy.double())
    if rows:
        close_to(wanted.detach(), y.detach(), dtype)
        for got, want in zip(narrow, exact, strict=True):
            close_to(want.grad, got.grad, dtype)


def test_gradients_nobody_wants_are_not_made(widened):
    x, weight = torch.randn(3, 24).bfloat16(), torch.randn(7, 24).bfloat16().requires_grad_()
    products.linear(x, weight).sum().backward()
    assert x.grad is None
    close_to(x.double().sum(0).expand(7, 24), weight.grad, torch.bfloat16)


def test_matrix_products_of_backward_passes(widened):
    a, b = torch.randn(6, 24).bfloat16(), torch.randn(24, 9).bfloat16()
    exact = a.double() @ b.double()
    close_to(exact, ops.mm(a, b), torch.bfloat16)
    out = torch.empty(6, 9, dtype=torch.bfloat16)
    assert ops.mm(a, b, out=out) is out
    close_to(exact, out, torch.bfloat16)
    total = torch.ones(6, 9)
    products.add_product_(total, a, b)
    torch.testing.assert_close(total.double(), exact + 1, rtol=1e-5, atol=1e-5)


def test_the_head_by_widened_products_is_the_exact_head(widened):
    hidden, head = (0.3 * torch.randn(11, 24)).bfloat16(), torch.randn(50, 24).bfloat16()
    targets = torch.randint(50, (11,))
    narrow = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    exact = [hidden.double().requires_grad_(), head.double().requires_grad_()]
    for factors in (narrow, exact):
        log_p, entropy = logprobs.token_logprobs(*factors, targets, 0.7, chunk=4)
        (log_p.sum() - 0.1 * entropy.sum()).backward()
    for got, want in zip(narrow, exact, strict=True):
        assert float((got.grad - want.grad).norm() / want.grad.norm()) < 2e-2


def test_torch_multiplies_itself_where_it_can(monkeypatch):
    monkeypatch.setattr(products, "_has_units", lambda dtype: True)
    x, weight = torch.randn(3, 24).bfloat16().requires_grad_(), torch.randn(7, 24).bfloat16()
    assert torch.equal(products.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert not products.is_widened(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_are_never_converted(widened, dtype):
    x, weight = torch.randn(3, 24, dtype=dtype), torch.randn(7, 24, dtype=dtype)
    assert torch.equal(products.linear(x, weight), torch.nn.functional.linear(x, weight))
