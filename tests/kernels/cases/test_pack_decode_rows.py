"""Step metadata and compaction by Triton: every field of every row as in plain torch."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from sagc_fast import ops
from sagc_fast.ops import pack_rows
from sagc_fast.ops.pack_rows import DecodeTable, PackedRows


@pytest.mark.parametrize(
    ("num_slots", "num_listed", "bucket", "num_columns", "share_over"),
    [(1, 1, 1, 1, 0.0), (9, 7, 12, 3, 0.5), (9, 0, 2, 3, 0.5), (20, 20, 3, 300, 1.0), (30, 30, 8, 2, 0.1)],
)
def test_equals_plain_torch(
    num_slots: int, num_listed: int, bucket: int, num_columns: int, share_over: float, device: torch.device
) -> None:
    """One row, rows over, no row, all over, and more live rows than the bucket has places."""
    generator = torch.Generator().manual_seed(num_slots)

    def integers(high: int, *size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(0, high, size, generator=generator, dtype=dtype)

    table = DecodeTable(
        torch.randperm(num_slots, generator=generator).int(),
        torch.tensor([num_listed], dtype=torch.int32),
        torch.rand(num_slots, generator=generator) < share_over,
        integers(num_columns * 16, num_slots, dtype=torch.int64),
        integers(1000, num_slots, num_columns),
        integers(5, num_slots),
        integers(3, num_slots),
    )
    if num_listed > 4:
        table.rows_C[2] = -1
    wanted, found = PackedRows.empty(bucket, num_columns, "cpu"), PackedRows.empty(bucket, num_columns, device)
    for tensor in found.tensors():
        tensor.fill_(-9)
    pack_rows.pack_decode_rows(table, wanted, 16, 7)
    moved = DecodeTable(*(getattr(table, field.name).to(device) for field in fields(table)))
    with ops.use_backend("triton"):
        ops.pack_decode_rows(moved, found, 16, 7)
    for name, one, other in zip(PackedRows.__dataclass_fields__, found.tensors(), wanted.tensors(), strict=True):
        assert torch.equal(one.cpu(), other), name
