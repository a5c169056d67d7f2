"""Plain-torch operators: linear, norms, SwiGLU, rotary embedding with the KV write (rollout) or the split (training).

In fp32 on the CPU every function computes a row the same way, bit for bit, whatever the other rows of the batch. Three
measured properties of torch's CPU kernels shape the code: ``mm`` rounds differently for some row counts, ``silu`` and
``sigmoid`` round differently in the scalar tail of a vector loop, ``exp`` does not.

Shape suffixes: T tokens, K input width, N output width, E model width, F half of a fused gate/up width, H query heads,
D head width.
"""

from __future__ import annotations

import torch

from sagc_fast.ops import products

TILE_ROWS = 16
"""Rows of the smallest product; a shorter remainder is padded to it."""
LARGE_TILES = (256, 64)
"""Larger products, tried in this order, used only where a probe finds their bits equal to those of the small tile."""
PROBE_BYTES = 32 * 2**20
"""Bound on a probe's product and on the weight made up for it; a wide head's would cost several times the model."""
_tiles_of_shapes: dict[tuple[int, int, int], tuple[int, ...]] = {}


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` for inference, [T, N] in the dtype of x; fp32 rows on the CPU are bit-independent."""
    if x_TK.dtype != torch.float32 or x_TK.device.type != "cpu":
        return products.linear(x_TK, weight_NK, bias_N)
    num_rows, weight_KN = x_TK.shape[0], weight_NK.t()
    y_TN = x_TK.new_empty(num_rows, weight_NK.shape[0])
    start = 0
    for tile in _tiles(weight_NK):
        while num_rows - start >= tile:
            torch.mm(_aligned(x_TK[start : start + tile]), weight_KN, out=y_TN[start : start + tile])
            start += tile
    if start < num_rows:
        last_TK = x_TK.new_zeros(TILE_ROWS, x_TK.shape[1])
        last_TK[: num_rows - start] = x_TK[start:]
        y_TN[start:] = torch.mm(last_TK, weight_KN)[: num_rows - start]
    return y_TN if bias_N is None else y_TN.add_(bias_N)


def _tiles(weight_NK: torch.Tensor) -> tuple[int, ...]:
    """:func:`_probed_tiles` of the weight's shape, found once for each number of threads."""
    key = (*weight_NK.shape, torch.get_num_threads())
    if key not in _tiles_of_shapes:
        _tiles_of_shapes[key] = _probed_tiles(weight_NK)
    return _tiles_of_shapes[key]


def _probed_tiles(weight_NK: torch.Tensor) -> tuple[int, ...]:
    """Row counts, largest first, whose products give every row the bits it has in the 16-row tile; ``(1,)`` when not
    even that tile treats its rows alike (measured: odd input widths). Random numbers stand in for a weight that is not
    wide, since one that happens to be zero would hide every difference."""
    num_out, num_in = weight_NK.shape
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(LARGE_TILES[0], num_in, generator=generator)
    if 4 * num_out * num_in <= PROBE_BYTES:
        weight_NK = torch.randn(num_out, num_in, generator=generator)
    weight_KN = weight_NK.t()
    expected_TN = torch.mm(x_TK[:TILE_ROWS], weight_KN)
    for shift in range(1, TILE_ROWS):
        shifted_TN = torch.mm(x_TK[:TILE_ROWS].roll(shift, 0), weight_KN)
        if not (
            torch.equal(shifted_TN[shift:], expected_TN[:-shift])
            and torch.equal(shifted_TN[:shift], expected_TN[-shift:])
        ):
            return (1,)
    large = [
        tile
        for tile in LARGE_TILES
        if 4 * tile * num_out <= PROBE_BYTES and all(_is_alike(x, weight_KN) for x in x_TK.split(tile))
    ]
    return (*large, TILE_ROWS)


def _is_alike(x_TK: torch.Tensor, weight_KN: torch.Tensor) -> bool:
    """Whether one product of all rows has the bits of products of 16 rows each."""
    parts = zip(x_TK.split(TILE_ROWS), torch.mm(x_TK, weight_KN).split(TILE_ROWS), strict=True)
    return all(torch.equal(torch.mm(x, weight_KN), y_TN) for x, y_TN in parts)


def _aligned(x_TK: torch.Tensor) -> torch.Tensor:
    """x itself when it starts on a cache line and has no gaps; else a copy that does (BLAS may round by alignment)."""
    return (
        x_TK
        if x_TK.is_contiguous() and x_TK.data_ptr() % 64 == 0
        else x_TK.clone(memory_format=torch.contiguous_format)
    )


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis with fp32 statistics: ``weight * (x / rms(x)).to(x.dtype)``.
    Differentiable. (Zhang and Sennrich 2019, arXiv:1910.07467; rounding order as in transformers.)"""
    x_fp32 = x_TE.to(torch.float32) if x_TE.dtype in (torch.bfloat16, torch.float16) else x_TE
    scale = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True).add(eps))
    return weight_E * (x_fp32 * scale).to(x_TE.dtype)


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + x`` and its :func:`rms_norm`: (normed, new residual). Differentiable."""
    residual_TE = residual_TE + x_TE
    return rms_norm(residual_TE, weight_E, eps), residual_TE


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """SwiGLU's gate: ``silu(first half) * second half``, [T, F]. Differentiable. (Shazeer 2020, arXiv:2002.05202.)"""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    gate_fp32 = gate_TF.float() if gate_TF.dtype in (torch.bfloat16, torch.float16) else gate_TF
    denominator = torch.exp(-gate_fp32) + 1
    return (gate_fp32 / denominator).to(gate_TF.dtype) * up_TF


def rotate(x_THD: torch.Tensor, cos_TD2: torch.Tensor, sin_TD2: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split convention: dimension i turns with dimension i + D/2. Differentiable. The product is
    formed in the tables' fp32 (or wider) and rounded once. (Su et al. 2021, arXiv:2104.09864.)"""
    first, second = x_THD.chunk(2, dim=-1)
    cos, sin = cos_TD2.unsqueeze(1), sin_TD2.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_THD.dtype)


def rotary_split(
    qkv_TX: torch.Tensor, cos_TD2: torch.Tensor, sin_TD2: torch.Tensor, num_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A fused projection -> q [T, H, D] and k [T, K, D], both turned by the tokens' angles, and v [T, K, D].
    Differentiable."""
    qkv = qkv_TX.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    q_THD, k_TKD, v_TKD = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return rotate(q_THD, cos_TD2, sin_TD2), rotate(k_TKD, cos_TD2, sin_TD2), v_TKD


def rope_and_cache(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cos_PD2: torch.Tensor,
    sin_PD2: torch.Tensor,
    positions_T: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """Rotate q and k by their positions, write k and v into the cache in place, return the rotated q [T, H, D].

    The caches are [num_blocks, kv heads, block_size, D]; slot = block * block_size + offset.
    """
    cos_TD2, sin_TD2 = cos_PD2[positions_T], sin_PD2[positions_T]
    block_size = k_cache.shape[2]
    blocks_T, offsets_T = slots_T // block_size, slots_T % block_size
    k_cache[blocks_T, :, offsets_T] = rotate(k_TKD, cos_TD2, sin_TD2).to(k_cache.dtype)
    v_cache[blocks_T, :, offsets_T] = v_TKD.to(v_cache.dtype)
    return rotate(q_THD, cos_TD2, sin_TD2)
