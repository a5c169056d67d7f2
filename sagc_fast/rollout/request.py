"""Check everything a ``generate`` call was given, before any work: the engine never fails on input in mid-step."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagc_fast.errors import PromptError
from sagc_fast.types import SamplingParams

MAX_COMPLETIONS = 20_000_000
"""Of one call: its lists alone would fill gigabytes beyond."""

Prompt = str | Sequence[int]
ParamsArgument = SamplingParams | Sequence[SamplingParams | Sequence[SamplingParams]]


@dataclass(frozen=True, slots=True, eq=False)
class PromptRequest:
    """One prompt, checked."""

    token_ids: NDArray[np.int64]
    prompt_id: int
    params: tuple[SamplingParams, ...]
    """One per completion."""


def check_request(
    prompts: Sequence[Prompt],
    group_size: int | Sequence[int],
    params: ParamsArgument,
    prompt_ids: Sequence[int] | None,
    *,
    vocab_size: int,
    context_length: int,
    tokenizer: Any,
) -> list[PromptRequest]:
    """The call as one record per prompt. Raises PromptError naming the prompt's index and the value."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise PromptError(f"prompts is {prompts!r:.80}; pass a list of strings or of token-id lists.")
    prompts = list(prompts)
    sizes = _group_sizes(group_size, len(prompts))
    ids = _prompt_ids(prompt_ids, len(prompts))
    per_prompt = _params(params, sizes)
    requests = []
    for index, prompt in enumerate(prompts):
        token_ids = _token_ids(index, prompt, vocab_size, context_length, tokenizer)
        for one in per_prompt[index]:
            _check_params(index, one, vocab_size, tokenizer)
        requests.append(PromptRequest(token_ids, ids[index], per_prompt[index]))
    _check_noise_keys(requests)
    return requests


def _group_sizes(group_size: int | Sequence[int], num_prompts: int) -> list[int]:
    if _is_int(group_size):
        if group_size < 1:
            raise PromptError(f"group_size is {group_size!r}; it must be an integer >= 1.")
        _check_total(int(group_size) * num_prompts)
        return [int(group_size)] * num_prompts
    sizes = _as_list(group_size, num_prompts, "group_size", "an integer")
    for index, size in enumerate(sizes):
        if not _is_int(size) or size < 1:
            raise PromptError(f"group_size of prompt {index} is {size!r}; it must be an integer >= 1.")
    _check_total(sum(map(int, sizes)))
    return [int(size) for size in sizes]


def _check_total(num_completions: int) -> None:
    if num_completions > MAX_COMPLETIONS:
        raise PromptError(
            f"One call asks for {num_completions:,} completions, prompts times group_size; it must be at most "
            f"{MAX_COMPLETIONS:,}, so use several calls."
        )


def _prompt_ids(prompt_ids: Sequence[int] | None, num_prompts: int) -> list[int]:
    if prompt_ids is None:
        return list(range(num_prompts))
    ids = _as_list(prompt_ids, num_prompts, "prompt_ids", "None")
    for index, prompt_id in enumerate(ids):
        if not _is_int(prompt_id) or not 0 <= prompt_id < 2**64:
            raise PromptError(f"prompt_ids[{index}] is {prompt_id!r}; it must be an integer in [0, 2**64).")
    return [int(prompt_id) for prompt_id in ids]


def _params(params: ParamsArgument, sizes: list[int]) -> list[tuple[SamplingParams, ...]]:
    if isinstance(params, SamplingParams):
        return [(params,) * size for size in sizes]
    if isinstance(params, Mapping):
        raise PromptError(f"params is the dict {params!r:.80}; pass SamplingParams(**params), or a list of them.")
    expanded = []
    for index, (entry, size) in enumerate(
        zip(_as_list(params, len(sizes), "params", "one SamplingParams"), sizes, strict=True)
    ):
        per_completion = (entry,) * size if isinstance(entry, SamplingParams) else entry
        if not isinstance(per_completion, Sequence) or not all(isinstance(p, SamplingParams) for p in per_completion):
            raise PromptError(f"params[{index}] is {entry!r:.80}; it must be SamplingParams or a list of them.")
        if len(per_completion) != size:
            raise PromptError(
                f"params[{index}] holds {len(per_completion)} records for {size} completions; give one per completion."
            )
        expanded.append(tuple(per_completion))
    return expanded


def _token_ids(index: int, prompt: Prompt, vocab_size: int, context_length: int, tokenizer: Any) -> NDArray[np.int64]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError(
                f"Prompt {index} is a string and the engine has no tokenizer; pass token ids, or load a model folder "
                "that holds its tokenizer."
            )
        try:
            prompt.encode()
        except UnicodeEncodeError:  # bytes of a command line that are not text arrive as lone surrogates
            raise PromptError(f"Prompt {index} is {prompt!a:.80}; it is not valid Unicode text.") from None
        prompt = tokenizer.encode(prompt)
    if not isinstance(prompt, Iterable) or getattr(prompt, "ndim", 1) != 1:  # arrays of no or two dimensions
        raise PromptError(f"Prompt {index} is {prompt!r:.80}; it must be a string or a list of token ids.")
    values = [value.item() if hasattr(value, "item") else value for value in prompt]
    if not values:
        raise PromptError(f"Prompt {index} is empty; it needs at least one token.")
    for place, value in enumerate(values):
        if not _is_int(value) or not 0 <= value < vocab_size:
            raise PromptError(
                f"Prompt {index} holds {value!r:.80} at place {place}; token ids are integers from 0 to "
                f"{vocab_size - 1}."
            )
    if len(values) >= context_length:
        raise PromptError(
            f"Prompt {index} has {len(values)} tokens and the model's context {context_length}; at most "
            f"{context_length - 1} leave room for a completion."
        )
    return np.array(values, dtype=np.int64)


def _check_params(index: int, params: SamplingParams, vocab_size: int, tokenizer: Any) -> None:
    if params.stop and tokenizer is None:
        raise PromptError(
            f"Prompt {index} has stop strings {list(params.stop)!r:.80} and the engine has no tokenizer; use "
            "stop_token_ids, or load a model folder that holds its tokenizer."
        )
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise PromptError(
                f"Prompt {index} has stop token id {token_id}; token ids are integers from 0 to {vocab_size - 1}."
            )


def _check_noise_keys(requests: list[PromptRequest]) -> None:
    """Two prompts with one id and one seed would be sampled with the very same noise."""
    first_use: dict[tuple[int, int], int] = {}
    for index, request in enumerate(requests):
        for seed in {params.seed for params in request.params}:
            other = first_use.setdefault((request.prompt_id, seed), index)
            if other != index:
                raise PromptError(
                    f"Prompts {other} and {index} have the same prompt id {request.prompt_id} and seed {seed}, hence "
                    "the same noise; give each prompt an id of its own or another seed."
                )


def _as_list(value: Any, wanted: int, name: str, alternative: str) -> list:
    items = list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else None
    if items is None or len(items) != wanted:
        got = f"{value!r:.80}" if items is None else f"a list of {len(items)}"
        raise PromptError(
            f"{name} is {got} for {wanted} prompts; give {alternative} or a list with one entry per prompt."
        )
    return items


def _is_int(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
