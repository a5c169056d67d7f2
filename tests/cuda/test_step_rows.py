"""Decode rows moved by CUDA C++, its own source run on the host, and by plain torch: the same in every field."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from sagc_fast.ops import DecodeRows, decode_rows

PAGE, SCRATCH = 4, 1000


@pytest.mark.parametrize("num_rows", [1, 128, 131])
def test_rows_move_as_in_plain_torch(num_rows: int, host, random_decode_rows) -> None:
    """One block of 128 threads, filled or not, and a second one; draws that end rows by id, by cap and by NaN."""
    wanted = random_decode_rows(num_rows, PAGE)
    found = replace(wanted, **{field.name: getattr(wanted, field.name).clone() for field in fields(DecodeRows)})
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        tokens = torch.randint(0, 8, (num_rows,), generator=generator)
        logprobs = torch.randn(num_rows, generator=generator)
        logprobs[::17] = float("nan")
        decode_rows.place_rows(wanted, PAGE, SCRATCH)
        host.place_rows(found, PAGE, SCRATCH)
        decode_rows.advance_rows(wanted, tokens, logprobs)
        host.advance_rows(found, tokens, logprobs)
        for field in fields(DecodeRows):
            one, other = getattr(found, field.name), getattr(wanted, field.name)
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=field.name)
    assert (wanted.is_live_R == 0).any()


def test_no_row_is_no_launch(host, random_decode_rows) -> None:
    rows = random_decode_rows(0, PAGE)
    host.place_rows(rows, PAGE, SCRATCH)
    host.advance_rows(rows, torch.empty(0, dtype=torch.int64), torch.empty(0))
