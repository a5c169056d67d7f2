"""Where the tokens of a step stand: in the paged KV cache (rollout) and in a packed batch of groups (training).

Shape suffixes: T tokens of the step, S sequences, B block-table columns, R rows whose output is wanted.
"""

# ruff: noqa: N815 (shape suffixes in field names)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class PagedLayout:
    """One engine step: the tokens of S sequences, one after another, and the cache blocks that hold their context.

    A decode row is a sequence with one query token; a prefill chunk is one with several. Nothing else tells them apart.
    """

    positions_T: torch.Tensor
    """int64, absolute position of each token in its sequence; consecutive within a sequence."""
    cu_query_S1: torch.Tensor
    """int32 [S+1], the tokens of sequence s are rows cu_query[s] to cu_query[s+1]."""
    context_lens_S: torch.Tensor
    """int32, KV length of each sequence once this step's tokens are written."""
    block_tables_SB: torch.Tensor
    """int32, physical block of each logical block; entries past the context are ignored but must be valid ids."""
    slots_T: torch.Tensor
    """int64, block * block_size + offset at which each token's key and value are written."""
    logits_rows_R: torch.Tensor
    """int64, rows of T whose hidden state is wanted."""
    share_group_S: torch.Tensor
    """int32, sequences with the same value >= 0 hold the same first ``shared_blocks_S`` physical blocks; -1: none."""
    shared_blocks_S: torch.Tensor
    """int32, number of leading blocks shared within the share group; 0: none."""
    max_query_len: int
    max_context_len: int
    """Of this step's sequences; of a captured step, whose lengths change between replays, an upper bound."""
    is_captured: bool = False
    """The step goes into a CUDA graph: every sequence brings one token, and no value may be looked at on the host."""
    first_chunk: int = 0
    """Sequences before this one are known to bring one token each; 0 claims nothing."""


Span = tuple[int, int]
"""(start, length) of consecutive rows of a packed batch."""


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """A training batch of whole groups without padding: each prompt once, its completions behind it.

    A completion token attends to the whole prompt of its group and causally to its own completion.
    """

    positions_T: torch.Tensor
    """int64, position of each token; every completion continues from its prompt's length."""
    prompt_spans: tuple[Span, ...]
    """One span per group."""
    completion_spans: tuple[tuple[Span, ...], ...]
    """One tuple of spans per group, in sample order."""
