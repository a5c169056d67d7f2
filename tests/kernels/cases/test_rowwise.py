"""Norms, SwiGLU, rotary embedding with the KV write: equal to plain torch, gradients to float64."""

from __future__ import annotations

import pytest
import torch

from sagc_fast.ops import reference, triton_ops

EPS = 1e-6
both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def _close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, relative: float = 2.0) -> None:
    """Within a few roundings of the dtype, of the largest entry."""
    bound = relative * torch.finfo(dtype).eps * 4 * max(1.0, float(wanted.detach().abs().max()))
    assert found.shape == wanted.shape
    assert (found.cpu().double() - wanted.double()).abs().max() <= bound


@both
@pytest.mark.parametrize("width", [1, 33, 64])
def test_rms_norm_forward_and_backward(dtype: torch.dtype, width: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(width)
    x, residual, grad, grad_sum = (torch.randn(9, width, generator=generator).to(dtype) for _ in range(4))
    weight = torch.randn(width, generator=generator).to(dtype)
    exact = [t.double().requires_grad_() for t in (x, residual, weight)]
    normed, total = reference.add_rms_norm(*exact, EPS)
    (normed * grad.double() + total * grad_sum.double()).sum().backward()
    mine = [t.to(device).requires_grad_() for t in (x, residual, weight)]
    found = triton_ops.add_rms_norm(*mine, EPS)
    torch.autograd.backward(found, [grad.to(device), grad_sum.to(device)])
    for value, wanted in zip((*found, *(t.grad for t in mine)), (normed, total, *(t.grad for t in exact)), strict=True):
        assert value.dtype == dtype
        _close(value.detach(), wanted.detach(), dtype, relative=8.0)
    # The order of roundings is that of the plain version: the same bits but for the last one of the statistics.
    plain, plain_total = reference.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(found[1].cpu(), plain_total)
    _close(found[0].detach(), plain, dtype)


def test_norm_of_strided_rows_with_leading_axes(device: torch.device) -> None:
    x = torch.randn(5, 6, 16)[:, 1:3]
    weight = torch.randn(16)
    found = triton_ops.rms_norm(x.to(device), weight.to(device), EPS)
    _close(found, reference.rms_norm(x, weight, EPS), torch.float32)


@both
def test_silu_mul_forward_and_backward(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    x = (torch.randn(3, 2 * 1030, generator=generator) * 4).to(dtype)
    grad = torch.randn(3, 1030, generator=generator).to(dtype)
    exact = x.double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    wanted.backward(grad.double())
    mine = x.to(device).requires_grad_()
    found = triton_ops.silu_mul(mine)
    found.backward(grad.to(device))
    _close(found.detach(), wanted.detach(), dtype)
    _close(mine.grad, exact.grad, dtype)


@both
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 1, 6), (4, 2, 16)])
def test_rope_and_cache(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(heads)
    qkv = torch.randn(4, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    angles = torch.rand(40, head_dim // 2, generator=generator) * 6
    positions, slots = torch.tensor([0, 39, 7, 8]), torch.tensor([16, 3, 47, 32])
    caches = [torch.zeros(3, kv_heads, 16, head_dim, dtype=torch.bfloat16) for _ in "kv"]
    mine = [c.clone().to(device) for c in caches]
    tables = (angles.cos(), angles.sin())
    wanted = reference.rope_and_cache(q, k, v, *tables, positions, *caches, slots)
    q, k, v = qkv.to(device).split((heads, kv_heads, kv_heads), 1)
    moved = [t.to(device) for t in (*tables, positions)]
    found = triton_ops.rope_and_cache(q, k, v, *moved, *mine, slots.to(device))
    _close(found, wanted, dtype)
    for value, expected in zip(mine, caches, strict=True):
        _close(value, expected, torch.bfloat16)


@both
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 1, 6), (4, 2, 64), (1, 1, 256)])
def test_rotary_split_and_its_gradient(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> None:
    """Gradients arrive as attention leaves them (k and v as slices of one tensor) and once as an expanded sum's."""
    generator = torch.Generator().manual_seed(head_dim)
    shapes = [(5, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    qkv = torch.randn(5, (heads + 2 * kv_heads) * head_dim + 8, generator=generator).to(dtype)[:, :-8]
    angles = torch.rand(5, head_dim // 2, generator=generator) * 6
    tables = (angles.cos(), angles.sin())
    grad_q = torch.randn(shapes[0], generator=generator).to(dtype)
    grad_k, grad_v = torch.randn(5, 2 * kv_heads, head_dim, generator=generator).to(dtype).split(kv_heads, 1)
    exact, mine = qkv.double().requires_grad_(), qkv.to(device).requires_grad_()
    wanted = reference.rotary_split(exact, *(t.double() for t in tables), heads, kv_heads)
    torch.autograd.backward(wanted, [g.double() for g in (grad_q, grad_k, grad_v)])
    found = triton_ops.rotary_split(mine, *(t.to(device) for t in tables), heads, kv_heads)
    torch.autograd.backward(found, [g.to(device) for g in (grad_q, grad_k, grad_v)])
    for value, expected in zip((*found, mine.grad), (*wanted, exact.grad), strict=True):
        assert value.dtype == dtype
        _close(value.detach(), expected.detach(), dtype)
    mine.grad = None
    found = triton_ops.rotary_split(mine, *(t.to(device) for t in tables), heads, kv_heads)
    sum(part.sum() for part in found).backward()
    wanted = reference.rotary_split(exact, *(t.double() for t in tables), heads, kv_heads)
    expected = torch.autograd.grad(sum(part.sum() for part in wanted), exact)[0]
    _close(mine.grad, expected, dtype)


def test_nothing_to_turn(device: torch.device) -> None:
    empty = torch.empty(0, 32, device=device, requires_grad=True)
    q, k, v = triton_ops.rotary_split(empty, *torch.empty(2, 0, 4, device=device), 2, 1)
    (q.sum() + k.sum() + v.sum()).backward()
    assert q.shape == (0, 2, 8)
    assert empty.grad.shape == (0, 32)
