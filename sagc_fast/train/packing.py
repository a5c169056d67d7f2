"""Completions of a step -> micro-batches under a token budget, without padding and with every prompt once.

A group goes into a micro-batch whole when it fits. A larger group is split between micro-batches, each of which repeats
its prompt; the gradient is the same, because the loss of a micro-batch is a sum over completions under one global
normaliser. Micro-batches are balanced by predicted cost, so that none holds all the long sequences.

Shape suffixes: T tokens of a micro-batch, N completion tokens that are predicted, flat.
"""

# ruff: noqa: N815 (shape suffixes in field names)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sagc_fast.errors import ConfigError
from sagc_fast.ops.layouts import PackedLayout


@dataclass(frozen=True)
class PackItem:
    """A prompt and those of its completions that take part in an update."""

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]
    """Token ids of each completion, at least one token."""
    rows: Sequence[int]
    """Row of each completion in the step's flat lists (advantages, rewards)."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.completions))

    def part(self, members: Sequence[int]) -> PackItem:
        """The same prompt with some of the completions."""
        return PackItem(self.prompt, [self.completions[m] for m in members], [self.rows[m] for m in members])


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
    tokens: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    index: list[int] = []
    rows: list[int] = []
    prompt_spans, completion_spans = [], []
    for item in items:
        if not item.prompt or not all(item.completions):
            raise ConfigError("A prompt or completion of no tokens cannot be trained on; drop it before packing.")
        prompt_spans.append((len(tokens), len(item.prompt)))
        tokens += item.prompt
        positions += range(len(item.prompt))
        last_of_prompt = len(tokens) - 1
        spans = []
        for completion, row in zip(item.completions, item.rows, strict=True):
            start, length = len(tokens), len(completion)
            spans.append((start, length))
            tokens += completion
            positions += range(len(item.prompt), len(item.prompt) + length)
            sources += [last_of_prompt, *range(start, start + length - 1)]
            targets += completion
            index += [len(rows)] * length
            rows.append(row)
        completion_spans.append(tuple(spans))

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    layout = PackedLayout(tensor(positions), tuple(prompt_spans), tuple(completion_spans))
    return MicroBatch(tensor(tokens), layout, tensor(sources), tensor(targets), tensor(index), rows)
