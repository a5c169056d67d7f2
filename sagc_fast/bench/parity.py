"""How far the paths that compute a token's log-prob differ: decode, prefill, other batches, the trainer's forward.

And what a narrower KV cache costs: the same text with keys and values rounded on their way into the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sagc_fast import ops
from sagc_fast.model.transformer import Transformer
from sagc_fast.ops.layouts import PackedLayout, PagedLayout
from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.rollout.kv_cache import KVCache, dtype_of
from sagc_fast.types import Group, SamplingParams

BLOCK_SIZE = 16
Round = Callable[[torch.Tensor], torch.Tensor]


def ladder(
    model: Transformer, prompts: Sequence[Sequence[int]], kv_dtype: str, group_size: int = 4, length: int = 24
) -> dict[str, float]:
    """Largest deviation of log-probs between the engine's completions and each other way to compute them.

    ``one row at a time``: an engine with one row (tokens that differ end the comparison of a completion); ``one
    prefill``: the whole text in one chunk; ``trainer``: the packed forward and fused head of an update.
    """
    params = SamplingParams(max_new_tokens=length, ignore_eos=True, seed=1)
    groups = RolloutEngine(model, kv_dtype=kv_dtype).generate(prompts, group_size, params)
    alone = RolloutEngine(model, kv_dtype=kv_dtype, max_num_seqs=1).generate(prompts, group_size, params)
    others = {
        "one row at a time": [_until_they_part(*pair) for pair in zip(groups, alone, strict=True)],
        "one prefill": [_prefilled(model, group, kv_dtype) for group in groups],
        "trainer": [_trained(model, group) for group in groups],
    }
    found = [[c.logprobs for c in group.completions] for group in groups]
    return {
        name: max(
            abs(a - b)
            for ours, theirs in zip(found, values, strict=True)
            for one, other in zip(ours, theirs, strict=True)
            for a, b in zip(one, other, strict=False)
        )
        for name, values in others.items()
    }


def _until_they_part(group: Group, other: Group) -> list[list[float]]:
    kept = []
    for one, two in zip(group.completions, other.completions, strict=True):
        pairs = zip(one.token_ids, two.token_ids, strict=True)
        parted = next((place for place, (a, b) in enumerate(pairs) if a != b), len(one.token_ids))
        kept.append(two.logprobs[:parted])
    return kept


def _prefilled(model: Transformer, group: Group, kv_dtype: str) -> list[list[float]]:
    start = len(group.prompt_token_ids)
    texts = [group.prompt_token_ids + completion.token_ids for completion in group.completions]
    return [paged_logprobs(model, text, dtype_of(kv_dtype))[start - 1 :].tolist() for text in texts]


def paged_logprobs(model: Transformer, token_ids: Sequence[int], kv_dtype: torch.dtype) -> torch.Tensor:
    """Log-probs fp32 [T - 1] of all tokens but the first, the text prefilled in one chunk."""
    config, length = model.config, len(token_ids)
    blocks = -(-length // BLOCK_SIZE)
    kv = KVCache(config.num_layers, blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim, kv_dtype)
    places, int32 = torch.arange(length), {"dtype": torch.int32}
    layout = PagedLayout(
        positions_T=places,
        cu_query_S1=torch.tensor([0, length], **int32),
        context_lens_S=torch.tensor([length], **int32),
        block_tables_SB=torch.arange(blocks, **int32)[None],
        slots_T=places,
        logits_rows_R=places[:-1],
        share_group_S=torch.tensor([-1], **int32),
        shared_blocks_S=torch.tensor([0], **int32),
        max_query_len=length,
        max_context_len=length,
    )
    ids = torch.tensor(token_ids)
    logits = model.logits(model.forward_paged(ids, layout, kv))
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@torch.no_grad()
def _trained(model: Transformer, group: Group) -> list[list[float]]:
    prompt, lengths = len(group.prompt_token_ids), group.lengths
    starts = [prompt + sum(lengths[:index]) for index in range(len(lengths))]
    spans = tuple(zip(starts, lengths, strict=True))
    ids = torch.tensor(group.prompt_token_ids + [token for c in group.completions for token in c.token_ids])
    positions = torch.cat([torch.arange(prompt), *(prompt + torch.arange(length) for length in lengths)])
    hidden = model.forward_packed(ids, PackedLayout(positions, ((0, prompt),), (spans,)))
    rows = [row for start, length in spans for row in (prompt - 1, *range(start, start + length - 1))]
    targets = torch.cat([ids[start : start + length] for start, length in spans])
    logprobs, _ = ops.token_logprobs(hidden[rows], model.trained_head, targets)
    return [part.tolist() for part in logprobs.split(lengths)]


# ---- rounding of keys and values ---------------------------------------------------------------------------------


def through(dtype: torch.dtype) -> Round:
    """Rounding to a dtype."""
    return lambda x_TKD: x_TKD.to(dtype).to(x_TKD.dtype)


def scaled(dtype: torch.dtype, largest: float) -> Round:
    """Rounding with one scale per token and head, at which the largest element becomes ``largest``."""

    def rounded(x_TKD: torch.Tensor) -> torch.Tensor:
        scale = (x_TKD.abs().amax(-1, keepdim=True) / largest).clamp_min(1e-20)
        y = x_TKD / scale
        return (y if dtype.is_floating_point else y.round()).to(dtype).to(x_TKD.dtype) * scale

    return rounded


KV_FORMATS: dict[str, tuple[Round, str]] = {
    "bf16": (through(torch.bfloat16), "1/2"),
    "fp16": (through(torch.float16), "1/2"),
    "int8, a scale per token and head": (scaled(torch.int8, 127.0), "1/4"),
    "fp8 e4m3": (through(torch.float8_e4m3fn), "1/4"),
    "fp8 e4m3, a scale per token and head": (scaled(torch.float8_e4m3fn, 448.0), "1/4"),
    "fp8 e5m2": (through(torch.float8_e5m2), "1/4"),
}
"""What a cache could hold, and its bytes beside fp32's."""


@contextmanager
def rounded_cache(rounded: Round) -> Iterator[None]:
    """Inside the block ``forward_paged`` finds keys and values rounded as soon as they are in a cache of fp32."""
    write = ops.rope_and_cache

    def write_rounded(*arguments: Any) -> torch.Tensor:
        queries = write(*arguments)
        *_, k_cache, v_cache, slots_T = arguments
        for cache in (k_cache, v_cache):
            flat = cache.transpose(1, 2).flatten(0, 1)  # a copy: [slots, K, D]
            flat[slots_T] = rounded(flat[slots_T])
            cache.copy_(flat.view(cache.shape[0], cache.shape[2], *flat.shape[1:]).transpose(1, 2))
        return queries

    ops.rope_and_cache = write_rounded
    try:
        yield
    finally:
        ops.rope_and_cache = write


def kv_deviation(model: Transformer, token_ids: Sequence[int], rounded: Round) -> dict[str, float]:
    """What the rounding changes about the log-probs of a text: mean, 99th percentile, largest, share above 1e-2."""
    exact = paged_logprobs(model, token_ids, torch.float32)
    with rounded_cache(rounded):
        error = (paged_logprobs(model, token_ids, torch.float32) - exact).abs()
    return {
        "mean": error.mean().item(),
        "99%": error.quantile(0.99).item(),
        "largest": error.max().item(),
        "over 1e-2": (error > 1e-2).float().mean().item(),
    }
