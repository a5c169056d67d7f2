"""From a step plan to the tensors that the model reads.

Decode rows come first, each with its newest token and its drafts, then the chunks. A layout is built from where each
sequence starts and how many tokens it brings; nothing else tells a decode row from a chunk.

Shape suffixes: T tokens of the step, S sequences, B block-table columns, R sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sagc_fast.ops.layouts import PagedLayout
from sagc_fast.profiling import ranged
from sagc_fast.rollout.plan import Chunk, StepPlan
from sagc_fast.rollout.rows import RowTable
from sagc_fast.rollout.uploads import uploaded


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """Input of one model step and where its samples come from."""

    token_ids: torch.Tensor
    """int64 [T]"""
    layout: PagedLayout
    hidden_index: NDArray[np.int64]
    """[R], for each sample the row of the wanted hidden states, late forks' saved ones behind; rising."""
    num_decode_tokens: int
    """Drafted ones included."""
    num_prefill_tokens: int
    """Prompt tokens and recomputed ones."""
    num_recomputed_tokens: int


@ranged("batch")
def build_batch(plan: StepPlan, rows: RowTable, block_size: int, device: torch.device) -> StepBatch:
    """Gather the plan's rows and chunks; O(tokens of the step)."""
    decode_slots = plan.decode_slots
    num_decode = decode_slots.size
    starts_S = np.concatenate((rows.num_computed[decode_slots], np.array([c.start for c in plan.chunks], np.int64)))
    query_lens_S = np.ones(num_decode + len(plan.chunks), dtype=np.int64)
    query_lens_S[:num_decode] += plan.drafts.lengths
    query_lens_S[num_decode:] = [chunk.length for chunk in plan.chunks]
    token_ids_T = np.concatenate((_decode_tokens(plan, rows), *(_chunk_tokens(c, rows) for c in plan.chunks)))
    context_lens_S = starts_S + query_lens_S
    num_columns = -(-int(context_lens_S.max(initial=1)) // block_size)
    tables_SB = rows.block_tables[:, :num_columns][decode_slots]
    if plan.chunks:
        tables_SB = np.concatenate((tables_SB, _chunk_tables(plan.chunks, rows, num_columns)))

    ends_S = np.cumsum(query_lens_S)
    sequence_T = np.repeat(np.arange(query_lens_S.size), query_lens_S)
    positions_T = np.arange(token_ids_T.size) - np.repeat(ends_S - context_lens_S, query_lens_S)
    slots_T = tables_SB[sequence_T, positions_T // block_size].astype(np.int64) * block_size + positions_T % block_size
    num_decode_tokens = plan.num_decode_tokens
    is_final = np.array([chunk.is_last for chunk in plan.chunks], dtype=bool)
    wanted_R = np.concatenate((np.arange(num_decode_tokens), ends_S[num_decode:][is_final] - 1))
    num_padding = len(plan.chunks)
    no_chunk = np.zeros(num_padding, dtype=np.int32)
    columns = {
        "positions_T": positions_T,
        "cu_query_S1": np.concatenate((np.zeros(1, np.int32), ends_S.astype(np.int32))),
        "context_lens_S": context_lens_S.astype(np.int32),
        "block_tables_SB": tables_SB,
        "slots_T": slots_T,
        "logits_rows_R": wanted_R,
        "share_group_S": np.concatenate((rows.group_index[decode_slots], no_chunk - 1)),
        "shared_blocks_S": np.concatenate((rows.shared_blocks[decode_slots], no_chunk)),
    }
    token_ids, *tensors = uploaded([token_ids_T, *columns.values()], device)
    layout = PagedLayout(
        **dict(zip(columns, tensors, strict=True)),
        max_query_len=int(query_lens_S.max(initial=0)),
        max_context_len=int(context_lens_S.max(initial=0)),
        first_chunk=int(np.append(query_lens_S > 1, True).argmax()),
    )
    num_recomputed = sum(chunk.num_recomputed for chunk in plan.chunks)
    num_prefill = sum(c.length if c.sequence is None else c.num_recomputed for c in plan.chunks)
    return StepBatch(
        token_ids=token_ids,
        layout=layout,
        hidden_index=_hidden_index(plan, num_decode_tokens, wanted_R.size),
        num_decode_tokens=token_ids_T.size - num_prefill,
        num_prefill_tokens=num_prefill,
        num_recomputed_tokens=num_recomputed,
    )


def _hidden_index(plan: StepPlan, num_decode_tokens: int, num_wanted: int) -> NDArray[np.int64]:
    others = np.arange(num_decode_tokens, num_wanted + len(plan.late_forks))
    counts = np.array([*plan.samples_per_chunk, *(count for _, count in plan.late_forks)], dtype=np.int64)
    return np.concatenate((np.arange(num_decode_tokens), np.repeat(others, counts)))


def _decode_tokens(plan: StepPlan, rows: RowTable) -> NDArray[np.int64]:
    """Of each decode row the token that is not in the cache yet, then its drafts."""
    newest, lengths = rows.last_token[plan.decode_slots], plan.drafts.lengths
    return np.insert(plan.drafts.tokens, np.cumsum(lengths) - lengths, newest) if plan.drafts.tokens.size else newest


def _chunk_tokens(chunk: Chunk, rows: RowTable) -> NDArray[np.int64]:
    if chunk.sequence is None:
        return chunk.group.token_ids[chunk.start : chunk.start + chunk.length]
    outputs = rows.outputs(chunk.sequence.slot)[0]
    first = chunk.start - chunk.group.prompt_length  # recomputation starts behind the cached prompt
    return outputs[first : first + chunk.length]


def _chunk_tables(chunks: tuple[Chunk, ...], rows: RowTable, num_columns: int) -> NDArray[np.int32]:
    tables = np.zeros((len(chunks), num_columns), dtype=np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        blocks = chunk.group.blocks
        if chunk.sequence is not None:
            blocks = rows.block_tables[chunk.sequence.slot, : rows.num_blocks[chunk.sequence.slot]]
        count = min(num_columns, blocks.size)
        row[:count] = blocks[:count]
    return tables
