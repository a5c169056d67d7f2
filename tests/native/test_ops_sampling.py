"""sample_tokens: the token that the float64 distribution prescribes, and its log-probability.

A uniform number within rounding of a boundary of the cumulative distribution may fall to either side (fp32 weights,
relative error about 1e-7); such rows accept both neighbours.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sagc_fast.ops import sampling

SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ROUNDING = 1e-6


def exact(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token, log-probs of all tokens, distance of u to the nearest boundary) in float64."""
    z = logits.double() / torch.where(temperature == 0, 1.0, temperature).double().unsqueeze(1)
    logprobs = torch.log_softmax(z, -1)
    cumulative = logprobs.exp().cumsum(-1)
    token = (cumulative <= uniform.unsqueeze(1) * cumulative[:, -1:]).sum(-1)
    token = torch.where(temperature == 0, logits.argmax(-1), token)
    distance = (cumulative - uniform.unsqueeze(1)).abs().amin(-1)
    return token, logprobs, torch.where(temperature == 0, 1.0, distance)


@SETTINGS
@given(
    num_rows=st.integers(1, 12),
    vocab_size=st.sampled_from([1, 2, 7, 8, 255, 256, 257, 4096, 5001, 150_000]),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 999),
)
def test_token_and_logprob_equal_the_float64_distribution(
    native: ModuleType, num_rows: int, vocab_size: int, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * spread
    uniform = torch.rand(num_rows, generator=generator, dtype=torch.float64)
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.5]).repeat(3)[:num_rows]
    token, logprob = native.sample_tokens(logits, uniform, temperature)
    wanted, logprobs, distance = exact(logits, uniform, temperature)
    clear = distance > ROUNDING
    assert torch.equal(token[clear], wanted[clear])
    assert ((token - wanted).abs()[~clear] <= 1).all()
    at_token = logprobs.gather(1, token.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(logprob.double(), at_token, rtol=1e-5, atol=2e-6)


def test_agrees_with_the_torch_reference(native: ModuleType) -> None:
    logits = torch.randn(500, 4096) * 3
    uniform, temperature = torch.rand(500, dtype=torch.float64), torch.full((500,), 0.9)
    token, logprob = native.sample_tokens(logits, uniform, temperature)
    other_token, other_logprob = sampling.sample_tokens(logits, uniform, temperature)
    clear = exact(logits, uniform, temperature)[2] > ROUNDING
    assert clear.sum() > 400
    assert torch.equal(token[clear], other_token[clear])
    torch.testing.assert_close(logprob[clear], other_logprob[clear], rtol=1e-5, atol=2e-6)


def test_ends_of_the_unit_interval_draw_possible_tokens(native: ModuleType) -> None:
    logits = torch.full((4, 1000), float("-inf"))
    logits[:, 300], logits[:, 700] = 0.0, 1.0
    uniform = torch.tensor([0.0, 1.0 - 2.0**-53, 0.2689414213, 0.2689414214], dtype=torch.float64)
    token, _ = native.sample_tokens(logits, uniform, torch.ones(4))
    assert token.tolist()[:2] == [300, 700]
    assert set(token.tolist()[2:]) <= {300, 700}


def test_last_token_with_weight_is_drawn_when_rounding_lifts_the_target_over_the_total(native: ModuleType) -> None:
    """Also when its block is not the last of the vocabulary."""
    for vocab_size, last in ((5000, 4999), (5000, 700), (30, 3)):
        logits = torch.full((1, vocab_size), -1e4)
        logits[0, : last + 1] = torch.randn(last + 1)
        token, _ = native.sample_tokens(logits, torch.tensor([1.0], dtype=torch.float64), torch.ones(1))
        assert token.item() == last


def test_greedy_takes_the_lowest_id_among_equals_with_its_logprob_at_temperature_one(native: ModuleType) -> None:
    logits = torch.zeros(1, 600)
    logits[0, [123, 400]] = 2.0
    token, logprob = native.sample_tokens(logits, torch.tensor([0.99], dtype=torch.float64), torch.zeros(1))
    assert token.item() == 123
    assert logprob.item() == pytest.approx(torch.log_softmax(logits.double(), -1)[0, 123].item(), abs=1e-6)


@pytest.mark.usefixtures("two_threads")
def test_bits_of_a_row_do_not_depend_on_other_rows_or_threads(native: ModuleType) -> None:
    logits, uniform = torch.randn(64, 4097), torch.rand(64, dtype=torch.float64)
    temperature = torch.rand(64) + 0.5
    together = native.sample_tokens(logits, uniform, temperature)
    torch.set_num_threads(1)
    for row in (0, 17, 63):
        rows = slice(row, row + 1)
        alone = native.sample_tokens(logits[rows], uniform[rows], temperature[rows])
        assert torch.equal(alone[0], together[0][rows])
        assert torch.equal(alone[1], together[1][rows])


def test_tokens_follow_the_distribution(native: ModuleType) -> None:
    """Chi-square over 16 tokens with 20,000 draws: 99.9% quantile of 15 degrees of freedom is 37.7."""
    logits = torch.randn(16)
    rows = 20_000
    token, _ = native.sample_tokens(
        logits.expand(rows, 16).contiguous(), torch.rand(rows, dtype=torch.float64), torch.full((rows,), 1.3)
    )
    expected = torch.softmax(logits.double() / 1.3, 0) * rows
    statistic = ((torch.bincount(token, minlength=16) - expected).pow(2) / expected).sum()
    assert statistic < 37.7


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(native: ModuleType, bad: float) -> None:
    logits = torch.randn(3, 1000)
    logits[1, 500] = bad
    with pytest.raises(RuntimeError, match="Logits are not finite in 1 of 3 rows"):
        native.sample_tokens(logits, torch.rand(3, dtype=torch.float64), torch.tensor([1.0, 0.0, 1.0]))
    with pytest.raises(RuntimeError, match="Logits are not finite in 1 of 1 rows"):
        native.sample_tokens(torch.full((1, 9), float("-inf")), torch.rand(1, dtype=torch.float64), torch.ones(1))


def test_filters_go_to_the_torch_path(native: ModuleType) -> None:
    logits, uniform = torch.randn(5, 100), torch.rand(5, dtype=torch.float64)
    token, _ = native.sample_tokens(logits, uniform, torch.ones(5), torch.ones(5, dtype=torch.int64), None, None)
    assert torch.equal(token, logits.argmax(-1))


@pytest.mark.parametrize("vocab_size", [1, 15, 259, 5003])
def test_bf16_logits_give_the_bits_of_the_same_numbers_in_fp32(native: ModuleType, vocab_size: int) -> None:
    logits = (4 * torch.randn(40, vocab_size)).bfloat16()
    logits[::3, ::2] = float("-inf")
    logits[:, -1] = 1.5
    logits = torch.cat([logits, logits], 1)[:, :vocab_size]  # rows that do not lie end to end
    uniform, temperature = torch.rand(40, dtype=torch.float64), torch.tensor([0.0, 0.7, 1.0, 1.3]).repeat(10)
    drawn, wide = (
        native.sample_tokens(logits, uniform, temperature),
        native.sample_tokens(logits.float(), uniform, temperature),
    )
    assert all(torch.equal(*pair) for pair in zip(drawn, wide, strict=True))
