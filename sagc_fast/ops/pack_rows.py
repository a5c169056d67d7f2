"""The next decode step's metadata from a table of rows on the device, rows that are over left out; plain torch.

For a runner that keeps its rows on the device: nothing here is sized by a value that lives there, so a captured graph
can go on while rows end. Shape suffixes: C places in row order, S slots, B block-table columns, R rows of the bucket.
"""

# ruff: noqa: N815 (shape suffixes in field names)

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, eq=False)
class DecodeTable:
    """Rows by slot, and the slots in row order. Contiguous tensors on one device."""

    rows_C: torch.Tensor
    """int32, slots in row order, siblings side by side; entries below 0 are no rows."""
    num_rows: torch.Tensor
    """int32 [1], how many entries of ``rows_C`` count."""
    is_over_S: torch.Tensor
    """bool"""
    num_computed_S: torch.Tensor
    """int64, tokens whose keys and values are in the cache: the position of the next token."""
    block_tables_SB: torch.Tensor
    """int32, wide enough for the next token."""
    share_group_S: torch.Tensor
    """int32, as in PagedLayout."""
    shared_blocks_S: torch.Tensor
    """int32, as in PagedLayout."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """What a decode step reads, in buffers that stay; the live rows first, in their order, then padding.

    A padding row has no query token in ``cu_query_R1``, context 0, no share group, and writes to the padding slot.
    ``rows_R`` and ``num_rows`` are the next table's, in other buffers than those of the table that was read.
    """

    rows_R: torch.Tensor
    """int32, slots; -1: padding."""
    num_rows: torch.Tensor
    """int32 [1], live rows; more than R means that the bucket was too small and the last ones are missing."""
    positions_R: torch.Tensor
    """int64"""
    slots_R: torch.Tensor
    """int64, where the next token's key and value go."""
    context_lens_R: torch.Tensor
    """int32, with the next token."""
    cu_query_R1: torch.Tensor
    """int32 [R + 1]"""
    block_tables_RB: torch.Tensor
    """int32; 0 past the context."""
    share_group_R: torch.Tensor
    """int32"""
    shared_blocks_R: torch.Tensor
    """int32"""

    @classmethod
    def empty(cls, bucket: int, num_columns: int, device: torch.device | str) -> PackedRows:
        """Buffers for ``bucket`` rows; call it once, outside a graph."""
        shapes = {"num_rows": (1,), "cu_query_R1": (bucket + 1,), "block_tables_RB": (bucket, num_columns)}
        wide = ("positions_R", "slots_R")
        return cls(
            **{
                field.name: torch.zeros(
                    shapes.get(field.name, (bucket,)),
                    dtype=torch.int64 if field.name in wide else torch.int32,
                    device=device,
                )
                for field in fields(cls)
            }
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order of the fields, which is that of the kernels' arguments."""
        return tuple(getattr(self, field.name) for field in fields(self))


def pack_decode_rows(table: DecodeTable, out: PackedRows, block_size: int, padding_slot: int) -> None:
    """Fill ``out`` from ``table``; its buffers must not overlap the table's.

    Args:
        block_size: positions of a KV block.
        padding_slot: place in the cache (block * block_size + offset) that nobody reads, for rows without a token.
    """
    bucket, device = len(out.rows_R), out.rows_R.device
    capacity = len(table.rows_C)
    slot_C = table.rows_C.clamp(min=0).long()
    is_live_C = torch.arange(capacity, device=device) < table.num_rows
    is_live_C &= (table.rows_C >= 0) & ~table.is_over_S[slot_C]
    rank_C = torch.where(is_live_C, is_live_C.cumsum(0) - 1, bucket).clamp(max=bucket)
    # Rows without a place are written behind the bucket.
    rows_R = torch.full((bucket + 1,), -1, dtype=torch.int32, device=device)
    rows_R = rows_R.scatter(0, rank_C, table.rows_C)[:bucket]
    is_row_R, slot_R = rows_R >= 0, rows_R.clamp(min=0).long()
    position_R = torch.where(is_row_R, table.num_computed_S[slot_R], 0)
    column_R = position_R // block_size
    tables_RB = table.block_tables_SB[slot_R]
    columns_B = torch.arange(tables_RB.shape[1], device=device)
    is_used_RB = is_row_R.unsqueeze(1) & (columns_B <= column_R.unsqueeze(1))
    block_R = tables_RB.gather(1, column_R.clamp(max=len(columns_B) - 1).unsqueeze(1)).squeeze(1)
    num_live = is_live_C.sum().int()
    out.rows_R.copy_(rows_R)
    out.num_rows.copy_(num_live)
    out.positions_R.copy_(position_R)
    out.slots_R.copy_(torch.where(is_row_R, block_R * block_size + position_R % block_size, padding_slot))
    out.context_lens_R.copy_(torch.where(is_row_R, position_R + 1, 0))
    out.cu_query_R1.copy_(torch.arange(bucket + 1, device=device).clamp(max=num_live))
    out.block_tables_RB.copy_(torch.where(is_used_RB, tables_RB, 0))
    out.share_group_R.copy_(torch.where(is_row_R, table.share_group_S[slot_R], -1))
    out.shared_blocks_R.copy_(torch.where(is_row_R, table.shared_blocks_S[slot_R], 0))
