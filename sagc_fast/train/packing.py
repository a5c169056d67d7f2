"""Completions of a step -> micro-batches under a token budget, without padding and with every prompt once.

What needs no reward is done as a group is complete, while others are still being generated (:func:`pack_group`): token
ids, positions, targets and log-probs become tensors. What depends on the other groups is left for the update: which
have a signal, and which micro-batch each goes to. A micro-batch is then a concatenation, the same in whatever order the
groups were finished.

A group goes into a micro-batch whole when it fits. A larger group is split between micro-batches, each of which repeats
its prompt; the gradient is the same, because the loss of a micro-batch is a sum over completions under one global
normaliser. Micro-batches are balanced by predicted cost, so that none holds all the long sequences.

Shape suffixes: T tokens of a micro-batch, N completion tokens that are predicted, flat.
"""

# ruff: noqa: N815 (shape suffixes in field names)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain

import torch

from sagc_fast.algo.config import FilterConfig
from sagc_fast.algo.filters import truncation_mask
from sagc_fast.errors import ConfigError
from sagc_fast.ops.layouts import PackedLayout, Span
from sagc_fast.types import Group


@dataclass(frozen=True, eq=False)
class ItemTensors:
    """A prompt and its completions one after another, int64 on the host; places count from the prompt's first token."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    source_rows_N: torch.Tensor
    completion_index_N: torch.Tensor
    """Place of the completion among those of the item."""
    spans: tuple[Span, ...]
    """Of the completions."""


@dataclass(frozen=True)
class PackItem:
    """A prompt and those of its completions that take part in an update."""

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]
    """Token ids of each completion, at least one token."""
    rows: Sequence[int]
    """Row of each completion in the step's flat lists (advantages, rewards)."""

    @cached_property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.completions))

    @cached_property
    def tensors(self) -> ItemTensors:
        """Laid out when first asked for. Raises ConfigError for an empty prompt or completion."""
        return _lay_out(self.prompt, self.completions)

    def moved(self, by: int) -> PackItem:
        """The same item, laid out if this one is, with ``by`` added to its rows."""
        item = replace(self, rows=[row + by for row in self.rows])
        item.__dict__.update((k, v) for k, v in self.__dict__.items() if k in ("num_tokens", "tensors"))
        return item

    def part(self, members: Sequence[int]) -> PackItem:
        """The same prompt with some of the completions."""
        return PackItem(self.prompt, [self.completions[m] for m in members], [self.rows[m] for m in members])


@dataclass(frozen=True, eq=False)
class PackedGroup:
    """All that the update needs of a group but its rewards."""

    item: PackItem
    """Those of its completions that take part; rows count within the group."""
    lengths: list[int]
    """Tokens of every completion."""
    is_valid: list[bool]
    """Whether each takes part."""
    logprobs_N: torch.Tensor
    """fp32: the rollout's log-probs of all tokens, completion after completion."""


def pack_group(group: Group, filters: FilterConfig) -> PackedGroup:
    """Lay a complete group out; ``filters`` may leave truncated completions out of the update."""
    completions = group.completions
    is_valid = truncation_mask([c.is_truncated for c in completions], filters).tolist()
    rows = [row for row, valid in enumerate(is_valid) if valid]
    item = PackItem(group.prompt_token_ids, [completions[row].token_ids for row in rows], rows)
    if rows:
        item.tensors  # noqa: B018 (laid out now)
    logprobs_N = torch.tensor([x for c in completions for x in c.logprobs], dtype=torch.float32)
    return PackedGroup(item, [len(c.token_ids) for c in completions], is_valid, logprobs_N)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward and backward pass."""

    token_ids_T: torch.Tensor
    """int64: each item's prompt, then its completions."""
    layout: PackedLayout
    source_rows_N: torch.Tensor
    """int64, row of T whose hidden state predicts each completion token: the one before it, and for a completion's
    first token the last one of the prompt."""
    targets_N: torch.Tensor
    """int64, the completion tokens."""
    completion_index_N: torch.Tensor
    """int64, place in ``rows`` of the completion that each token belongs to."""
    rows: list[int]
    """Rows of the micro-batch's completions in the step's flat lists."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)


def pack(
    items: Sequence[PackItem], token_budget: int, model_width: int, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Micro-batches of at most ``token_budget`` tokens that hold every completion exactly once.

    A single completion that exceeds the budget with its prompt gets a micro-batch of its own. ``model_width`` weighs
    attention against the dense products in the balance.
    """
    parts = [part for item in items for part in split_group(item, token_budget)]
    return [build_micro_batch(bin_, device) for bin_ in balance(parts, token_budget, model_width)]


def split_group(item: PackItem, token_budget: int) -> list[PackItem]:
    """The item itself when it fits the budget, else parts that do: longest completion first, each to the first part
    with room."""
    if item.num_tokens <= token_budget:
        return [item]
    capacity = token_budget - len(item.prompt)
    members: list[list[int]] = []
    room: list[int] = []
    for m in sorted(range(len(item.completions)), key=lambda m: (-len(item.completions[m]), m)):
        length = len(item.completions[m])
        place = next((i for i, free in enumerate(room) if free >= length), None)
        if place is None:
            members.append([])
            room.append(capacity)
            place = len(room) - 1
        members[place].append(m)
        room[place] -= length
    return [item.part(sorted(part)) for part in members]


def predicted_cost(item: PackItem, model_width: int) -> float:
    """Work of an item in units of one token's dense products: its tokens, plus its attended pairs over 6 x width (per
    layer a token costs about 24 width^2 operations, a query-key pair about 4 width)."""
    prompt = len(item.prompt)
    pairs = prompt * (prompt + 1) / 2 + sum(len(c) * (prompt + (len(c) + 1) / 2) for c in item.completions)
    return item.num_tokens + pairs / (6 * model_width)


def balance(parts: Sequence[PackItem], token_budget: int, model_width: int) -> list[list[PackItem]]:
    """Parts in as few bins as first-fit needs, each part (dearest first) going to the cheapest bin with room."""
    order = sorted(range(len(parts)), key=lambda i: (-predicted_cost(parts[i], model_width), i))
    num_bins = _first_fit_bins([parts[i].num_tokens for i in order], token_budget)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    costs, tokens = [0.0] * num_bins, [0] * num_bins
    for i in order:
        size = parts[i].num_tokens
        fitting = [b for b in range(len(bins)) if not bins[b] or tokens[b] + size <= token_budget]
        if not fitting:
            bins.append([])
            costs.append(0.0)
            tokens.append(0)
            fitting = [len(bins) - 1]
        b = min(fitting, key=lambda b: (costs[b], b))
        bins[b].append(i)
        costs[b] += predicted_cost(parts[i], model_width)
        tokens[b] += size
    return [[parts[i] for i in sorted(bin_)] for bin_ in bins if bin_]


def _first_fit_bins(sizes: Sequence[int], token_budget: int) -> int:
    room: list[int] = []
    for size in sizes:
        place = next((i for i, free in enumerate(room) if free >= size), None)
        if place is None:
            room.append(token_budget)
            place = len(room) - 1
        room[place] -= size
    return len(room)


def build_micro_batch(items: Sequence[PackItem], device: torch.device | str = "cpu") -> MicroBatch:
    """Lay the items out one after another. Raises ConfigError for an empty prompt or completion."""
    starts = [0, *accumulate(item.num_tokens for item in items)]
    places = [0, *accumulate(len(item.rows) for item in items)]
    laid_out = [item.tensors for item in items]

    def joined(name: str, shifts: Sequence[int] | None = None) -> torch.Tensor:
        parts = [getattr(tensors, name) for tensors in laid_out]
        if shifts is not None:
            parts = [part + shift for part, shift in zip(parts, shifts, strict=False)]
        return torch.cat(parts).to(device)

    layout = PackedLayout(
        joined("positions_T"),
        tuple((start, len(item.prompt)) for start, item in zip(starts, items, strict=False)),
        tuple(
            tuple((start + first, length) for first, length in tensors.spans)
            for start, tensors in zip(starts, laid_out, strict=False)
        ),
    )
    return MicroBatch(
        token_ids_T=joined("token_ids_T"),
        layout=layout,
        source_rows_N=joined("source_rows_N", starts),
        targets_N=torch.cat([x.token_ids_T[len(i.prompt) :] for x, i in zip(laid_out, items, strict=True)]).to(device),
        completion_index_N=joined("completion_index_N", places),
        rows=[row for item in items for row in item.rows],
    )


def _lay_out(prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> ItemTensors:
    if not prompt or not all(map(len, completions)):
        raise ConfigError("A prompt or completion of no tokens cannot be trained on; drop it before packing.")
    first = len(prompt)
    lengths = torch.tensor([len(c) for c in completions], dtype=torch.int64)
    ends = lengths.cumsum(0)
    token_N = torch.arange(int(lengths.sum()))
    place_N = token_N - torch.repeat_interleave(ends - lengths, lengths)
    return ItemTensors(
        token_ids_T=torch.tensor([*prompt, *chain.from_iterable(completions)], dtype=torch.int64),
        positions_T=torch.cat((torch.arange(first), first + place_N)),
        source_rows_N=torch.where(place_N == 0, first - 1, first - 1 + token_N),
        completion_index_N=torch.repeat_interleave(lengths),
        spans=tuple(
            (first + end - length, length) for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ),
    )
