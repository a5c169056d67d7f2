"""Each operator against float64 within the bound that docs/native.md states for its dtype, on fresh random inputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sagc_fast.ops.layouts import PagedLayout

DOCUMENT = Path(__file__).parents[2] / "docs/native.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Case = tuple[torch.Tensor, torch.Tensor]
"""What the operator gave and what float64 gives for the same, already rounded, operands."""


def stated_bounds() -> dict[tuple[str, str], float]:
    """(operator, dtype) -> bound, from the table whose head begins with ``| operator |``."""
    lines = iter(DOCUMENT.read_text(encoding="utf-8").splitlines())
    head = next(line for line in lines if line.startswith("| operator |"))
    dtypes = [cell.strip() for cell in head.strip("|").split("|")[1:]]
    next(lines)
    bounds = {}
    for line in lines:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for dtype, cell in zip(dtypes, cells, strict=True):
            if number := re.fullmatch(r"[\d.]+e-\d+", cell):
                bounds[name.strip("`"), dtype] = float(number[0])
    return bounds


BOUNDS = stated_bounds()


def attention(native: ModuleType, dtype: torch.dtype, cache_dtype: torch.dtype) -> Case:
    heads, kv_heads, head_dim, length = 6, 2, 48, 200
    q = torch.randn(1, heads, head_dim).to(dtype)
    k, v = (torch.randn(13, kv_heads, 16, head_dim).to(cache_dtype) for _ in range(2))
    int32 = {"dtype": torch.int32}
    layout = PagedLayout(
        positions_T=torch.tensor([length - 1]),
        cu_query_S1=torch.tensor([0, 1], **int32),
        context_lens_S=torch.tensor([length], **int32),
        block_tables_SB=torch.arange(13, **int32).view(1, 13),
        slots_T=torch.empty(0, dtype=torch.int64),
        logits_rows_R=torch.empty(0, dtype=torch.int64),
        share_group_S=torch.tensor([-1], **int32),
        shared_blocks_S=torch.tensor([0], **int32),
        max_query_len=1,
        max_context_len=length,
    )
    keys, values = (x.double().transpose(1, 2).flatten(0, 1)[:length] for x in (k, v))
    scores = torch.einsum("kgd,pkd->kgp", q[0].double().view(kv_heads, -1, head_dim), keys) * head_dim**-0.5
    exact = torch.einsum("kgp,pkd->kgd", scores.softmax(-1), values).reshape(1, heads, head_dim)
    return native.paged_attention(q, k, v, layout, head_dim**-0.5), exact


def rms_norm(native: ModuleType, dtype: torch.dtype) -> Case:
    x, weight = torch.randn(8, 576).to(dtype), torch.randn(576).to(dtype)
    wide = x.double()
    return native.rms_norm(x, weight, 1e-5), weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def silu_mul(native: ModuleType, dtype: torch.dtype) -> Case:
    x = (torch.randn(8, 1536) * 3).to(dtype)
    gate, up = x.double().chunk(2, -1)
    return native.silu_mul(x), torch.nn.functional.silu(gate) * up


def rope_and_cache(native: ModuleType, dtype: torch.dtype, cache_dtype: torch.dtype) -> Case:
    q, k = torch.randn(8, 4, 48).to(dtype), torch.randn(8, 2, 48).to(dtype)
    angles, places = torch.randn(8, 24), torch.arange(8)
    caches = [torch.zeros(1, 2, 8, 48, dtype=cache_dtype) for _ in range(2)]
    native.rope_and_cache(q, k, k, angles.cos(), angles.sin(), places, *caches, places)
    a, b = k.double().chunk(2, -1)
    cos, sin = angles.cos().double().unsqueeze(1), angles.sin().double().unsqueeze(1)
    return caches[0][0].transpose(0, 1), torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def sample_tokens(native: ModuleType, dtype: torch.dtype) -> Case:
    logits = torch.randn(16, 4096).to(dtype) * 5
    token, logprob = native.sample_tokens(logits, torch.rand(16, dtype=torch.float64), torch.ones(16))
    return logprob, logits.double().log_softmax(-1).gather(1, token.unsqueeze(1)).squeeze(1)


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest deviation over the largest magnitude of the exact result."""
    return ((result.double() - exact).abs().max() / exact.abs().max()).item()


CASES: dict[str, Callable[[ModuleType, torch.dtype], Case]] = {
    "paged_attention": lambda native, dtype: attention(native, dtype, dtype),
    "paged_attention, fp32 over a cache of": lambda native, dtype: attention(native, torch.float32, dtype),
    "rms_norm": rms_norm,
    "silu_mul": silu_mul,
    "rope_and_cache": lambda native, dtype: rope_and_cache(native, dtype, dtype),
    "rope_and_cache, fp32 into a cache of": lambda native, dtype: rope_and_cache(native, torch.float32, dtype),
    "sample_tokens, log-prob": sample_tokens,
}


def test_the_table_states_a_bound_for_every_case() -> None:
    assert {name for name, _ in BOUNDS} == {*CASES}


@pytest.mark.parametrize(("name", "dtype"), sorted(BOUNDS))
def test_error_against_float64_is_within_the_stated_bound(native: ModuleType, name: str, dtype: str) -> None:
    worst = max(relative_error(*CASES[name](native, DTYPES[dtype])) for _ in range(10))
    assert worst <= BOUNDS[name, dtype]
