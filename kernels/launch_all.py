"""Every kernel launched once, as a model of some shape does: to compile ahead of time, or before the first step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sagc_fast.kernels._launch import INTERPRETED


@dataclass(frozen=True)
class Shape:
    """What the kernels see of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int


SHAPES = {
    "Llama-3.2-3B": Shape(24, 8, 128, 3072, 8192, 128_256),
    "Qwen2.5-0.5B": Shape(14, 2, 64, 896, 4864, 151_936),
    "Qwen2.5-3B": Shape(16, 2, 128, 2048, 11_008, 151_936),
}
WIDTHS = {
    # The narrowest and the widest heads that are served, beside the 0.5B's other widths: only attention is new.
    "heads of 32": Shape(12, 4, 32, 896, 4864, 151_936),
    "heads of 256": Shape(16, 4, 256, 896, 4864, 151_936),
}


def launch_all(
    shape: Shape, dtype: torch.dtype, device: torch.device | str, page: int = 16, groups: int = 1, blocks: int = 1
) -> None:
    """Launch every kernel once as a model of this shape does, on made-up inputs.

    Under :func:`recording`, with the meta device, that yields what to compile; on a GPU it compiles and tunes.
    Attention sees ``groups`` prompts of ``blocks`` x 128 tokens, each with one completion as long: see :func:`tune`.
    """
    from sagc_fast.kernels.advance_rows import advance_rows
    from sagc_fast.kernels.decode_plan import decode_plan
    from sagc_fast.kernels.group_decode import group_decode, siblings_per_tile
    from sagc_fast.kernels.merge_splits import merge_splits
    from sagc_fast.kernels.newest import Newest
    from sagc_fast.kernels.paged_decode import paged_decode
    from sagc_fast.kernels.paged_prefill import paged_prefill
    from sagc_fast.kernels.philox import uniforms
    from sagc_fast.kernels.place_rows import place_rows
    from sagc_fast.kernels.policy_loss import policy_loss
    from sagc_fast.kernels.reduce_kv import reduce_kv
    from sagc_fast.kernels.rms_norm import rms_norm
    from sagc_fast.kernels.rms_norm_backward import rms_norm_backward
    from sagc_fast.kernels.rope_cache import rope_cache
    from sagc_fast.kernels.rotary import rotary_merge, rotary_split
    from sagc_fast.kernels.sample_blocks import sample_blocks
    from sagc_fast.kernels.sample_filtered import sample_filtered
    from sagc_fast.kernels.sample_pick import sample_pick
    from sagc_fast.kernels.silu_mul import silu_mul
    from sagc_fast.kernels.silu_mul_backward import silu_mul_backward
    from sagc_fast.kernels.token_logprobs import token_logprobs
    from sagc_fast.kernels.token_logprobs_backward import token_logprobs_backward
    from sagc_fast.kernels.varlen_backward_kv import varlen_backward_kv
    from sagc_fast.kernels.varlen_backward_q import varlen_backward_q
    from sagc_fast.kernels.varlen_forward import varlen_forward

    heads, kv_heads, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
    length, num_rows = 128 * blocks, 8
    num_tokens = 2 * groups * length

    def zeros(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=of, device=device)

    def integers(rows: list, of: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(rows, dtype=of, device=device)

    qkv = zeros(num_tokens, heads + 2 * kv_heads, width)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    # Prompts with a completion each; the gradients of a prompt's keys come in two slots.
    tiles, own, items, sums = [], [], [], []
    for start in range(0, num_tokens, 2 * length):
        middle, end = start + length, start + 2 * length
        own += [start] * length + [middle] * length
        for low in range(start, middle, 128):
            tiles += [[low, low + 128, start, start], [low + length, low + length + 128, start, middle]]
            slot = 2 * len(sums)
            sums.append([low, low + 128, slot, 2])
            items += [
                [low + length, low + length + 128, low + length, end, 0, 0, -1, 0],
                [low, low + 128, low, middle, middle, middle + length // 2, slot, 0],
                [low, low + 128, 0, 0, middle + length // 2, end, slot + 1, 0],
            ]
    num_slots, tiles, own, items, sums = 2 * len(sums), *map(integers, (tiles, own, items, sums))
    q = q.contiguous()
    out, lse = varlen_forward(q, k, v, tiles, own, 0.1)
    _, delta = varlen_backward_q(q, k, v, out, out, lse, tiles, own, 0.1)
    grad_k, grad_v, slots = varlen_backward_kv(q, k, v, out, lse, delta, items, num_slots, own, 0.1)
    reduce_kv(slots, grad_k, grad_v, sums)

    # Two siblings that decode over a shared block, and prefill chunks.
    caches = [zeros(16, kv_heads, page, width) for _ in "kv"]
    table, places = zeros(num_rows, width // 2, of=torch.float32), zeros(num_rows, of=torch.int64)
    rope_cache(qkv[:num_rows, :heads], k[:num_rows], v[:num_rows], table, table, places, *caches, places)
    chunk = 32 if blocks == 1 else length
    cu = integers([0, 1, *range(2, 2 + groups * chunk + 1, chunk)])
    context = integers([20, 20, *[chunk] * groups])
    tables = integers([[0 if column == 0 else (row + column) % 16 for column in range(max(2, chunk // page))]
                       for row in range(2 + groups)])  # fmt: skip
    siblings, shared_blocks = integers([0, 0, *[-1] * groups]), integers([1, 1, *[0] * groups])
    shared, runs, leaders = decode_plan(cu, siblings, shared_blocks, page, siblings_per_tile(heads // kv_heads))
    paged_prefill(q, *caches, out, cu, context, tables, chunk, 0.1, min_queries=2)
    part, part_lse = zeros(2 + groups, heads, 4, width, of=torch.float32), zeros(2 + groups, heads, 4, of=torch.float32)
    angles = zeros(32, width // 2, of=torch.float32)
    for newest in (None, Newest(k, v, angles, angles, zeros(num_tokens, of=torch.int64))):
        group_decode(q, *caches, part, part_lse, cu, context, shared, runs, leaders, tables, 2, 0.1, newest)
        paged_decode(q, *caches, part, part_lse, cu, context, shared, tables, 2, 2, 0.1, None, newest)
        merge_splits(part, part_lse, out, cu, shared, 2)
        paged_decode(q, *caches, part, part_lse, cu, context, shared, tables, 2, 1, 0.1, out, newest)

    angles = zeros(num_rows, width // 2, of=torch.float32)
    rotary_merge(*rotary_split(qkv[:num_rows].flatten(1), angles, angles, heads, kv_heads), angles, angles)

    x, weight = zeros(num_rows, shape.hidden_size), zeros(shape.hidden_size)
    for residual in (None, x):
        normed, total, rstd = rms_norm(x, weight, 1e-6, residual)
        rms_norm_backward(total, weight, rstd, normed, residual)
    gate_up = zeros(num_rows, 2 * shape.intermediate_size)
    silu_mul_backward(gate_up, silu_mul(gate_up))

    row_keys = tuple(zeros(num_rows, of=torch.int64) for _ in range(4))
    ones = zeros(num_rows, of=torch.float32) + 1
    for logits_dtype in {dtype, torch.float32}:
        logits = zeros(num_rows, shape.vocab_size, of=logits_dtype)
        for noise in (uniforms(*row_keys), None):
            sample_pick(logits, ones, sample_blocks(logits, ones), noise, row_keys)
            sample_filtered(logits, ones, row_keys[0], ones, ones - 1, noise, row_keys)

    flags, record = zeros(num_rows, of=torch.int32), zeros(16, num_rows, of=torch.int64)
    place_rows(places, flags, flags, flags, zeros(num_rows, 16, of=torch.int32), flags, places, page, 0)
    advance_rows(
        places, ones, places, places, places, places, flags, places, places, zeros(4, 8, of=torch.int64), record,
        record.float(),
    )  # fmt: skip
    logits = zeros(num_rows, shape.vocab_size)
    logp, entropy, lse = (zeros(num_rows, of=torch.float32) for _ in "pel")
    token_logprobs(logits, row_keys[0], 1.0, logp, entropy, lse)
    token_logprobs_backward(logits, row_keys[0], 1.0, lse, entropy, logp, logp)
    grpo = {"is_cispo": False, "clip_low": 0.2, "clip_high": 0.2}
    kl = {"kl_beta": 0.01, "kl_estimator": 3, "rollout_is": 1, "is_cap": 2.0}
    policy_loss(logp, logp, ones, row_keys[0], ones, None, entropy, None, None, **grpo)
    policy_loss(logp, logp, ones, row_keys[0], ones, None, entropy, logp, logp, **grpo, **kl)


def tune(shape: Shape, dtype: torch.dtype, device: torch.device | str) -> None:
    """Compile every kernel on a GPU and let each choose its configuration at a size that fills the device, long
    segments included: by a few blocks the smallest tiles would always win. Triton keeps both on disk. In the
    interpreter, which chooses nothing, every kernel runs once."""
    size = 1 if INTERPRETED else 8
    launch_all(shape, dtype, device, groups=size, blocks=size)
