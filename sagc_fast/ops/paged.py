"""Attention over the paged KV cache in plain torch: the oracle and fallback of the native kernel.

Every query token is a row of its own, be it a decode row or one of a prefill chunk. A row walks its context in chunks
of absolute positions with an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867); each row's products have a
shape that does not depend on the other rows, and batched products keep its bits whatever the batch (measured, tested).
Rows are sorted by context, longest first: a chunk concerns a prefix of the rows, and short contexts end early.

Shape suffixes: T tokens, n rows at work, H query heads, K kv heads, g query heads per kv head, D head width,
C positions of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sagc_fast.ops.layouts import PagedLayout

CHUNK_POSITIONS = 64
"""Context positions per chunk, rounded up to whole blocks."""
GATHER_BYTES, DEVICE_GATHER_BYTES = 2**20, 16 * 2**20
"""Bound on the copied keys of one chunk, on the CPU and elsewhere; more rows are worked in several passes."""


@dataclass(frozen=True, eq=False)
class _Chunk:
    """One chunk of absolute positions for the ``num_rows`` longest rows of a pass."""

    num_rows: int
    num_full_rows: int
    """Leading rows whose context covers the whole chunk; the rest need the mask."""
    gather: torch.Tensor
    """int64 [n * K * blocks per chunk], rows of the cache seen as [num_blocks * K, block_size, D]."""
    is_masked: torch.Tensor
    """bool [rest, C], True past the row's context."""


@dataclass(frozen=True, eq=False)
class _Pass:
    rows: torch.Tensor
    """int64 [n], which tokens of the step this pass serves."""
    chunks: tuple[_Chunk, ...]


def paged_attention(
    q_THD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: PagedLayout, scale: float
) -> torch.Tensor:
    """Causal attention of each token over positions 0 to its own, read from the cache; [T, H, D] in the dtype of q.

    The caches are [num_blocks, K, block_size, D] and already hold this step's keys and values. Sums are fp32.
    """
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    group = q_THD.shape[1] // num_kv_heads
    k_rows, v_rows = k_cache.view(-1, block_size, head_dim), v_cache.view(-1, block_size, head_dim)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    for work in _plan(layout, num_kv_heads, block_size, head_dim):
        q = q_THD[work.rows].float().view(-1, group, head_dim)
        out_THD[work.rows] = (
            _attend(q, k_rows, v_rows, work, num_kv_heads, scale).view(-1, *q_THD.shape[1:]).to(q_THD.dtype)
        )
    return out_THD


def _attend(
    q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, work: _Pass, num_kv_heads: int, scale: float
) -> torch.Tensor:
    """q [n * K, g, D] -> attention output of the same shape."""
    head_dim = q.shape[-1]
    largest = q.new_full((*q.shape[:2], 1), float("-inf"))
    total = torch.zeros_like(largest)
    out = torch.zeros_like(q)
    for chunk in work.chunks:
        n, first_masked = chunk.num_rows * num_kv_heads, chunk.num_full_rows * num_kv_heads
        k = k_rows.index_select(0, chunk.gather).float().view(n, -1, head_dim)
        v = v_rows.index_select(0, chunk.gather).float().view(n, -1, head_dim)
        scores = torch.bmm(q[:n], k.transpose(1, 2)).mul_(scale)
        if first_masked < n:
            # Blocks past the context may hold anything, NaN included: both the weight and the value must be nought.
            is_masked = chunk.is_masked.repeat_interleave(num_kv_heads, 0)
            scores[first_masked:].masked_fill_(is_masked.unsqueeze(1), float("-inf"))
            v[first_masked:].masked_fill_(is_masked.unsqueeze(2), 0)
        new_largest = torch.maximum(largest[:n], scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_largest).exp_()
        shrink = torch.exp(largest[:n] - new_largest)
        total[:n] = total[:n] * shrink + weights.sum(-1, keepdim=True)
        out[:n] = out[:n] * shrink + torch.bmm(weights, v)
        largest[:n] = new_largest
    return out.div_(total)


def _plan(layout: PagedLayout, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[_Pass, ...]:
    """How to work the rows of a step; the same for every layer, so it is kept with the layout."""
    key = (num_kv_heads, block_size, head_dim)
    plans = layout.__dict__.setdefault("_reference_plans", {})
    if key not in plans:
        plans[key] = _make_plan(layout, *key)
    return plans[key]


def _make_plan(layout: PagedLayout, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[_Pass, ...]:
    device = layout.positions_T.device
    if layout.is_captured:
        rows_T = sequences_T = torch.arange(len(layout.positions_T), device=device)
        lengths_T = layout.context_lens_S.long()
    else:
        lengths_T, rows_T = torch.sort(layout.positions_T + 1, descending=True, stable=True)
        query_lens_S = layout.cu_query_S1.diff()
        sequences_T = torch.arange(len(query_lens_S), device=device).repeat_interleave(query_lens_S)[rows_T]
    blocks_per_chunk = -(-CHUNK_POSITIONS // block_size)
    chunk_positions = blocks_per_chunk * block_size
    bound = GATHER_BYTES if device.type == "cpu" else DEVICE_GATHER_BYTES
    rows_per_pass = max(1, bound // (num_kv_heads * chunk_positions * head_dim * 4))
    tables_SB = torch.nn.functional.pad(
        layout.block_tables_SB.long(), (0, -layout.block_tables_SB.shape[1] % blocks_per_chunk)
    )
    heads_K1 = torch.arange(num_kv_heads, device=device).view(-1, 1)

    passes = []
    for begin in range(0, len(rows_T), rows_per_pass):
        end = min(begin + rows_per_pass, len(rows_T))
        lengths_n, tables_nB = lengths_T[begin:end], tables_SB[sequences_T[begin:end]]
        chunks = []
        longest = layout.max_context_len if layout.is_captured else int(lengths_n[0])
        for index in range(-(-longest // chunk_positions)):
            start = index * chunk_positions
            if layout.is_captured:  # every chunk for every row; one that lies past the context changes no bit
                num_rows, num_full = end - begin, 0
            else:
                num_rows = int((lengths_n > start).sum())
                num_full = int((lengths_n >= start + chunk_positions).sum())
            blocks = tables_nB[:num_rows, index * blocks_per_chunk : (index + 1) * blocks_per_chunk]
            gather = (blocks.unsqueeze(1) * num_kv_heads + heads_K1).flatten()
            positions_C = torch.arange(start, start + chunk_positions, device=device)
            chunks.append(_Chunk(num_rows, num_full, gather, positions_C >= lengths_n[num_full:num_rows, None]))
        passes.append(_Pass(rows_T[begin:end], tuple(chunks)))
    return tuple(passes)
