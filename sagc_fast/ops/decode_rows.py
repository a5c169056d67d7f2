"""Decode rows that live on the device from step to step: where each row stands, and what a draw does to it.

A decode step is ``place_rows``, the model, the draw, ``advance_rows``; none of them needs the host, so that a CUDA
graph can hold all four and be replayed. A row that is over stays as it is and writes its key and value to a scratch
slot, so that it changes nothing but takes part in the products until the host closes ranks.

Shape suffixes: R rows, B block-table columns, S sets of ending ids, I ids of a set, K steps of the record.
"""

# ruff: noqa: N815 (shape suffixes in field names)

from __future__ import annotations

from dataclasses import dataclass

import torch

NOT_DRAWN = -1
"""In the record: the row was over before the step. A token v whose draw ended its row stands there as -2 - v."""


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """Tensors that stay in place; all are read and written by row, none knows of the other rows."""

    token_R: torch.Tensor
    """int64, the newest token, not in the cache yet."""
    position_R: torch.Tensor
    """int64, its place in the sequence."""
    index_R: torch.Tensor
    """int64, place in the completion of the token that is drawn next; part of the noise key."""
    max_output_R: torch.Tensor
    """int64, length cap of the completion."""
    is_live_R: torch.Tensor
    """int32, 1 or 0."""
    is_kept_R: torch.Tensor
    """int32, 0: the host has taken the row out meanwhile."""
    end_set_R: torch.Tensor
    """int64, row of ``end_ids_SI``."""
    shared_blocks_R: torch.Tensor
    """int32, leading blocks that siblings share (see PagedLayout)."""
    step_R: torch.Tensor
    """int64, row of the record that the next draw goes to; wraps around."""
    context_R: torch.Tensor
    """int32, set by place_rows: positions that the row attends to."""
    slot_R: torch.Tensor
    """int64, set by place_rows: where its key and value go."""
    block_tables_RB: torch.Tensor
    """int32, as in PagedLayout."""
    end_ids_SI: torch.Tensor
    """int64, sets of ending token ids, padded with -1."""
    drawn_KR: torch.Tensor
    """int64, the record of draws; see NOT_DRAWN."""
    logprobs_KR: torch.Tensor
    """fp32, their log-probs; NaN where the logits were not finite, which ends the row too."""


def place_rows(rows: DecodeRows, block_size: int, scratch_slot: int) -> None:
    """Set ``context_R`` and ``slot_R``. Rows that are over attend to their shared blocks and one position more, the
    least that a row may, and write to the scratch slot."""
    rows.is_live_R.mul_(rows.is_kept_R)
    is_live_R = rows.is_live_R > 0
    position_R = rows.position_R
    idle_context_R = rows.shared_blocks_R * block_size + 1
    rows.context_R.copy_(torch.where(is_live_R, position_R + 1, idle_context_R))
    block_R1 = rows.block_tables_RB.gather(1, (position_R // block_size).unsqueeze(1))
    slot_R = block_R1.squeeze(1).long() * block_size + position_R % block_size
    rows.slot_R.copy_(torch.where(is_live_R, slot_R, scratch_slot))


def advance_rows(rows: DecodeRows, token_R: torch.Tensor, logprob_R: torch.Tensor) -> None:
    """Take the draw of a step in: record it, end rows by id, by cap or for want of finite logits, move the others on.

    ``token_R`` int64 and ``logprob_R`` fp32 as the draw returns them.
    """
    is_live_R = rows.is_live_R > 0
    index_R = rows.index_R + 1
    is_end_R = (rows.end_ids_SI.index_select(0, rows.end_set_R) == token_R.unsqueeze(1)).any(1)
    is_over_R = is_end_R | (index_R >= rows.max_output_R) | torch.isnan(logprob_R)
    drawn_R = torch.where(is_over_R, -2 - token_R, token_R)
    step_1R = rows.step_R.unsqueeze(0)
    rows.drawn_KR.scatter_(0, step_1R, torch.where(is_live_R, drawn_R, NOT_DRAWN).unsqueeze(0))
    rows.logprobs_KR.scatter_(0, step_1R, torch.where(is_live_R, logprob_R, 0.0).unsqueeze(0))
    rows.step_R.copy_((rows.step_R + 1) % rows.drawn_KR.shape[0])
    goes_on_R = is_live_R & ~is_over_R
    rows.token_R.copy_(torch.where(goes_on_R, token_R, rows.token_R))
    rows.position_R.add_(goes_on_R.long())
    rows.index_R.copy_(torch.where(is_live_R, index_R, rows.index_R))
    rows.is_live_R.copy_(goes_on_R.int())
