"""A GRPO run by TRL's GRPOTrainer for bench/results_study.py, in TRL's own Python: settings as JSON on stdin, one JSON
line per optimizer step on stdout (what the trainer prints goes to stderr).

Prompts, their order and the reward function are those of this package's run, the starting weights too; transformers
generates, which is TRL's default. Seconds are CPU seconds of the process.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "sagc_fast/bench/peers")]

from allocator import keep_freed_memory  # noqa: E402

MAX_MICRO_BATCH = 32
"""Completions per forward and backward pass; several make up the one optimizer step."""
LOSSES = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.2},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
}
TAU = 2.0


def main() -> None:
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    os.environ.update(WANDB_DISABLED="true", ACCELERATE_USE_CPU="true", TRL_EXPERIMENTAL_SILENCE="1")
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from sagc_fast.tasks.base import Problem

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    module, _, function = settings["scorer"]["target"].partition(":")
    score = getattr(import_module(module), function)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings["dtype"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    if settings["stop"]:  # TRL ends completions at one token
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokenizer.encode(settings["stop"]))[0]
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    group_size, rows = settings["group_size"], settings["num_prompts"] * settings["group_size"]
    micro = next(size for size in range(min(MAX_MICRO_BATCH, rows), 0, -1) if rows % size == 0)
    sampled: list[tuple[float, int]] = []  # reward and length of the step's completions, in TRL's order

    def reward(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        given = zip(completions, answer, strict=True)
        rewards = [_reward(score(text, Problem("", right), **settings["scorer"]["kwargs"])) for text, right in given]
        sampled.extend(zip(rewards, map(len, completion_ids), strict=True))
        return rewards

    class Recorder(transformers.TrainerCallback):
        tokens, seconds, wall_seconds = 0, 0.0, 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started, self.wall_started = time.process_time(), time.perf_counter()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            self.seconds += time.process_time() - self.started
            self.wall_seconds += time.perf_counter() - self.wall_started
            lengths = [length for _, length in sampled]
            self.tokens += sum(lengths)
            groups = [lengths[i : i + group_size] for i in range(0, len(lengths), group_size)]
            record = {
                "step": state.global_step,
                "group_size": group_size,
                "reward_mean": statistics.fmean(r for r, _ in sampled),
                "straggler_rate": statistics.fmean(max(g) > TAU * statistics.median(g) for g in groups),
                "length_mean": statistics.fmean(lengths),
                "idle_fraction": 1 - sum(lengths) / (len(lengths) * max(lengths)),
                "num_groups_kept": len(groups),
                "num_groups_sampled": len(groups),
                "tokens": self.tokens,
                "cpu_seconds": self.seconds,
                "wall_seconds": self.wall_seconds,
            }
            sampled.clear()
            print(json.dumps(record), file=lines, flush=True)

    with tempfile.TemporaryDirectory(prefix="trl-results-") as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, per_device_train_batch_size=micro,
            gradient_accumulation_steps=rows // micro, num_generations=group_size, beta=0.0, temperature=1.0,
            max_completion_length=settings["max_new_tokens"], learning_rate=settings["learning_rate"],
            lr_scheduler_type="constant_with_warmup", warmup_steps=settings["warmup_steps"],
            max_steps=settings["steps"], logging_steps=1, report_to="none", save_strategy="no",
            shuffle_dataset=False, gradient_checkpointing=False, disable_tqdm=True, seed=settings["seed"],
            **LOSSES[settings["algorithm"]],
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, args=config, reward_funcs=reward, processing_class=tokenizer,
            train_dataset=Dataset.from_list(settings["problems"]), callbacks=[Recorder()],
        )  # fmt: skip
        trainer.train()
    model.save_pretrained(settings["out"])


def _reward(score: Any) -> float:
    return float(getattr(score, "reward", score))


if __name__ == "__main__":
    keep_freed_memory()
    main()
