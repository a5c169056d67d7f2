"""Paged attention by Triton: prefill chunks, split decode rows and siblings over a shared prompt, in one step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_steps import PAGE, SCALE, compare, make_step
from sagc_fast.kernels.decode_plan import BLOCK_SEQUENCES, decode_plan
from sagc_fast.kernels.group_decode import group_decode
from sagc_fast.kernels.paged_prefill import paged_prefill

from sagc_fast.ops import paged, triton_ops

MIXED = [
    (1, 1, -1, 0), (33, 1, 7, 2), (40, 1, 7, 2), (65, 1, 7, 2), (130, 1, 8, 1), (17, 17, -1, 0),
    (90, 70, -1, 0), (3, 2, -1, 0),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_decode_rows_siblings_and_chunks_in_one_step(dtype: torch.dtype, device: torch.device) -> None:
    compare(make_step(MIXED, 3, 1, 32, dtype), device)


def test_decode_rows_ahead_of_the_first_chunk_may_be_named(device: torch.device) -> None:
    q, k, v, layout = make_step(MIXED, 3, 1, 32, torch.float32)
    compare((q, k, v, replace(layout, first_chunk=5)), device)


def test_prefill_leaves_the_sequences_before_its_first_one_alone(device: torch.device) -> None:
    q, k, v, layout = make_step([(20, 4, -1, 0), (9, 5, -1, 0), (40, 33, -1, 0)], 2, 1, 16, torch.float32)
    wanted = paged.paged_attention(q, k, v, layout, SCALE)
    out = torch.full_like(q, 7.0).to(device)
    integers = (layout.cu_query_S1, layout.context_lens_S, layout.block_tables_SB)
    q, k, v, *integers = (x.to(device) for x in (q, k, v, *integers))
    paged_prefill(q, k, v, out, *integers, 33, SCALE, first_sequence=1)
    assert (out[:4] == 7.0).all()
    torch.testing.assert_close(out[4:].cpu(), wanted[4:], rtol=0, atol=1e-5)


WITHOUT_A_TOKEN = {
    "decode": [(5, 1, -1, 0), (9, 0, -1, 0), (4, 1, -1, 0)],
    "chunk": [(40, 6, -1, 0), (33, 0, -1, 0), (18, 1, 2, 1), (17, 1, 2, 1)],
    "no_context": [(0, 0, -1, 0), (3, 3, -1, 0)],
}


@pytest.mark.parametrize("name", WITHOUT_A_TOKEN)
def test_sequences_without_a_token(name: str, device: torch.device) -> None:
    compare(make_step(WITHOUT_A_TOKEN[name], 4, 2, 16, torch.float32), device)


@pytest.mark.parametrize("heads", [(4, 2, 8), (2, 1, 80), (1, 1, 256)], ids=str)
def test_heads_and_widths(heads: tuple[int, int, int], device: torch.device) -> None:
    compare(make_step([(20, 1, 0, 1), (18, 1, 0, 1), (9, 5, -1, 0)], *heads, torch.float32), device)


def test_long_contexts_are_split(device: torch.device, monkeypatch) -> None:
    monkeypatch.setattr(triton_ops, "KEYS_PER_SPLIT", 64)
    compare(make_step([(300, 1, 3, 9), (150, 1, 3, 9), (64, 1, -1, 0)], 2, 1, 16, torch.float32), device)


def test_more_siblings_than_a_tile_and_neighbours_with_other_prompts(device: torch.device) -> None:
    siblings = triton_ops.siblings_per_tile(48)  # 128 rows hold two
    rows = [(20 + i % 3, 1, 5, 1) for i in range(2 * siblings + 1)] + [(18, 1, 6, 1), (19, 1, 6, 1)]
    compare(make_step(rows, 48, 1, 16, torch.float32), device)


def test_the_cache_may_be_of_another_dtype(device: torch.device) -> None:
    q, k, v, layout = make_step([(20, 1, 0, 1), (18, 1, 0, 1), (9, 5, -1, 0)], 2, 1, 16, torch.float32)
    k, v = k.bfloat16(), v.bfloat16()
    compare((q, k, v, layout), device)


def test_a_tile_of_siblings_writes_nothing_for_the_row_behind_them(device: torch.device) -> None:
    """The neighbour's own program would repair it here, where programs run in turn; on a GPU they race."""
    q, k, v, layout = make_step([(20, 1, 5, 1), (19, 1, 5, 1), (18, 1, -1, 0)], 2, 1, 16, torch.float32)
    plan = ([16, 16, 0], [0, 0, 2], [1, 0, 0, 0])
    integers = (layout.cu_query_S1, layout.context_lens_S, *(torch.tensor(column).int() for column in plan))
    part, lse = torch.full((3, 2, 1, 16), 7.0, device=device), torch.full((3, 2, 1), 7.0, device=device)
    q, k, v, *integers = (x.to(device) for x in (q, k, v, *integers, layout.block_tables_SB))
    group_decode(q, k, v, part, lse, *integers, 1, SCALE)
    assert (part[2] == 7.0).all()
    assert (lse[2] == 7.0).all()
    assert (lse[:2] != 7.0).all()


@pytest.mark.parametrize("num_sequences", [1, 5, BLOCK_SEQUENCES, 3 * BLOCK_SEQUENCES + 7])
def test_runs_of_siblings_are_those_found_one_by_one(num_sequences: int, device: torch.device) -> None:
    """Runs that cross the kernel's blocks included."""
    generator = torch.Generator().manual_seed(num_sequences)
    groups = torch.randint(-1, 3, (num_sequences,), generator=generator).repeat_interleave(5)[:num_sequences]
    shared = torch.randint(0, 3, (num_sequences,), generator=generator).repeat_interleave(5)[:num_sequences]
    if num_sequences > 3 * BLOCK_SEQUENCES:
        groups[40:180], shared[40:180] = 7, 2
    queries = (torch.rand(num_sequences, generator=generator) < 0.9).int() + 2 * (
        torch.rand(num_sequences, generator=generator) < 0.05
    )
    cu = torch.cat((torch.zeros(1), queries.cumsum(0)))
    lens, starts = [], []
    for i in range(num_sequences):
        lens.append(int(shared[i]) * PAGE if queries[i] == 1 and groups[i] >= 0 else 0)
        goes_on = i > 0 and lens[i] > 0 and lens[i] == lens[i - 1] and groups[i] == groups[i - 1]
        starts.append(starts[-1] if goes_on else i)
    found = decode_plan(*(x.int().to(device) for x in (cu, groups, shared)), PAGE, 3)
    assert [x.tolist() for x in found[:2]] == [lens, starts]
    num_leaders, *leaders = found[2].tolist()
    assert leaders[:num_leaders] == [i for i in range(num_sequences) if lens[i] > 0 and (i - starts[i]) % 3 == 0]
