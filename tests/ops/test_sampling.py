"""Sampling by inverse CDF in plain torch: exact frequencies, edges, filters, bad logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast.ops import sampling
from sagc_fast.ops.sampling import sample_tokens

LAST_UNIFORM = 1 - 2**-53
CHI_SQUARE_99_9 = {7: 24.32, 15: 37.70}


def _sample(logits, uniform, temperature=1.0, top_k=None, top_p=None, min_p=None):
    rows = len(logits)
    filters = [
        None if value is None else torch.full((rows,), value, dtype=dtype)
        for value, dtype in ((top_k, torch.int64), (top_p, torch.float32), (min_p, torch.float32))
    ]
    return sample_tokens(
        logits, torch.as_tensor(uniform, dtype=torch.float64), torch.full((rows,), temperature), *filters
    )


@pytest.mark.parametrize(("temperature", "vocab"), [(1.0, 8), (0.6, 8), (1.7, 16)])
def test_frequencies_are_those_of_the_softmax(temperature: float, vocab: int) -> None:
    """Chi-square on 40,000 draws with a fixed seed, below the 99.9% point."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(vocab, generator=generator)
    uniform = torch.rand(40_000, generator=generator, dtype=torch.float64)
    tokens, _ = _sample(logits.expand(len(uniform), -1), uniform, temperature)
    expected = (logits.double() / temperature).softmax(0) * len(uniform)
    counts = torch.bincount(tokens, minlength=vocab)
    assert float(((counts - expected) ** 2 / expected).sum()) < CHI_SQUARE_99_9[vocab - 1]


def test_a_token_owns_its_interval_of_the_uniform() -> None:
    """Four equal tokens: the token changes exactly at u = 1/4, 1/2 and 3/4, the lower end included."""
    ends = [0.25, 0.5, 0.75]
    uniform = [0.0, *(math.nextafter(end, 0) for end in ends), *ends, LAST_UNIFORM]
    tokens, logprobs = _sample(torch.full((8, 4), -7.0), uniform)
    assert tokens.tolist() == [0, 0, 1, 2, 1, 2, 3, 3]
    torch.testing.assert_close(logprobs, torch.full((8,), 0.25).log())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(0, 10**6), st.sampled_from([0.0, 5e-324, 2**-53, 0.5, LAST_UNIFORM, 1.0]))
def test_no_token_of_probability_zero_at_any_edge(vocab: int, seed: int, u: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=generator) * 40
    logits[torch.rand(3, vocab, generator=generator) < 0.5] = float("-inf")
    logits[:, seed % vocab] = -300.0
    for filters in ({}, {"top_k": 3, "top_p": 0.9, "min_p": 0.01}):
        tokens, logprobs = _sample(logits, [u] * 3, 1.0, **filters)
        weights = (logits - logits.amax(1, keepdim=True)).exp()
        assert bool((weights.gather(1, tokens[:, None]) > 0).all())
        assert bool((logprobs <= 0).all())
        assert bool(logprobs.isfinite().all())


@pytest.mark.parametrize("removed", [float("-inf"), -1.0], ids=["impossible", "filtered"])
@pytest.mark.parametrize("error", [2**-40, -(2**-40)], ids=["rises", "falls"])
def test_a_sum_that_moves_by_rounding_alone_draws_nothing(
    error: float, removed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parallel scans, as on a GPU, leave such sums at steps of weight 0: in the middle, and behind the last token."""
    cumsum = torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: cumsum(x, dim) + error * (x == 0))
    uniform = [0.0, 0.5 - 2**-41, 0.5, 0.5 + 2**-41, LAST_UNIFORM, 1.0]
    logits = torch.tensor([0.0, removed, 0.0, removed]).expand(len(uniform), -1)
    tokens, logprobs = _sample(logits, uniform, top_k=None if removed < -1 else 2)
    assert tokens.tolist() == [0, 0, 2, 2, 2, 2]
    torch.testing.assert_close(logprobs, torch.full((6,), 0.5).log())


def test_greedy_takes_the_lowest_id_among_equals_with_the_unscaled_logprob() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 1.0, 5.0, 5.0]])
    tokens, logprobs = _sample(logits, [0.9, 0.9], 0.0, top_k=1, top_p=0.1)
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(1)[[0, 1], [1, 0]])


def test_rows_of_one_call_have_their_own_temperature_and_filters() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.1]).expand(5, -1)
    tokens, logprobs = sample_tokens(
        logits,
        torch.full((5,), 0.999, dtype=torch.float64),
        torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0]),
        torch.tensor([0, 2, 0, 0, 0]),
        torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.3, 0.0]),
    )
    assert tokens.tolist() == [0, 1, 0, 1, 3]
    torch.testing.assert_close(logprobs[1], torch.tensor([2.0, 1.0]).log_softmax(0)[1])
    assert logprobs[2] == 0
    torch.testing.assert_close(logprobs[4], (logits[0] / 2).log_softmax(0)[3])


def _kept_by_definition(probs: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    order = sorted(range(len(probs)), key=lambda v: (-probs[v], v))
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(probs[v] for v in kept), 0.0, []
    for v in kept:
        if top_p < 1 and mass >= top_p * total:
            break
        nucleus.append(v)
        mass += probs[v]
    return {v for v in nucleus if probs[v] >= min_p * probs[order[0]]}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 30), st.integers(0, 40), st.floats(0.01, 1), st.floats(0, 1), st.integers(0, 10**6), st.booleans()
)
def test_filters_keep_what_their_definition_keeps(
    vocab: int, top_k: int, top_p: float, min_p: float, seed: int, has_ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=generator) * 2
    logits = logits.round() if has_ties else logits
    probs = (logits - logits.max()).exp().double()
    top_p, min_p = (float(torch.tensor(x, dtype=torch.float32)) for x in (top_p, min_p))
    kept = _kept_by_definition(probs.tolist(), top_k, top_p, min_p)
    uniform = torch.linspace(0, LAST_UNIFORM, 400, dtype=torch.float64)
    tokens, logprobs = _sample(logits.expand(400, -1), uniform, 1.0, top_k, top_p, min_p)
    assert set(tokens.tolist()) <= kept
    renormalised = (probs / sum(float(probs[v]) for v in kept)).log()
    torch.testing.assert_close(logprobs.double(), renormalised[tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("vocab", [20, 33, 49_152])
@pytest.mark.parametrize("filters", [{}, {"top_k": 10, "top_p": 0.8, "min_p": 0.05}])
def test_a_row_alone_has_the_same_bits(vocab: int, filters: dict) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab, generator=generator) * 3
    uniform = torch.rand(9, generator=generator, dtype=torch.float64)
    tokens, logprobs = _sample(logits, uniform, 0.8, **filters)
    for row in range(9):
        token, logprob = _sample(logits[row : row + 1], uniform[row : row + 1], 0.8, **filters)
        assert torch.equal(token, tokens[row : row + 1])
        assert torch.equal(logprob, logprobs[row : row + 1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    logits = torch.zeros(4, 6)
    logits[1, 2] = logits[3, 0] = bad
    with pytest.raises(RuntimeError, match="not finite in 2 of 4 rows"):
        _sample(logits, [0.5] * 4)
    with pytest.raises(RuntimeError, match="not finite in 1 of 1 rows"):
        _sample(torch.full((1, 6), float("-inf")), [0.5])


@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}])
def test_rows_drawn_few_at_a_time_keep_their_bits(monkeypatch: pytest.MonkeyPatch, filters: dict) -> None:
    logits, uniform = torch.randn(23, 301), torch.rand(23, dtype=torch.float64)
    together = _sample(logits, uniform, **filters)
    monkeypatch.setattr(sampling, "DRAW_BYTES", 5 * 4 * 301)
    for found, wanted in zip(_sample(logits, uniform, **filters), together, strict=True):
        assert torch.equal(found, wanted)
    logits[[1, 22]] = math.nan
    with pytest.raises(RuntimeError, match="2 of 23 rows"):
        _sample(logits, uniform, **filters)
