"""Keyed sampling in CUDA C++, its own source run on the host: the token of the reference for the same keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sagc_fast.ops import sampling
from sagc_fast.rollout.noise import uniforms


def _keys(num_rows: int, seed: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Keys with all bits in use, and the engine's numbers for them."""
    generator = np.random.default_rng(seed)
    keys = [generator.integers(0, 2**bits, num_rows, dtype=np.uint64) for bits in (64, 64, 32, 32)]
    return tuple(torch.from_numpy(key.view(np.int64)) for key in keys), torch.from_numpy(uniforms(*keys))


def _check(host, logits: torch.Tensor, temperature: torch.Tensor, seed: int) -> None:
    keys, u = _keys(len(logits), seed)
    wanted_token, wanted_logprob = sampling.sample_tokens(logits, u, temperature)
    token, logprob = host.sample(logits, keys, temperature)
    assert torch.equal(token, wanted_token)
    torch.testing.assert_close(logprob, wanted_logprob, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 1023, 1024, 5001])
def test_token_and_logprob_of_the_reference(host, dtype: torch.dtype, vocab_size: int) -> None:
    """One chunk, its edge, and several with rows that 16-byte loads cannot read (odd widths)."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(5, vocab_size, generator=generator) * 3).to(dtype)
    if vocab_size > 1:
        logits[:, vocab_size // 2 :: 3] = float("-inf")
    _check(host, logits, torch.tensor([1.0, 0.0, 0.3, 1.7, 1.0]), vocab_size)


def test_more_chunks_than_warps(host) -> None:
    """Whole chunks without probability, and the rest of it in few tokens: every step of the cumulative sum matters."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((6, 40_000), float("-inf"), dtype=torch.bfloat16)
    places = torch.randint(0, 40_000, (6, 9), generator=generator)
    logits.scatter_(1, places, torch.randn(6, 9, generator=generator).bfloat16())
    _check(host, logits, torch.tensor([1.0, 1.0, 0.0, 0.5, 1.0, 1.0]), 1)


def test_equal_logits_and_strided_rows(host) -> None:
    """Greedy takes the lowest id of equals, in whatever chunk; a slice of a wider tensor is read where it stands."""
    wide = torch.zeros(4, 3000)
    wide[0, 5] = wide[0, 2500] = wide[1, 1700] = wide[1, 1701] = 2.0
    _check(host, wide[:, :2600], torch.zeros(4), 2)
    _check(host, wide[:, 4:2604], torch.tensor([0.0, 0.0, 1.0, 0.7]), 3)


def test_many_keys_draw_the_distribution(host) -> None:
    """Eight tokens, one of them of probability 0, 60 draws: every token is the reference's."""
    logits = torch.tensor([0.0, 1.0, float("-inf"), -2.0, 0.5, 0.5, -1.0, 3.0]).expand(60, 8).contiguous()
    _check(host, logits, torch.ones(60), 4)


def test_rows_that_are_not_finite_are_marked_and_the_others_are_not(host) -> None:
    logits = torch.zeros(6, 2050)
    logits[0, 3], logits[1, 2049], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3, :2048] = float("-inf")
    keys, _ = _keys(6, 5)
    token, logprob = host.sample(logits, keys, torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.5]))
    assert torch.isnan(logprob).tolist() == [True, True, True, False, False, False]
    assert token[:3].tolist() == [0, 0, 0]
    assert token[3] >= 2048


def test_rows_do_not_affect_each_other_and_repeat(host) -> None:
    logits, (keys, _) = torch.randn(5, 1500, generator=torch.Generator().manual_seed(6)), _keys(5, 6)
    temperature = torch.full((5,), 0.8)
    both = host.sample(logits, keys, temperature)
    for i in range(5):
        alone = host.sample(logits[i : i + 1], tuple(k[i : i + 1] for k in keys), temperature[i : i + 1])
        assert torch.equal(alone[0], both[0][i : i + 1])
        assert torch.equal(alone[1], both[1][i : i + 1])
