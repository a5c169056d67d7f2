"""Starting policies of the learning study: tiny character-level models with a little supervised training on their task.

Made from nothing by :func:`make_policy` and kept in a folder outside the package. As with the policy shipped for
addition (sagc_fast/tasks/addition_sft.py) the training mixes answers that are short and often wrong with answers that
are worked out, a few of them more than once, so that reinforcement learning has something to find. Problems come from
the training split alone.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sagc_fast.model.config import ModelConfig
from sagc_fast.model.loader import random_model, save_model
from sagc_fast.tasks.addition import AdditionConfig
from sagc_fast.tasks.addition_sft import BOS, EOS, SHAPE, SPECIAL_TOKENS, draw_answer, fit
from sagc_fast.tasks.base import Problem, Task, make_task
from sagc_fast.train.packing import MicroBatch, PackItem, build_micro_batch

TASK_SEED = 2**31
"""Far from the seeds of the runs, so that a run's problems are not those that its start has learnt from."""
ANSWERS_PER_PROBLEM = 4
GUESSED, CHECKED = 0.5, 0.35
"""Shares of bare answers, and of worked answers that are gone over at least once more."""
CHECKED_AGAIN, MAX_PASSES = 0.6, 6


def chain_sum_answer(rng: random.Random, problem: Problem) -> str:
    """``>25`` at a guess; or running totals, ``4-12=-8;-8+33=25>25``, perhaps gone over again after a ``?``."""
    if rng.random() < GUESSED:
        return f">{problem.answer}"
    first, *rest = problem.prompt.removesuffix("=").split()
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(term) if sign == "+" else total - int(term)
        steps.append(f"{total}{sign}{term}={after}")
        total = after
    passes = 1
    if rng.random() < CHECKED:
        passes = 2
        while rng.random() < CHECKED_AGAIN and passes < MAX_PASSES:
            passes += 1
    return "?".join([";".join(steps)] * passes) + f">{problem.answer}"


def plain_answer(rng: random.Random, problem: Problem) -> str:
    return str(problem.answer)


@dataclasses.dataclass(frozen=True)
class PolicyRecipe:
    """How the starting policy of a task is made."""

    characters: str
    draw_answer: Callable[[random.Random, Problem], str]
    num_steps: int
    batch_tokens: int = 2000
    shape: ModelConfig = SHAPE


LARGE_SHAPE = dataclasses.replace(
    SHAPE, hidden_size=128, intermediate_size=352, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32
)
"""740 thousand parameters, eight times those of the shipped policy."""


def addition_answer(rng: random.Random, problem: Problem) -> str:
    """The mix that the shipped policy has learnt from."""
    return draw_answer(rng, problem.meta["terms"], AdditionConfig().max_new_tokens)


RECIPES = {
    "addition_large": PolicyRecipe("0123456789+=,;?>", addition_answer, num_steps=800, shape=LARGE_SHAPE),
    "chain_sum": PolicyRecipe(" 0123456789+-=;?>", chain_sum_answer, num_steps=900),
    "spell_backward": PolicyRecipe(
        ":'-abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", plain_answer, num_steps=450
    ),
}


def make_policy(recipe: PolicyRecipe, task_options: Mapping[str, Any], folder: Path) -> float:
    """Train from random weights and write a Hugging Face folder; returns the mean loss of the last 100 steps, in nats
    per token."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *recipe.characters))}
    model = random_model(dataclasses.replace(recipe.shape, vocab_size=len(vocabulary)), seed=0)
    batches = _batches(make_task(task_options, seed=TASK_SEED), recipe, vocabulary)
    losses = list(fit(model, batches, recipe.num_steps))
    save_model(model, folder)
    _save_tokenizer(folder, vocabulary)
    return sum(losses[-100:]) / len(losses[-100:])


def _batches(task: Task, recipe: PolicyRecipe, vocabulary: Mapping[str, int]) -> Iterator[MicroBatch]:
    rng = random.Random("learning study")
    items: list[PackItem] = []
    size = index = 0
    while True:
        problem = task.problem("train", index)
        index += 1
        answers = [
            [*(vocabulary[c] for c in recipe.draw_answer(rng, problem)), EOS] for _ in range(ANSWERS_PER_PROBLEM)
        ]
        rows = range(len(items) * ANSWERS_PER_PROBLEM, (len(items) + 1) * ANSWERS_PER_PROBLEM)
        items.append(PackItem([BOS, *(vocabulary[c] for c in problem.prompt)], answers, rows))
        size += items[-1].num_tokens
        if size >= recipe.batch_tokens:
            yield build_micro_batch(items)
            items, size = [], 0


def _save_tokenizer(folder: Path, vocabulary: Mapping[str, int]) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel(dict(vocabulary), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{token[1:-1]}_token": token for token in SPECIAL_TOKENS}
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n")
