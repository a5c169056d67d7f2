"""Step metadata and compaction in CUDA C++, its own source run on the host, and in plain torch: the same, and right."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast.ops import pack_rows
from sagc_fast.ops.pack_rows import DecodeTable, PackedRows

PAGE = 4
PADDING = 77


def make_table(seed: int, num_slots: int, num_listed: int, num_columns: int, share_over: float) -> DecodeTable:
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(0, high, size, generator=generator, dtype=dtype)

    return DecodeTable(
        rows_C=torch.randperm(num_slots, generator=generator).int(),
        num_rows=torch.tensor([num_listed], dtype=torch.int32),
        is_over_S=torch.rand(num_slots, generator=generator) < share_over,
        num_computed_S=integers(num_columns * PAGE, num_slots, dtype=torch.int64),
        block_tables_SB=integers(1000, num_slots, num_columns),
        share_group_S=integers(5, num_slots),
        shared_blocks_S=integers(3, num_slots),
    )


def filled(bucket: int, num_columns: int) -> PackedRows:
    """Buffers with something in them, so that what is not written shows."""
    out = PackedRows.empty(bucket, num_columns, "cpu")
    for tensor in out.tensors():
        tensor.fill_(-9)
    return out


def plain(table: DecodeTable, bucket: int) -> list[list]:
    """What the fields mean, in plain Python."""
    listed = table.rows_C[: int(table.num_rows)].tolist()
    live = [s for s in listed if s >= 0 and not table.is_over_S[s]]
    kept, padding = live[:bucket], bucket - min(bucket, len(live))
    positions = [int(table.num_computed_S[s]) for s in kept]
    tables = [table.block_tables_SB[s].tolist() for s in kept]
    width = table.block_tables_SB.shape[1]
    return [
        kept + [-1] * padding,
        [len(live)],
        positions + [0] * padding,
        [t[p // PAGE] * PAGE + p % PAGE for t, p in zip(tables, positions, strict=True)] + [PADDING] * padding,
        [p + 1 for p in positions] + [0] * padding,
        [min(i, len(live)) for i in range(bucket + 1)],
        [[b if i <= p // PAGE else 0 for i, b in enumerate(t)] for t, p in zip(tables, positions, strict=True)]
        + [[0] * width] * padding,
        [int(table.share_group_S[s]) for s in kept] + [-1] * padding,
        [int(table.shared_blocks_S[s]) for s in kept] + [0] * padding,
    ]


@given(
    seed=st.integers(0, 2**31),
    num_slots=st.integers(1, 20),
    listed=st.floats(0, 1),
    bucket=st.integers(1, 20),
    num_columns=st.integers(1, 5),
    share_over=st.sampled_from([0.0, 0.3, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_reference_is_what_the_fields_say(seed, num_slots, listed, bucket, num_columns, share_over) -> None:
    table = make_table(seed, num_slots, int(listed * num_slots), num_columns, share_over)
    out = filled(bucket, num_columns)
    pack_rows.pack_decode_rows(table, out, PAGE, PADDING)
    assert [tensor.tolist() for tensor in out.tensors()] == plain(table, bucket)


def test_the_kernel_is_the_reference(host) -> None:
    """Also more rows than a round of the count takes (256), more than a block writes (8), and too small a bucket."""
    cases = [(1, 1, 1, 1, 0.0), (9, 7, 16, 3, 0.5), (9, 0, 4, 3, 0.5), (40, 40, 40, 33, 1.0), (600, 590, 300, 2, 0.6)]
    for seed, (num_slots, num_listed, bucket, num_columns, share_over) in enumerate([*cases, (30, 30, 8, 2, 0.1)]):
        table = make_table(seed, num_slots, num_listed, num_columns, share_over)
        table.rows_C[num_listed // 2] = -1 if seed == 1 else table.rows_C[num_listed // 2]
        wanted, found = filled(bucket, num_columns), filled(bucket, num_columns)
        pack_rows.pack_decode_rows(table, wanted, PAGE, PADDING)
        host.pack(table, found, PAGE, PADDING)
        for name, one, other in zip(PackedRows.__dataclass_fields__, found.tensors(), wanted.tensors(), strict=True):
            assert torch.equal(one, other), (seed, name)


def test_a_row_list_packed_again_shrinks_to_the_next_bucket(host) -> None:
    """The result's rows are the next table's: rows end, the others keep their order."""
    table = make_table(3, 12, 12, 4, 0.0)
    first, second = filled(12, 4), filled(4, 4)
    host.pack(table, first, PAGE, PADDING)
    table.is_over_S[first.rows_R[::3].long()] = True
    table.is_over_S[first.rows_R[1::3].long()] = True
    again = DecodeTable(first.rows_R, first.num_rows, *list(table.__dict__.values())[2:])
    host.pack(again, second, PAGE, PADDING)
    assert second.rows_R.tolist() == first.rows_R[2::3].tolist()
    assert second.num_rows.tolist() == [4]
