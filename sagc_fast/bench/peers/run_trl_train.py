"""TRL's GRPOTrainer for a few optimizer steps on the request's problems; transformers generates, its default."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from allocator import keep_freed_memory
from peer_worker import Run, serve

MICRO_BATCH = 32
"""Completions per forward and backward pass; several make up the one optimizer step."""


def load(settings: dict[str, Any]) -> Run:
    os.environ.update(WANDB_DISABLED="true", ACCELERATE_USE_CPU="true", TRL_EXPERIMENTAL_SILENCE="1")
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    rows = settings["num_prompts"] * settings["group_size"]
    micro = min(MICRO_BATCH, rows)

    def run(request: dict[str, Any]) -> dict[str, Any]:
        model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
        counts = {"tokens": 0}

        def reward(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
            counts["tokens"] += sum(map(len, completion_ids))
            return [float(right in text) for text, right in zip(completions, answer, strict=True)]

        problems = request["problems"][: request["steps"] * settings["num_prompts"]]
        with tempfile.TemporaryDirectory(prefix="trl-bench-") as folder:
            config = GRPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, per_device_train_batch_size=micro,
                gradient_accumulation_steps=rows // micro, num_generations=settings["group_size"],
                max_completion_length=settings["max_new_tokens"], temperature=1.0, beta=0.0, loss_type="grpo",
                learning_rate=settings["learning_rate"], max_steps=request["steps"], logging_steps=1,
                report_to="none", save_strategy="no", shuffle_dataset=False, gradient_checkpointing=False,
                disable_tqdm=True, seed=0,
            )  # fmt: skip
            trainer = GRPOTrainer(
                model=model, args=config, reward_funcs=reward, processing_class=tokenizer,
                train_dataset=Dataset.from_list(problems),
            )  # fmt: skip
            seconds = {"rollout": 0.0}
            model.generate = _timed(model.generate, seconds)
            wall, cpu = time.perf_counter(), time.process_time()  # without making the trainer
            trainer.train()
            elapsed = {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
            seconds["update"] = elapsed["cpu_seconds"] - seconds["rollout"]
        return {"output_tokens": counts["tokens"], "seconds": seconds, **elapsed}

    return run


def _timed(call: Callable[..., Any], seconds: dict[str, float]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        started = time.process_time()
        try:
            return call(*args, **options)
        finally:
            seconds["rollout"] += time.process_time() - started

    return timed


if __name__ == "__main__":
    keep_freed_memory()
    serve(load, ("trl", "transformers", "torch"))
