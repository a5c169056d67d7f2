"""Threads, and paged caches built from plain per-sequence keys and values."""

# ruff: noqa: N815 (shape suffixes in field names)

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from sagc_fast.ops.layouts import PagedLayout


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@dataclass(frozen=True)
class PagedCase:
    """A paged step of several sequences, and the same keys and values without pages."""

    q_THD: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    layout: PagedLayout
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def rows(self, sequence: int, first: int, count: int) -> tuple[torch.Tensor, PagedLayout]:
        """Query tokens ``first`` to ``first + count`` of one sequence, as a step of their own."""
        begin = int(self.layout.cu_query_S1[sequence])
        table = self.layout.block_tables_SB[sequence : sequence + 1]
        picked = slice(begin + first, begin + first + count)
        positions = self.layout.positions_T[picked]
        return self.q_THD[picked], make_layout([positions], table)


def make_layout(positions: list[torch.Tensor], block_tables: torch.Tensor) -> PagedLayout:
    """Layout of sequences whose query tokens stand at these positions (all the context before them is cached)."""
    lengths = torch.tensor([len(p) for p in positions])
    contexts = torch.tensor([int(p[-1]) + 1 for p in positions], dtype=torch.int32)
    flat = torch.cat(positions)
    sequence = torch.arange(len(positions)).repeat_interleave(lengths)
    return PagedLayout(
        positions_T=flat,
        cu_query_S1=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        context_lens_S=contexts,
        block_tables_SB=block_tables,
        slots_T=block_tables[sequence, flat // 16].long() * 16 + flat % 16,
        logits_rows_R=torch.arange(len(flat)),
        share_group_S=torch.full((len(positions),), -1, dtype=torch.int32),
        shared_blocks_S=torch.zeros(len(positions), dtype=torch.int32),
        max_query_len=int(lengths.max()),
        max_context_len=int(contexts.max()),
    )


@pytest.fixture(scope="session")
def paged_case() -> Callable[..., PagedCase]:
    """``paged_case(contexts, query_lens, heads=, kv_heads=, head_dim=, seed=)``; unused cache slots hold NaN."""

    def make(
        contexts: list[int], query_lens: list[int], heads: int = 4, kv_heads: int = 2, head_dim: int = 8, seed: int = 0
    ) -> PagedCase:
        generator = torch.Generator().manual_seed(seed)
        columns = max(-(-c // 16) for c in contexts)
        order = torch.randperm(len(contexts) * columns, generator=generator)
        tables = order.view(len(contexts), columns).int()
        k_cache, v_cache = (torch.full((len(order), kv_heads, 16, head_dim), float("nan")) for _ in "kv")
        keys = [torch.randn(c, kv_heads, head_dim, generator=generator) * 2 for c in contexts]
        values = [torch.randn(c, kv_heads, head_dim, generator=generator) for c in contexts]
        for table, k, v in zip(tables, keys, values, strict=True):
            positions = torch.arange(len(k))
            k_cache[table[positions // 16].long(), :, positions % 16] = k
            v_cache[table[positions // 16].long(), :, positions % 16] = v
        positions = [torch.arange(c - n, c) for c, n in zip(contexts, query_lens, strict=True)]
        q = torch.randn(sum(query_lens), heads, head_dim, generator=generator)
        return PagedCase(q, k_cache, v_cache, make_layout(positions, tables), keys, values)

    return make
