"""Makes the small policy shipped for the addition task: supervised training on a mix of worked and guessed sums.

    python -m sagc_fast.tasks.addition_sft --out DIR

The mix leaves reinforcement learning something to find. Half the answers are bare sums, which a model this small gets
wrong as soon as they have a few digits; the other half are worked out column by column, which it gets right nearly
always. A third of the worked answers go over the workings again, a geometric number of times: right, but long. So a
reward for the right sum moves the policy from guessing to working, and what is left of the checking keeps a heavy tail.

Sums come from the training split alone. The forward pass and the log-probabilities are those of the trainer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from sagc_fast import ops
from sagc_fast.model.config import ModelConfig
from sagc_fast.model.loader import random_model, save_model
from sagc_fast.model.transformer import Transformer
from sagc_fast.tasks.addition import AdditionTask
from sagc_fast.train.packing import MicroBatch, PackItem, build_micro_batch

PAD, BOS, EOS, UNKNOWN = range(4)
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
VOCABULARY = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *"0123456789+=,;?>"))}

SHAPE = ModelConfig(
    family="llama",
    vocab_size=len(VOCABULARY),
    hidden_size=64,
    intermediate_size=176,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=BOS,
    eos_token_ids=(EOS,),
    pad_token_id=PAD,
)
"""94 thousand parameters in two layers: a decode step costs time per layer, whatever its width."""

GUESSED = 0.5
"""Share of answers that are the bare sum."""
CHECKED = 0.35
"""Share of worked answers that go over the workings at least once more."""
CHECKED_AGAIN = 0.6
"""Probability of each further time; the number of times is geometric."""
ANSWERS_PER_SUM = 4
"""Answers per prompt, drawn independently; they share the prompt's part of the forward pass."""
PEAK_RATE, FINAL_SHARE, WARMUP_STEPS, HORIZON = 3e-3, 0.02, 50, 4000
"""The learning rate rises linearly, then falls along a cosine that ends at ``HORIZON`` steps with a share of its peak.
The shipped policy stops at 2,400: it is to be a beginning, not a good adder."""


def worked(terms: list[int]) -> str:
    """The workings: pair by pair, each pair column by column from the right as ``digit+digit+carry=sum``."""
    total, parts = terms[0], []
    for i, term in enumerate(terms[1:]):
        parts.append((f"{total}+{term}=" if i else "") + _columns(total, term))
        total += term
    return ";".join(parts)


def _columns(a: int, b: int) -> str:
    clauses, carry = [], 0
    while a or b or not clauses:
        column = a % 10 + b % 10 + carry
        clauses.append(f"{a % 10}+{b % 10}+{carry}={column}")
        a, b, carry = a // 10, b // 10, column // 10
    return ",".join(clauses)


def draw_answer(rng: random.Random, terms: list[int], max_length: int) -> str:
    """One answer of the mix, of at most ``max_length`` tokens with its end: checks that do not fit are left out."""
    final = f">{sum(terms)}"
    if rng.random() < GUESSED:
        return final
    passes = 1
    if rng.random() < CHECKED:
        passes = 2
        while rng.random() < CHECKED_AGAIN:
            passes += 1
    once = worked(terms)
    room = (max_length - 1 - len(final) + 1) // (len(once) + 1)
    return "?".join([once] * max(1, min(passes, room))) + final


def draw_batches(task: AdditionTask, seed: int, num_tokens: int) -> Iterator[MicroBatch]:
    """Packed batches of about ``num_tokens`` tokens without end, sums in the order of the training split."""
    rng = random.Random(f"addition_sft {seed}")
    items: list[PackItem] = []
    index = size = 0
    while True:
        problem = task.problem("train", index)
        index += 1
        prompt = [BOS, *encode(problem.prompt)]
        terms = problem.meta["terms"]
        answers = [[*encode(draw_answer(rng, terms, task.max_new_tokens)), EOS] for _ in range(ANSWERS_PER_SUM)]
        items.append(
            PackItem(prompt, answers, rows=range(len(items) * ANSWERS_PER_SUM, (len(items) + 1) * ANSWERS_PER_SUM))
        )
        size += items[-1].num_tokens
        if size >= num_tokens:
            yield build_micro_batch(items)
            items, size = [], 0


def encode(text: str) -> list[int]:
    return [VOCABULARY.get(character, UNKNOWN) for character in text]


def learning_rate(step: int) -> float:
    """Rate of update ``step`` (from 0)."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / HORIZON)))
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def train(num_steps: int, batch_tokens: int, seed: int) -> Transformer:
    """A policy trained from random weights; prints the mean loss in nats per token every few steps."""
    model = random_model(SHAPE, seed=seed)
    start, losses = time.monotonic(), []
    for step, loss in enumerate(fit(model, draw_batches(AdditionTask(), seed, batch_tokens), num_steps), 1):
        losses.append(loss)
        if step % 200 == 0 or step == num_steps:
            print(f"step {step}  loss {sum(losses) / len(losses):.4f}  {time.monotonic() - start:.0f} s", flush=True)
            losses = []
    return model


def fit(model: Transformer, batches: Iterator[MicroBatch], num_steps: int) -> Iterator[float]:
    """Supervised updates of ``model`` in place, one as each item is asked for: the step's loss in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate(0), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(num_steps):
        batch = next(batches)
        hidden_TE = model.forward_packed(batch.token_ids_T, batch.layout)
        hidden_NE = hidden_TE.index_select(0, batch.source_rows_N)
        logprob_N, _ = ops.token_logprobs(hidden_NE, model.lm_head_weight, batch.targets_N)
        loss = -logprob_N.mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def save_tokenizer(folder: Path) -> None:
    """One token a character; a prompt begins with ``<bos>``. Loads with transformers' AutoTokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=SPECIAL_TOKENS[UNKNOWN]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{
            f"{name}_token": SPECIAL_TOKENS[i]
            for name, i in (("pad", PAD), ("bos", BOS), ("eos", EOS), ("unk", UNKNOWN))
        },
        "model_max_length": SHAPE.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the small policy of the addition task from random weights.")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, configuration and tokenizer")
    parser.add_argument("--steps", type=int, default=2400, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=3000, help="tokens of a batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads; the weights' last bits depend on it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = train(args.steps, args.batch_tokens, args.seed)
    save_model(model, args.out)
    save_tokenizer(args.out)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters written to {args.out}")


if __name__ == "__main__":
    main()
