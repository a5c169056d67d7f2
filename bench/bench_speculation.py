"""What speculative decoding of the last rows brings: the same rollout with and without it, alternating.

usage: python bench/bench_speculation.py [addition] [code] [workings] [rewriting] [random] [tiny-random]
                                         [--mode auto] [--repeat 5] [--temperature 0.7] [--dtype fp32]
                                         [--code-model models/SmolLM2-135M-Instruct]

addition     the policy shipped with the package: workings that repeat themselves, 16 sums x 16, temperature 1
code         a chat model that edits functions, 4 requests x 4, temperature 0.7 (needs ``sagc-fast fetch smollm2``)
workings     that model works sums of 6 to 16 terms after two examples, 8 x 4, at most 384 tokens, ``--temperature``
rewriting    it adds type hints and usage examples to the functions, 7 x 4, likewise: one to three stragglers at the end
random       an untrained 8M-parameter Llama: text without any pattern, 8 prompts x 16, forced lognormal lengths
tiny-random  the same of the addition policy's size, where a step is cheapest and every microsecond of the host shows

Seconds are CPU seconds of one thread. "tail": the last 20% of the time of a rollout without drafts, against the seconds
that a rollout takes from the same state (drafts begin only there). A gain is seconds without over seconds with, median
over pairs. "oracle": the same with drafts that are the very tokens to come, as many as the cost rule takes when all of
them are right: no source of drafts gains more there. "tail_rows": live rows in the tail, on average. ``--recall`` lets
calls draft from the last call's completions of the same prompt, too.
Tokens and log-probs are compared, too. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from sagc_fast import RolloutEngine, SamplingParams
from sagc_fast.model.config import ModelConfig
from sagc_fast.model.loader import load_model, load_tokenizer, random_model
from sagc_fast.rollout.call import Call
from sagc_fast.rollout.drafts import HitRates
from sagc_fast.rollout.speculation import Drafts, Speculator, no_drafts, worthwhile
from sagc_fast.tasks.addition import AdditionTask, model_folder
from sagc_fast.types import Group

TAIL = 0.8
"""Share of the time without drafts after which the tail begins."""
MANY_ROWS = 1 << 30

FUNCTIONS = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)",
    "def find(items, target):\n    for index, item in enumerate(items):\n        if item == target:\n"
    "            return index\n    return -1",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()",
    "def count_words(text):\n    counts = {}\n    for word in text.split():\n"
    "        counts[word] = counts.get(word, 0) + 1\n    return counts",
)


@dataclass(frozen=True)
class Workload:
    """What an engine is asked, and the engine's parts."""

    model: Any
    tokenizer: Any
    prompts: list[Any]
    group_size: int
    params: Callable[[int], Any]
    """Sampling parameters for a seed."""


@dataclass(frozen=True)
class Run:
    """One rollout: per step the seconds so far and the tokens so far."""

    groups: list[Group]
    seconds: list[float]
    tokens: list[int]
    stats: Any
    fixed_tokens: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS, []], help="default: those without a chat model")
    parser.add_argument("--mode", choices=("auto", "fixed"), default="auto")
    parser.add_argument("--repeat", type=int, default=5, help="pairs of rollouts, each pair with its own seed")
    parser.add_argument("--recall", type=float, default=0.0, metavar="MB", help="draft_recall_mb of the engine")
    parser.add_argument("--code-model", default="models/SmolLM2-135M-Instruct", metavar="DIR")
    parser.add_argument("--temperature", type=float, default=0.7, help="of workings and rewriting", metavar="T")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name in args.workloads or ["addition", "random", "tiny-random"]:
        results[name] = compare(WORKLOADS[name](args), args.mode, args.repeat, args.recall)
        print(f"{name:12} " + "  ".join(f"{key} {value}" for key, value in results[name].items()), flush=True)
    print(
        json.dumps({"bench": "speculation", "mode": args.mode, "dtype": args.dtype, "recall": args.recall, **results})
    )
    return 0 if all(result["is_identical"] for result in results.values()) else 1


def compare(workload: Workload, mode: str, repeat: int, recall_mb: float) -> dict[str, Any]:
    """Medians over pairs; the first pair warms up and teaches the step cost."""
    kinds = {"off": "off", "on": mode, "late": mode, "oracle": mode}
    engines = {
        name: RolloutEngine(
            workload.model, workload.tokenizer, threads=1, speculation=kind, draft_recall_mb=recall_mb * (kind != "off")
        )
        for name, kind in kinds.items()
    }
    trials = []
    for seed in range(repeat + 1):
        off = rollout(engines["off"], workload, seed)
        begin = tail_begin(off)
        runs = {"off": off}
        for name in ("on", "late") if seed % 2 else ("late", "on"):
            runs[name] = rollout(engines[name], workload, seed, begin if name == "late" else 0)
        runs["oracle"] = rollout(engines["oracle"], workload, seed, begin, off.groups)
        if seed % 2:  # turns: without drafts first and last
            runs["off"] = rollout(engines["off"], workload, seed)
        trials.append(runs)
    is_fp32 = workload.model.dtype == torch.float32
    is_identical = all(texts(r["off"]) == texts(r[name]) for r in trials for name in kinds) if is_fp32 else None
    trials = trials[1:]

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 3)

    return {
        "gain": median([r["off"].seconds[-1] / r["on"].seconds[-1] for r in trials]),
        "tail_gain": median([tail_gain(r["off"], r["late"]) for r in trials]),
        "tail_gains": [round(tail_gain(r["off"], r["late"]), 2) for r in trials],
        "tail_rows": median([tail_rows(r["off"]) for r in trials]),
        "oracle_gain": median([tail_gain(r["off"], r["oracle"]) for r in trials]),
        "oracle_accepted": accepted_share([r["oracle"] for r in trials]),
        "seconds": median([r["on"].seconds[-1] for r in trials]),
        "steps_off": median([r["off"].stats.num_steps for r in trials]),
        "steps": median([r["on"].stats.num_steps for r in trials]),
        "draft_tokens": sum(r["on"].stats.num_draft_tokens for r in trials) // len(trials),
        "accepted": accepted_share([r["on"] for r in trials]),
        "fixed_tokens": round(trials[-1]["on"].fixed_tokens, 1),
        "is_identical": is_identical,
    }


def rollout(
    engine: RolloutEngine, workload: Workload, seed: int, first_draft_at: int = 0, truth: list[Group] | None = None
) -> Run:
    """One call, its plans timed by this thread's CPU clock; no drafts before ``first_draft_at`` tokens are there. With
    ``truth``, what the call is known to return, drafts are read from it."""
    seconds, tokens = [], []
    run_plan, propose, most_rows = Call._run_plan, Speculator.propose, Speculator.most_rows
    propose_drafts = propose if truth is None else oracle(truth)

    def timed(call: Call, *args: Any, **kwargs: Any) -> list[Group]:
        complete = run_plan(call, *args, **kwargs)
        seconds.append(time.thread_time() - started)
        stats = call._recorder
        tokens.append(sum(stats.active_rows) + stats.num_accepted_tokens)
        return complete

    def later(speculator: Speculator, slots: Any, *args: Any) -> Drafts:
        if tokens and tokens[-1] >= first_draft_at:
            return propose_drafts(speculator, slots, *args)
        return no_drafts(slots.size)

    Call._run_plan, Speculator.propose = timed, later
    if truth is not None:
        Speculator.most_rows = MANY_ROWS  # the rule alone decides, with however many rows
    try:
        started = time.thread_time()
        groups = engine.generate(workload.prompts, workload.group_size, workload.params(seed))
    finally:
        Call._run_plan, Speculator.propose, Speculator.most_rows = run_plan, propose, most_rows
    return Run(groups, seconds, tokens, engine.stats, engine._speculation.cost.fixed_tokens)


def oracle(truth: list[Group]) -> Callable[[Speculator, Any, Any, int, bool], Drafts]:
    """In the place of ``Speculator.propose``: the tokens that will be drawn, as many as pay when all are right."""
    sure = HitRates()
    sure.hits, sure.trials = [10**9] * len(sure.hits), [10**9] * len(sure.trials)

    def propose(speculator: Speculator, slots: Any, most: Any, budget: int, is_awaited: bool) -> Drafts:
        rows, coming = speculator._rows, []
        for slot, num_output in zip(slots.tolist(), rows.num_output[slots].tolist(), strict=True):
            sequence = rows.sequences[slot]
            completion = truth[sequence.group.prompt_index].completions[sequence.sample_index]
            coming.append(completion.token_ids[num_output:-1])  # the last one is drawn behind the last draft
        most = np.minimum(most, [len(tokens) for tokens in coming])
        cost = speculator._cost.fixed_tokens
        lengths = worthwhile(np.full(slots.size, 8), most, budget, sure, cost, speculator._host_tokens(slots.size))
        drafted = [token for tokens, n in zip(coming, lengths.tolist(), strict=True) for token in tokens[:n]]
        return Drafts(lengths, np.array(drafted, dtype=np.int64))

    return propose


def accepted_share(runs: list[Run]) -> float | None:
    drafted = sum(run.stats.num_draft_tokens for run in runs)
    return round(sum(run.stats.num_accepted_tokens for run in runs) / drafted, 3) if drafted else None


def tail_rows(off: Run) -> float:
    """Live rows in the last 20% of the time without drafts, on average over the steps."""
    begin = tail_begin(off)
    rows, total = off.stats.active_rows, sum(off.stats.active_rows)
    step = len(rows)
    while step > 1 and total - rows[step - 1] >= begin:
        step -= 1
        total -= rows[step]
    return statistics.mean(rows[step:] or rows[-1:])


def tail_begin(off: Run) -> int:
    """Tokens that are there when the tail begins; in the middle of a plan as many as its time says."""
    return int(np.interp(TAIL * off.seconds[-1], [0.0, *off.seconds], [0, *off.tokens]))


def tail_gain(off: Run, late: Run) -> float:
    """Seconds of the last 20% without drafts over those with, both from the same number of tokens on."""
    begin = tail_begin(off)
    tails = [run.seconds[-1] - float(np.interp(begin, [0, *run.tokens], [0.0, *run.seconds])) for run in (off, late)]
    return tails[0] / tails[1]


def texts(run: Run) -> list[tuple]:
    return [(c.token_ids, c.logprobs, c.text, c.finish_reason) for group in run.groups for c in group.completions]


# ---- workloads -------------------------------------------------------------------------------------------------------


def addition(args: argparse.Namespace) -> Workload:
    task = AdditionTask()
    prompts = [task.problem("train", index).prompt for index in range(16)]
    folder = model_folder("addition")
    params = lambda seed: SamplingParams(max_new_tokens=task.max_new_tokens, seed=seed)  # noqa: E731
    return Workload(load_model(folder, dtype=args.dtype), load_tokenizer(folder), prompts, 16, params)


def code(args: argparse.Namespace) -> Workload:
    tokenizer = load_tokenizer(args.code_model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Add a docstring to this Python code. Answer with code only.\n\n{text}"}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for text in FUNCTIONS
    ]
    params = lambda seed: SamplingParams(max_new_tokens=160, seed=seed, temperature=0.7)  # noqa: E731
    return Workload(load_model(args.code_model, dtype=args.dtype), tokenizer, prompts, 4, params)


def workings(args: argparse.Namespace) -> Workload:
    tokenizer = load_tokenizer(args.code_model)
    rng = random.Random(0)
    shown = "\n\n".join(_sum_with_workings([rng.randint(10, 99) for _ in range(6)]) for _ in range(2))
    prompts = [
        tokenizer.encode(f"{shown}\n\n{_sum([rng.randint(10, 99) for _ in range(rng.randint(6, 16))])}\n")
        for _ in range(8)
    ]
    params = lambda seed: SamplingParams(  # noqa: E731
        max_new_tokens=384, seed=seed, temperature=args.temperature, stop=("\n\n",)
    )
    return Workload(load_model(args.code_model, dtype=args.dtype), tokenizer, prompts, 4, params)


def _sum(terms: list[int]) -> str:
    return "Problem: " + " + ".join(map(str, terms))


def _sum_with_workings(terms: list[int]) -> str:
    """A sum worked out with running totals, a line each, and what is left."""
    lines, total = [_sum(terms)], terms[0]
    for index, term in enumerate(terms[1:], start=1):
        left = "".join(f" + {later}" for later in terms[index + 1 :])
        lines.append(f"{total} + {term}{left} = {total + term}{left}")
        total += term
    return "\n".join((*lines, f"Answer: {total}"))


def rewriting(args: argparse.Namespace) -> Workload:
    tokenizer = load_tokenizer(args.code_model)
    prompts = [
        tokenizer.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": "Rewrite this Python code with type hints and a usage example for each function. "
                    f"Answer with the whole code only.\n\n{text}",
                }
            ],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for text in (*FUNCTIONS, *("\n\n".join(pair) for pair in pairwise(FUNCTIONS)))
    ]
    params = lambda seed: SamplingParams(max_new_tokens=384, seed=seed, temperature=args.temperature)  # noqa: E731
    return Workload(load_model(args.code_model, dtype=args.dtype), tokenizer, prompts, 4, params)


def untrained(args: argparse.Namespace, vocab: int, width: int, hidden: int, layers: int, heads: int) -> Workload:
    config = ModelConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        max_position_embeddings=2048,
        eos_token_ids=(),
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(64, 256))] for _ in range(8)]

    def params(seed: int) -> list[list[SamplingParams]]:
        lengths = random.Random(seed)
        return [
            [SamplingParams(max_new_tokens=_length(lengths), seed=seed, ignore_eos=True) for _ in range(16)]
            for _ in prompts
        ]

    return Workload(random_model(config, seed=0, dtype=args.dtype), None, prompts, 16, params)


def _length(rng: random.Random) -> int:
    """Lognormal with a mean of 63 tokens, 8 to 256."""
    return max(8, min(256, round(rng.lognormvariate(math.log(63) - 0.405, 0.9))))


WORKLOADS: dict[str, Callable[[argparse.Namespace], Workload]] = {
    "addition": addition,
    "code": code,
    "workings": workings,
    "rewriting": rewriting,
    "random": lambda args: untrained(args, 4096, 288, 768, 6, 6),
    "tiny-random": lambda args: untrained(args, 64, 64, 176, 2, 4),
}

if __name__ == "__main__":
    sys.exit(main())
