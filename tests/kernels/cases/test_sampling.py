"""Sampling by Triton: the token of the reference for the same uniform number, filters and ties included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sagc_fast.kernels import philox
from sagc_fast.kernels.sample_blocks import BLOCK_V
from triton.runtime import interpreter

from sagc_fast.ops import noise, sampling, triton_ops
from sagc_fast.rollout.noise import uniforms


def _keys(num_rows: int) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(0)
    seed, prompt = (generator.integers(0, 2**64, num_rows, dtype=np.uint64) for _ in "sp")
    sample, position = (generator.integers(0, 2**32, num_rows, dtype=np.uint64) for _ in "sp")
    seed[0], prompt[0], sample[0], position[0] = 2**64 - 1, 2**64 - 1, 2**32 - 1, 2**32 - 1
    return seed, prompt, sample, position


def _tensors(keys: tuple[np.ndarray, ...], device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(key.view(np.int64)).to(device) for key in keys)


def test_noise_is_that_of_the_engine_bit_for_bit(device: torch.device) -> None:
    keys = _keys(200)
    wanted = torch.from_numpy(uniforms(*keys))
    assert torch.equal(noise.uniforms(*_tensors(keys)), wanted)
    assert torch.equal(philox.uniforms(*_tensors(keys, device)).cpu(), wanted)


def _check(logits: torch.Tensor, u: torch.Tensor, temperature: torch.Tensor, *filters, device: torch.device) -> None:
    wanted = sampling.sample_tokens(logits, u, temperature, *filters)
    moved = [None if f is None else f.to(device) for f in filters]
    tokens, logprobs = triton_ops.sample_tokens(logits.to(device), u.to(device), temperature.to(device), *moved)
    assert torch.equal(tokens.cpu(), wanted[0])
    torch.testing.assert_close(logprobs.cpu(), wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab_size", [1, 4096, 9001])
def test_same_uniform_same_token(dtype: torch.dtype, vocab_size: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(12, vocab_size, generator=generator) * 3).to(dtype)
    logits[:, vocab_size // 2 :: 3] = float("-inf") if vocab_size > 1 else 0.0
    u = torch.rand(12, generator=generator, dtype=torch.float64)
    u[0], u[1] = 0.0, 1 - 2.0**-53
    temperature = torch.tensor([1.0, 1.0, 0.0, 0.3] * 3)
    _check(logits, u, temperature, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_filters_and_ties(dtype: torch.dtype, device: torch.device) -> None:
    """A coarse grid of logits, so that every threshold falls among equals."""
    generator = torch.Generator().manual_seed(3)
    rows = 9
    logits = torch.randint(-4, 3, (rows, 4100), generator=generator).float()
    logits[0] = torch.randn(4100, generator=generator)
    u = torch.rand(rows, generator=generator, dtype=torch.float64)
    temperature = torch.tensor([1.0, 0.7, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    top_k = torch.tensor([5, 1, 700, 0, 0, 3, 0, 5000, 50])
    top_p = torch.tensor([1.0, 1.0, 0.5, 0.3, 1.0, 0.1, 1.0, 1.0, 0.9])
    min_p = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.2, 0.9, 0.0, 0.0, 0.3])
    _check(logits.to(dtype), u, temperature, top_k, top_p, min_p, device=device)


def test_one_filter_alone_leaves_the_others_off(device: torch.device) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    u, temperature = torch.tensor([0.2, 0.9], dtype=torch.float64), torch.ones(2)
    _check(logits, u, temperature, torch.tensor([3, 0]), None, None, device=device)


def test_keyed_tokens_are_those_of_the_same_noise(device: torch.device) -> None:
    keys = _keys(8)
    logits, temperature = torch.randn(8, 300, generator=torch.Generator().manual_seed(2)), torch.ones(8)
    wanted = sampling.sample_tokens(logits, torch.from_numpy(uniforms(*keys)), temperature)
    tokens, logprobs = triton_ops.sample_keyed_tokens(logits.to(device), _tensors(keys, device), temperature.to(device))
    assert torch.equal(tokens.cpu(), wanted[0])
    torch.testing.assert_close(logprobs.cpu(), wanted[1])
    filters = (torch.full((8,), 7), None, None)
    wanted = sampling.sample_tokens(logits, torch.from_numpy(uniforms(*keys)), temperature, *filters)
    tokens, _ = triton_ops.sample_keyed_tokens(
        logits.to(device), _tensors(keys, device), temperature.to(device), filters[0].to(device)
    )
    assert torch.equal(tokens.cpu(), wanted[0])


def test_logits_that_are_not_finite(device: torch.device) -> None:
    logits = torch.zeros(4, 10, device=device)
    logits[0, 3], logits[1, 9], logits[2] = float("nan"), float("inf"), float("-inf")
    u, temperature = torch.full((4,), 0.5, dtype=torch.float64, device=device), torch.ones(4, device=device)
    with pytest.raises(RuntimeError, match="not finite in 3 of 4 rows"):
        triton_ops.sample_tokens(logits, u, temperature)
    keys = tuple(torch.zeros(4, dtype=torch.int64, device=device) for _ in range(4))
    for filters in ((), (torch.full((4,), 2, device=device),)):
        tokens, logprobs = triton_ops.sample_keyed_tokens(logits, keys, temperature, *filters)
        assert torch.isnan(logprobs).tolist() == [True, True, True, False]
        assert tokens[:3].tolist() == [0, 0, 0]


def _parallel_sums(values: np.ndarray) -> np.ndarray:
    """Cumulative sums as a GPU may form them, by doubling: neighbours add in different orders, so they may fall."""
    sums, step = values.copy(), 1
    while step < len(sums):
        sums[step:] += sums[:-step].copy()
        step *= 2
    return sums


def _between(low: float, high: float, total: float) -> float | None:
    """A number whose product with ``total`` lies in [low, high)."""
    u = np.float64(low) / total
    candidates = (u, np.nextafter(u, 0.0), np.nextafter(u, 1.0))
    return next((float(x) for x in candidates if low <= x * total < high), None)


@pytest.mark.parametrize("stride", [1, BLOCK_V], ids=["tokens", "blocks"])
def test_a_sum_that_rises_by_rounding_alone_draws_nothing(
    stride: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of weight 0, tokens or whole blocks, at which the sum of a parallel scan rises and passes u x total.

    Logits far apart: sums of fp32 weights of one size are exact in fp64.
    """

    def cumsum(self: interpreter.ScanOps, x: object) -> list[object]:
        return [self.to_tensor(_parallel_sums(x.handle.data), dtype=x.dtype)]

    monkeypatch.setattr(interpreter.ScanOps, "cumsum", cumsum)
    generator = np.random.default_rng(stride)
    rows, u = [], []
    while len(rows) < 6:
        z = (12 * generator.normal(size=16)).astype(np.float32)
        z[generator.random(16) < 0.5] = -np.inf
        weights = np.exp(z - z.max()).astype(np.float64)
        sums = _parallel_sums(weights)
        # The total as the kernels have it: the sum over one block's tokens, or the scan's over the blocks.
        total = np.pad(weights, (0, BLOCK_V - 16)).sum() if stride == 1 else sums.max()
        for i in np.flatnonzero((weights[1:] == 0) & (sums[1:] > sums[:-1])) + 1:
            found = _between(sums[i - 1], sums[i], total)
            if found is not None:
                rows.append(z)
                u.append(found)
    logits = torch.full((len(rows), 16 * stride), float("-inf"))
    logits[:, stride // 2 :: stride] = torch.from_numpy(np.stack(rows))
    logits, temperature = logits.to(device), torch.ones(len(rows), device=device)
    tokens, logprobs = triton_ops.sample_tokens(
        logits, torch.tensor(u, dtype=torch.float64, device=device), temperature
    )
    assert torch.isfinite(logits.gather(1, tokens[:, None])).all()
    assert torch.isfinite(logprobs).all()
