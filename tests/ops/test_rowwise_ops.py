"""Linear, norms, SwiGLU and rotation in plain torch: right, and a row's bits its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast.ops import reference

RANDOM_SHAPES = settings(max_examples=40, deadline=None)


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def _check_rows(function, x: torch.Tensor, seed: int) -> None:
    """A row alone, among others, and in another place has the same bits."""
    whole = function(x)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    torch.testing.assert_close(function(x[order]), whole[order], rtol=0, atol=0)
    for row in {0, len(x) - 1, int(order[0])}:
        torch.testing.assert_close(function(x[row : row + 1]), whole[row : row + 1], rtol=0, atol=0)
    cut = 1 + seed % len(x)
    torch.testing.assert_close(function(x[:cut]), whole[:cut], rtol=0, atol=0)
    torch.testing.assert_close(function(x[len(x) - cut :]), whole[len(x) - cut :], rtol=0, atol=0)


@pytest.mark.usefixtures("num_threads")
class TestRowIndependence:
    @RANDOM_SHAPES
    @given(st.integers(1, 70), st.integers(1, 130), st.integers(1, 130), st.booleans(), st.integers(0, 10**6))
    def test_linear(self, rows: int, width: int, out: int, has_bias: bool, seed: int) -> None:
        weight, bias = _randn(out, width, seed=seed), _randn(out, seed=seed + 1) if has_bias else None
        _check_rows(lambda x: reference.linear(x, weight, bias), _randn(rows, width, seed=seed + 2), seed)

    @pytest.mark.parametrize("rows", [255, 256, 300, 331])
    def test_linear_on_many_rows(self, rows: int) -> None:
        weight = _randn(96, 288, seed=1)
        _check_rows(lambda x: reference.linear(x, weight), _randn(rows, 288, seed=rows), rows)

    @RANDOM_SHAPES
    @given(st.integers(1, 70), st.integers(1, 200), st.integers(0, 10**6))
    def test_norms_and_swiglu(self, rows: int, width: int, seed: int) -> None:
        weight = _randn(width, seed=seed)
        x = _randn(rows, width, seed=seed + 1)
        _check_rows(lambda x: reference.rms_norm(x, weight, 1e-6), x, seed)
        _check_rows(lambda x: reference.add_rms_norm(x, x.flip(1), weight, 1e-6)[0], x, seed)
        _check_rows(reference.silu_mul, _randn(rows, 2 * width, seed=seed + 2), seed)


@RANDOM_SHAPES
@given(st.integers(0, 70), st.integers(1, 60), st.integers(1, 60), st.integers(0, 10**6))
def test_linear_is_the_product(rows: int, width: int, out: int, seed: int) -> None:
    x, weight, bias = _randn(rows, width, seed=seed), _randn(out, width, seed=seed + 1), _randn(out, seed=seed + 2)
    expected = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(reference.linear(x, weight, bias).double(), expected, rtol=1e-5, atol=1e-4)


def test_linear_reads_a_strided_input() -> None:
    x = _randn(40, 64, seed=0)
    weight = _randn(24, 33, seed=1)
    torch.testing.assert_close(
        reference.linear(x[:, 5:38], weight), reference.linear(x[:, 5:38].clone(), weight), rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norm_and_swiglu_follow_their_formulas(dtype: torch.dtype) -> None:
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    x, weight = _randn(9, 50, seed=0).to(dtype), _randn(50, seed=1).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normed, residual = reference.add_rms_norm(x, torch.zeros_like(x), weight, 1e-5)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), expected, **tolerance)
    assert torch.equal(residual, x)
    gate, up = wide.chunk(2, -1)
    torch.testing.assert_close(reference.silu_mul(x).double(), gate / (1 + (-gate).exp()) * up, **tolerance)


def test_swiglu_saturates_without_nan() -> None:
    x = torch.tensor([[-1e4, 1e4, 0.0, 1.0, 1.0, 1.0]])
    assert reference.silu_mul(x).tolist() == [[0.0, 1e4, 0.0]]


def test_rotation_turns_pairs_and_the_cache_gets_rotated_keys() -> None:
    """Dimension i turns with i + D/2 by position times frequency; values are stored as they are."""
    tokens, heads, head_dim, block_size = 5, 2, 6, 4
    q, k, v = (_randn(tokens, heads, head_dim, seed=s) for s in range(3))
    angles = torch.arange(30.0).unsqueeze(1) * torch.tensor([1.0, 0.1, 0.01])
    positions, slots = torch.tensor([7, 0, 3, 29, 11]), torch.tensor([9, 2, 15, 4, 0])
    k_cache, v_cache = (torch.full((4, heads, block_size, head_dim), float("nan")) for _ in "kv")
    out = reference.rope_and_cache(q, k, v, angles.cos(), angles.sin(), positions, k_cache, v_cache, slots)

    def turned(x: torch.Tensor) -> torch.Tensor:
        pair = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones(tokens, 1, 3), angles[positions][:, None])
        return torch.cat((pair.real, pair.imag), -1)

    torch.testing.assert_close(out, turned(q))
    for token, slot in enumerate(slots.tolist()):
        torch.testing.assert_close(k_cache[slot // 4, :, slot % 4], turned(k)[token])
        assert torch.equal(v_cache[slot // 4, :, slot % 4], v[token])
    assert int(k_cache.isnan().any(-1).all(1).sum()) == 16 - tokens


def test_a_wide_weight_is_probed_by_itself_and_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = _randn(90, 64, seed=1), _randn(200, 64, seed=2)
    wanted = reference.linear(x, weight)
    monkeypatch.setattr(reference, "_tiles_of_shapes", {})
    monkeypatch.setattr(reference, "PROBE_BYTES", 1)
    assert torch.equal(reference.linear(x, weight), wanted)
    (tiles,) = reference._tiles_of_shapes.values()
    assert max(tiles) <= reference.TILE_ROWS
