"""``sagc-fast generate``: sample groups of completions from a model folder and show what the engine did."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagc_fast.errors import DatasetError, ModelLoadError, PromptError

if TYPE_CHECKING:
    from rich.console import Console

    from sagc_fast.rollout.engine import RolloutEngine
    from sagc_fast.types import Completion, Group, RolloutStats, SamplingParams

HELP = "sample completions from a model folder, with the engine's statistics"
EPILOG = """examples:
  sagc-fast generate --model models/SmolLM2-135M-Instruct --chat --prompt "Name three rivers." --n 4
  sagc-fast generate --model addition --prompt "17+25=" --n 4
  sagc-fast generate --model DIR --prompt "2+3=" --prompt "7+8=" --n 8 --max-new-tokens 16 --stop "\\n"
  sagc-fast generate --model DIR --prompts-file prompts.jsonl --n 16 --temperature 0.7 --json > groups.jsonl

A prompts file holds one JSON value a line: a string, an object with "prompt" (a string or token ids), or an object with
"messages" (for --chat). --json prints one line per group and the statistics as the last line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="Hugging Face model folder with its tokenizer, or addition"
    )
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be given again")
    parser.add_argument("--prompts-file", metavar="FILE", help="JSON lines with more prompts")
    parser.add_argument("--chat", action="store_true", help="wrap prompts in the tokenizer's chat template")
    parser.add_argument("--n", type=int, default=8, metavar="G", help="completions per prompt (default: 8)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="length cap in tokens (default: 256)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 is off (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep this probability mass; 1 is off (default)")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="keep tokens this likely beside the likeliest; 0 is off"
    )
    parser.add_argument("--seed", type=int, default=0, help="noise key; same seed, same completions (default: 0)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop string (\\n and \\t understood)"
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="weights (default: fp32)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--kv-gb", type=float, default=2.0, help="KV-cache budget in 10**9 bytes (default: 2)")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of text")


def run(args: argparse.Namespace) -> int:
    prompts = [*args.prompt, *(read_prompts(Path(args.prompts_file)) if args.prompts_file else [])]
    if not prompts:
        if args.prompts_file:
            raise DatasetError(f"Prompts file {args.prompts_file} holds no prompt; write one JSON value a line.")
        raise PromptError("No prompt is given; use --prompt TEXT or --prompts-file FILE.")
    params = sampling_params(args)

    from sagc_fast.rollout.engine import RolloutEngine
    from sagc_fast.tasks.addition import model_folder

    engine = RolloutEngine.from_pretrained(
        model_folder(args.model), dtype=args.dtype, device=args.device, kv_budget_gb=args.kv_gb, threads=args.threads
    )
    if engine.tokenizer is None:
        raise ModelLoadError(
            f"Model folder {args.model} has no tokenizer; copy the tokenizer files of its model there."
        )
    inputs = [encode(engine, index, prompt, args.chat) for index, prompt in enumerate(prompts)]
    if args.json:
        print_json(engine, engine.generate(inputs, args.n, params))
    else:
        print_text(engine, inputs, args.n, params)
    return 0


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    from sagc_fast.types import SamplingParams

    return SamplingParams(
        temperature=args.temperature,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        stop=tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in args.stop),
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
    )


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a JSON-lines file: strings, token-id lists or lists of chat messages."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise DatasetError(f"Prompts file {path} is not text in UTF-8; save it as UTF-8.") from None
    except OSError as error:
        raise DatasetError(
            f"Prompts file {path} cannot be read: {error.strerror or error}; give a file of one JSON value a line."
        ) from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DatasetError(f"{path} line {number} is not JSON ({error}); write one JSON value a line.") from None
        if isinstance(value, dict):
            value = value.get("prompt", value.get("messages"))
        if not isinstance(value, (str, list)):
            raise DatasetError(
                f'{path} line {number} holds no prompt; it must be a string, or an object with "prompt" or "messages".'
            )
        prompts.append(value)
    return prompts


def encode(engine: RolloutEngine, index: int, prompt: Any, is_chat: bool) -> Any:
    """What ``generate`` takes: the prompt itself, or the token ids of its chat form."""
    is_messages = isinstance(prompt, list) and any(isinstance(item, dict) for item in prompt)
    if is_messages and not is_chat:
        raise PromptError(f"Prompt {index} is a list of chat messages; add --chat to use the chat template.")
    if not is_chat or (isinstance(prompt, list) and not is_messages):
        return prompt
    messages = prompt if is_messages else [{"role": "user", "content": prompt}]
    if not getattr(engine.tokenizer, "chat_template", None):
        raise PromptError(
            "The tokenizer has no chat template; leave out --chat and write the prompt as the model saw it."
        )
    return engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def print_json(engine: RolloutEngine, groups: list[Group]) -> None:
    for group in groups:
        print(json.dumps(asdict(group)))
    stats = {**asdict(engine.stats), "output_tokens_per_second": engine.stats.output_tokens_per_second}
    print(json.dumps({"stats": stats}))


def print_text(engine: RolloutEngine, inputs: list[Any], group_size: int, params: SamplingParams) -> None:
    """Groups as they complete, then a table of the statistics."""
    from rich.console import Console

    console = Console(highlight=False)
    total = len(inputs) * group_size
    done = 0

    with console.status(f"0 of {total} completions") as status:

        def show(group: Group) -> None:
            nonlocal done
            done += group.group_size
            print_group(console, engine, group)
            status.update(f"{done} of {total} completions")

        engine.generate(inputs, group_size, params, on_group=show)
    print_stats(console, engine.stats)


def print_group(console: Console, engine: RolloutEngine, group: Group) -> None:
    from rich.text import Text

    prompt = engine.tokenizer.decode(group.prompt_token_ids)
    console.rule(f"prompt {group.prompt_index}", align="left")
    console.print(Text(prompt.strip(), style="bold"))
    for completion in group.completions:
        console.print(Text(f"[{completion.sample_index}] {describe(completion)}", style="dim"))
        console.print(Text(completion.text or ""))
    console.print()


def describe(completion: Completion) -> str:
    """Length, end and mean log-prob of one completion."""
    mean = sum(completion.logprobs) / len(completion.logprobs)
    return f"{len(completion.token_ids)} tokens, {completion.finish_reason}, mean log-prob {mean:.3f}"


def print_stats(console: Console, stats: RolloutStats) -> None:
    from rich.table import Table

    table = Table(title="rollout", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in stats_rows(stats):
        table.add_row(name, value)
    console.print(table)


def stats_rows(stats: RolloutStats) -> list[tuple[str, str]]:
    """(name, figure with its unit) for people."""
    seconds = (
        ("prefill", stats.prefill_seconds),
        ("decode", stats.decode_seconds),
        ("sampling", stats.sample_seconds),
        ("host", stats.host_seconds),
    )
    kv_share = stats.kv_blocks_peak / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
    return [
        ("prompts x completions", f"{stats.num_prompts:,} -> {stats.num_completions:,}"),
        ("prompt tokens (each once)", f"{stats.num_prompt_tokens:,}"),
        ("prefill tokens / recomputed", f"{stats.num_prefill_tokens:,} / {stats.num_recomputed_tokens:,}"),
        ("output tokens", f"{stats.num_output_tokens:,}"),
        ("output tokens per second", f"{stats.output_tokens_per_second:,.0f}"),
        ("seconds", f"{stats.total_seconds:.2f}"),
        ("  of these", ", ".join(f"{name} {value:.2f}" for name, value in seconds)),
        ("steps", f"{stats.num_steps:,}"),
        ("length mean / max", f"{stats.mean_length:.1f} / {stats.max_length}"),
        ("straggler ratio mean / max", f"{stats.straggler_ratio_mean:.2f} / {stats.straggler_ratio_max:.2f}"),
        ("cut at the cap", f"{stats.clipped_ratio:.0%}"),
        ("idle / tail", f"{stats.idle_fraction:.0%} / {stats.tail_fraction:.0%}"),
        ("KV blocks peak / total", f"{stats.kv_blocks_peak:,} / {stats.kv_blocks_total:,} ({kv_share:.0%})"),
        ("KV memory", f"{stats.kv_bytes_total / 1e6:,.1f} MB"),
        ("preemptions", f"{stats.num_preemptions:,}"),
        ("drafted / accepted", f"{stats.num_draft_tokens:,} / {stats.num_accepted_tokens:,}"),
    ]
