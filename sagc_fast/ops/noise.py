"""Keyed noise in plain torch, on any device: the numbers of :mod:`sagc_fast.rollout.noise` (Philox4x32-10).

Words are held in int64; a product of two 32-bit words may overflow it, but its bits are right and are masked out.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def uniforms(
    seed_R: torch.Tensor, prompt_id_R: torch.Tensor, sample_index_R: torch.Tensor, position_R: torch.Tensor
) -> torch.Tensor:
    """float64 [R] in [0, 1) with 53 random bits, one per key; arguments int64, the first two holding unsigned bits."""
    key = [seed_R & _MASK, (seed_R >> 32) & _MASK]
    word = [prompt_id_R & _MASK, (prompt_id_R >> 32) & _MASK, sample_index_R & _MASK, position_R & _MASK]
    for _ in range(10):
        product_0, product_2 = word[0] * _MULTIPLIERS[0], word[2] * _MULTIPLIERS[1]
        word = [
            ((product_2 >> 32) & _MASK) ^ word[1] ^ key[0],
            product_2 & _MASK,
            ((product_0 >> 32) & _MASK) ^ word[3] ^ key[1],
            product_0 & _MASK,
        ]
        key = [(k + w) & _MASK for k, w in zip(key, _WEYL, strict=True)]
    return (((word[0] >> 5) << 26) | (word[1] >> 6)).double() * 2.0**-53
