"""rms_norm, add_rms_norm, silu_mul, rope_and_cache: right against float64, row by row the same bits."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return weight.double() * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


@SETTINGS
@given(num_rows=st.integers(0, 9), width=st.integers(1, 900), scale=st.sampled_from([1e-4, 1.0, 1e4]))
def test_norms_equal_float64_within_rounding(native: ModuleType, num_rows: int, width: int, scale: float) -> None:
    x, residual = torch.randn(num_rows, width) * scale, torch.randn(num_rows, width) * scale
    weight = torch.randn(width)
    y = native.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(y.double(), exact_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-7)
    y, new_residual = native.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, residual + x)
    assert torch.equal(y, native.rms_norm(new_residual, weight, 1e-5))


@SETTINGS
@given(num_rows=st.integers(0, 9), width=st.integers(1, 900), scale=st.sampled_from([0.1, 3.0, 60.0]))
def test_silu_mul_equals_float64_within_rounding(native: ModuleType, num_rows: int, width: int, scale: float) -> None:
    gate_up = torch.randn(num_rows, 2 * width) * scale
    gate, up = gate_up.double().chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(native.silu_mul(gate_up).double(), wanted, rtol=2e-6, atol=1e-30)


def test_silu_mul_of_extreme_gates_is_finite_and_nan_stays_nan(native: ModuleType) -> None:
    gates = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, float("nan"), 1.0]])
    y = native.silu_mul(torch.cat([gates, torch.ones_like(gates)], 1))[0]
    assert y[:7].isfinite().all()
    assert y[:3].abs().max() < 1e-7
    assert torch.equal(y[4:7], gates[0, 4:7])
    assert y[7].isnan()


def rope_case(
    num_tokens: int, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    num_blocks = num_tokens // block_size + 2
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    q, k, v = qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 1)
    angles = torch.randn(50, head_dim // 2)
    caches = [torch.full((num_blocks, kv_heads, block_size, head_dim), 7.0).to(dtype) for _ in range(2)]
    positions = torch.randint(0, 50, (num_tokens,))
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    return [
        q.view(num_tokens, heads, head_dim),
        k.view(num_tokens, kv_heads, head_dim),
        v.view(num_tokens, kv_heads, head_dim),
        angles.cos(),
        angles.sin(),
        positions,
        *caches,
        slots,
    ]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    a, b = x.double().chunk(2, -1)
    c, s = cos.double()[positions].unsqueeze(1), sin.double()[positions].unsqueeze(1)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


@SETTINGS
@given(
    num_tokens=st.integers(0, 20),
    heads=st.sampled_from([(1, 1), (6, 6), (9, 3)]),
    head_dim=st.sampled_from([2, 14, 32, 48, 64, 128]),
    block_size=st.sampled_from([1, 5, 16]),
)
def test_rope_rotates_and_writes_exactly_the_slots(
    native: ModuleType, num_tokens: int, heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    case = rope_case(num_tokens, *heads, head_dim, block_size)
    q, k, v, cos, sin, positions, k_cache, v_cache, slots = case
    out = native.rope_and_cache(*case)
    torch.testing.assert_close(out.double(), rotated(q, cos, sin, positions), rtol=1e-5, atol=1e-6)
    k_rows, v_rows = (c.transpose(1, 2).reshape(-1, *c.shape[1::2]) for c in (k_cache, v_cache))
    torch.testing.assert_close(k_rows[slots].double(), rotated(k, cos, sin, positions), rtol=1e-5, atol=1e-6)
    assert torch.equal(v_rows[slots], v)
    others = torch.ones(len(k_rows), dtype=torch.bool)
    others[slots] = False
    assert (k_rows[others] == 7).all()
    assert (v_rows[others] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rope_narrows_to_the_dtype_of_the_cache(native: ModuleType, dtype: torch.dtype) -> None:
    """To nearest even, also where fp16 has only denormals, overflows, or half of its last place decides."""
    case = rope_case(5, 4, 2, 36, 16)
    awkward = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.0, 65520.0, -1e30, 2.0**-14, 1.5e-5, 3 * 2.0**-25, 2.0**-25, 1e-9]
    case[2] = case[2].clone(memory_format=torch.contiguous_format)
    case[2].view(-1)[:11] = torch.tensor([*awkward, float("nan")])
    wide_k, wide_v = case[6].clone(), case[7].clone()
    native.rope_and_cache(*case[:6], wide_k, wide_v, case[8])
    narrow_k, narrow_v = case[6].to(dtype), case[7].to(dtype)
    native.rope_and_cache(*case[:6], narrow_k, narrow_v, case[8])
    torch.testing.assert_close(narrow_k, wide_k.to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(narrow_v, wide_v.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("index", "value", "message"), [(5, 50, "position of token 3"), (8, 999, "slot of token 3")])
def test_rope_refuses_places_outside_tables_and_cache(native: ModuleType, index: int, value: int, message: str) -> None:
    case = rope_case(5, 4, 2, 32, 16)
    before = case[6].clone()
    case[index][3] = value
    with pytest.raises(RuntimeError, match=message):
        native.rope_and_cache(*case)
    assert torch.equal(case[6], before)


def test_bf16_rounds_where_transformers_does(native: ModuleType) -> None:
    x, residual, weight = (torch.randn(s).bfloat16() for s in ((7, 100), (7, 100), (100,)))
    y, new_residual = native.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, x + residual)
    wide = new_residual.double()
    normed = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).float().bfloat16()
    # fp32 statistics may tip a value that stands between two bf16 numbers: rare, and by one step only.
    assert (y != weight * normed).float().mean() < 0.01
    torch.testing.assert_close(y, weight * normed, rtol=2.0**-7, atol=0)
    gate_up = torch.randn(7, 200).bfloat16()
    gate, up = gate_up.chunk(2, -1)
    wanted = torch.nn.functional.silu(gate.float()).bfloat16() * up
    assert (native.silu_mul(gate_up) != wanted).float().mean() < 0.01


def by_rows(native: ModuleType, width: int) -> list[tuple[Callable[..., torch.Tensor], list[torch.Tensor]]]:
    weight = torch.randn(width)
    rows = [torch.randn(37, width), torch.randn(37, width)]
    return [
        (lambda x: native.rms_norm(x, weight, 1e-6), rows[:1]),
        (lambda x, r: native.add_rms_norm(x, r, weight, 1e-6)[0], rows),
        (native.silu_mul, [torch.randn(37, 2 * width)]),
    ]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("width", [288, 101, 20000])
def test_bits_of_a_row_do_not_depend_on_other_rows_or_threads(native: ModuleType, width: int) -> None:
    for op, operands in by_rows(native, width):
        y = op(*operands)
        for start, end in ((0, 1), (5, 8), (36, 37)):
            assert torch.equal(op(*[x[start:end].contiguous() for x in operands]), y[start:end])
        torch.set_num_threads(1)
        assert torch.equal(op(*operands), y)
        torch.set_num_threads(2)


@pytest.mark.parametrize(
    ("op", "operands"),
    [
        ("rms_norm", (torch.zeros(2, 4), torch.zeros(5), 1e-5)),
        ("rms_norm", (torch.zeros(4, 2).t(), torch.zeros(4), 1e-5)),
        ("add_rms_norm", (torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(4), 1e-5)),
        ("silu_mul", (torch.zeros(2, 5),)),
        ("silu_mul", (torch.zeros(2, 4, dtype=torch.int32),)),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(native: ModuleType, op: str, operands: tuple) -> None:
    with pytest.raises(RuntimeError, match=r"needs|must be"):
        getattr(native, op)(*operands)
