"""linear: right to rounding on awkward shapes, the same bits for a row whatever the other rows and the threads."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sagc_fast.ops.native import cpu_levels

# The tiles of AMX have kernels here and nowhere else; a model of them runs wherever there is AVX-512.
LEVELS = (*cpu_levels(), *(["amx_emulated"] if "avx512" in cpu_levels() else []))
pytestmark = pytest.mark.parametrize("native", LEVELS, indirect=True)
DTYPES = (torch.float32, torch.bfloat16)
SETTINGS = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@SETTINGS
@given(
    num_rows=st.integers(0, 70),
    num_out=st.integers(1, 60),
    num_in=st.integers(1, 900),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear_equals_float64_product_within_rounding(
    native: ModuleType, num_rows: int, num_out: int, num_in: int, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_in, generator=generator)
    weight = torch.randn(num_out, num_in, generator=generator)
    bias = torch.randn(num_out, generator=generator) if has_bias else None
    y = native.linear(x, weight, bias)
    assert y.shape == (num_rows, num_out)
    torch.testing.assert_close(y.double(), exact(x, weight, bias), rtol=1e-5, atol=2e-6 * num_in**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_in"), [(864, 288), (288, 768), (40, 1024), (33, 1537), (100, 4864)])
def test_bits_of_a_row_do_not_depend_on_the_other_rows(
    native: ModuleType, num_out: int, num_in: int, dtype: torch.dtype
) -> None:
    if native.cpu_level() == "amx_emulated":
        num_out = num_out % 50  # the model is slow
    x, weight = torch.randn(203, num_in, dtype=dtype), torch.randn(num_out, num_in, dtype=dtype)
    y = native.linear(x, weight)
    for num_rows in (1, 2, 3, 4, 5, 7, 8, 16, 17, 64, 200):
        start = int(torch.randint(0, 203 - num_rows + 1, ()))
        assert torch.equal(native.linear(x[start : start + num_rows], weight), y[start : start + num_rows])
    order = torch.randperm(203)
    assert torch.equal(native.linear(x[order], weight), y[order])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_number_of_threads(native: ModuleType, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(*size, dtype=dtype) for size in ((37, 576), (1001, 576), (1001,)))
    y = native.linear(x, weight, bias)
    torch.set_num_threads(1)
    assert torch.equal(native.linear(x, weight, bias), y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_an_output_do_not_depend_on_the_other_columns(native: ModuleType, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 301, dtype=dtype), torch.randn(50, 301, dtype=dtype)
    y = native.linear(x, weight)
    for start, end in ((0, 1), (3, 20), (17, 50)):
        assert torch.equal(native.linear(x, weight[start:end]), y[:, start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_give_the_bits_of_contiguous_ones(native: ModuleType, dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 300, dtype=dtype), torch.randn(21, 400, dtype=dtype)
    expected = native.linear(x[:, 30:230].contiguous(), weight[:, 100:300].contiguous())
    assert torch.equal(native.linear(x[:, 30:230], weight[:, 100:300]), expected)


@SETTINGS
@given(
    num_rows=st.integers(1, 70),
    num_out=st.integers(1, 60),
    num_in=st.integers(1, 900),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_bf16_accumulates_in_fp32_and_rounds_once(
    native: ModuleType, num_rows: int, num_out: int, num_in: int, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_in, generator=generator).bfloat16()
    weight = torch.randn(num_out, num_in, generator=generator).bfloat16()
    bias = torch.randn(num_out, generator=generator).bfloat16() if has_bias else None
    y, wanted = native.linear(x, weight, bias), exact(x, weight, bias)
    assert y.dtype == torch.bfloat16
    # Half a unit in the last place of bf16 (8 significant bits), plus the fp32 sum's error.
    assert ((y.double() - wanted).abs() <= wanted.abs() * 2.0**-8 + 1e-4).all()


def test_fp32_rows_meet_bf16_weights(native: ModuleType) -> None:
    x, weight = torch.randn(6, 130), torch.randn(19, 130).bfloat16()
    assert torch.equal(native.linear(x, weight), native.linear(x, weight.float()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_row(native: ModuleType, dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 64, dtype=dtype), torch.randn(30, 64, dtype=dtype)
    clean = native.linear(x, weight)
    x[2, 5], x[4, 63] = float("nan"), float("inf")
    y = native.linear(x, weight)
    assert y[2].isnan().all()
    assert y[4].isinf().all()
    keep = [0, 1, 3, 5, 6]
    assert torch.equal(y[keep], clean[keep])


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.zeros(2, 3), torch.zeros(4, 5), None),
        (torch.zeros(3), torch.zeros(4, 3), None),
        (torch.zeros(2, 3), torch.zeros(3, 4).t(), None),
        (torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(3)),
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(4, 3), None),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(
    native: ModuleType, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    with pytest.raises(RuntimeError, match=r"linear needs|must be float32 or bfloat16"):
        native.linear(x, weight, bias)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-8)])
def test_nothing_outside_the_operands_is_read(native: ModuleType, dtype: torch.dtype, rounding: float) -> None:
    """Operands cut out of buffers full of NaN: a lane read too far would poison a sum."""
    for num_rows, num_out, num_in in ((1, 1, 1), (3, 5, 9), (4, 17, 395), (2, 31, 769), (18, 33, 65)):
        x = torch.full((num_rows + 2, num_in + 16), float("nan"), dtype=dtype)
        weight = torch.full((num_out + 2, num_in + 16), float("nan"), dtype=dtype)
        inner = (slice(1, -1), slice(8, 8 + num_in))
        x[inner] = torch.randn(num_rows, num_in).to(dtype)
        weight[inner] = torch.randn(num_out, num_in).to(dtype)
        y = native.linear(x[inner], weight[inner])
        torch.testing.assert_close(y.double(), exact(x[inner], weight[inner], None), rtol=rounding, atol=1e-4)
