"""A decode step's own projections on their way into attention: rotated in registers, keys and values written there.

Half-split rotation as in rope_cache, to the bit: fp32, rounded once. A key that a prefill computes again, after a
preemption, has to be the one that a decode step wrote, so the fused multiply-add stands in both sources and is not left
to the compiler. What a decode kernel rotates needs no launch of rope_cache before it, and no rotated queries on their
way through memory.

Shape suffixes: T tokens, K kv heads, D head width, P positions, D2 half the head width.
"""

# ruff: noqa: N815 (shape suffixes in field names)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, eq=False)
class Newest:
    """Keys and values of the step's tokens, which are not in the cache yet, and the angles of their positions; the
    queries beside them are not rotated either. Every token's position is the last of its sequence's context."""

    k_TKD: torch.Tensor
    """In the dtype of the queries, the last axis contiguous, as of the values."""
    v_TKD: torch.Tensor
    cos_PD2: torch.Tensor
    """fp32, contiguous, as the other."""
    sin_PD2: torch.Tensor
    slots_T: torch.Tensor
    """int64, where each token's key and value go; slot = block * block_size + offset."""


@triton.jit
def rotated(ptrs, cos_ptrs, sin_ptrs, offs_d, mask, D: tl.constexpr):
    """Elements ``offs_d`` of the heads that begin at ``ptrs``, turned, in fp32; 0 outside of ``mask``."""
    is_first = offs_d < D // 2
    partner_d = tl.where(is_first, offs_d + D // 2, offs_d - D // 2)
    angle_d = tl.where(is_first, offs_d, offs_d - D // 2)
    x = tl.load(ptrs + offs_d, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(ptrs + partner_d, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptrs + angle_d, mask=offs_d < D, other=0.0)
    sin = tl.load(sin_ptrs + angle_d, mask=offs_d < D, other=0.0)
    return tl.fma(x, cos, partner * tl.where(is_first, -sin, sin))
