"""One step of TRL's GRPOTrainer on the same groups: transformers generates, the end token is forced at each length."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

from allocator import keep_freed_memory
from peer_worker import Run, serve
from phases import timed

END, PAD = 2, 3
MICRO_BATCH = 32
"""Completions per forward and backward pass; several make up the one optimizer step."""


def load(settings: dict[str, Any]) -> Run:
    os.environ.update(WANDB_DISABLED="true", ACCELERATE_USE_CPU="true", TRL_EXPERIMENTAL_SILENCE="1")
    import torch
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])
    transformers.logging.set_verbosity_error()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings.get("dtype", "fp32")]
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    # The model has no tokenizer: ids are words, so that prompts are exactly the ids of the request.
    words = Tokenizer(models.WordLevel({str(i): i for i in range(model.config.vocab_size)}, unk_token=str(PAD)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=str(END), pad_token=str(PAD), padding_side="left"
    )
    generate = model.generate

    class ForcedEnd(transformers.LogitsProcessor):
        """No end token before a row's length, nothing else at it."""

        def __init__(self, prompt_length: int, lengths: list[int]) -> None:
            self.ends = torch.tensor(lengths) + prompt_length - 1

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            is_last = input_ids.shape[1] >= self.ends
            scores[:, END] = -torch.inf
            scores[is_last] = -torch.inf
            scores[is_last, END] = 0.0
            return scores

    def run(request: dict[str, Any]) -> dict[str, Any]:
        flat = [length for group in request["lengths"] for length in group]
        group_size, micro = len(request["lengths"][0]), min(MICRO_BATCH, len(flat))
        seconds, made = {}, []

        def forced(*args: Any, **options: Any) -> Any:
            width = options["input_ids"].shape[1]
            options["logits_processor"] = transformers.LogitsProcessorList([ForcedEnd(width, flat)])
            return generate(*args, **options)

        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            made.extend(map(len, completion_ids))
            return [sum(ids) % 17 / 17 for ids in completion_ids]

        class OptimizerClock(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                self.started = time.process_time()

            def on_optimizer_step(self, *_: Any, **__: Any) -> None:
                seconds["optimizer"] = time.process_time() - self.started

        model.generate = timed(forced, seconds, "rollout")
        with tempfile.TemporaryDirectory(prefix="trl-bench-") as folder:
            config = GRPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, per_device_train_batch_size=micro,
                gradient_accumulation_steps=len(flat) // micro, num_generations=group_size,
                max_completion_length=settings["max_length"], temperature=1.0, beta=0.0, loss_type="grpo",
                learning_rate=settings["learning_rate"], max_steps=1, report_to="none", save_strategy="no",
                shuffle_dataset=False, gradient_checkpointing=False, disable_tqdm=True, seed=request["seed"],
            )  # fmt: skip
            prompts = [{"prompt": " ".join(map(str, prompt))} for prompt in request["prompts"]]
            trainer = GRPOTrainer(
                model=model, args=config, reward_funcs=reward, processing_class=tokenizer,
                train_dataset=Dataset.from_list(prompts), callbacks=[OptimizerClock()],
            )  # fmt: skip
            trainer.compute_loss = timed(trainer.compute_loss, seconds, "forward")
            trainer.accelerator.backward = timed(trainer.accelerator.backward, seconds, "backward")
            wall, cpu = time.perf_counter(), time.process_time()  # without making the trainer
            trainer.train()
            elapsed = {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
            seconds["update"] = elapsed["cpu_seconds"] - seconds["rollout"]
        rest = iter(made)
        lengths = [[next(rest) for _ in group] for group in request["lengths"]]
        return {"lengths": lengths, "output_tokens": sum(made), "seconds": seconds, **elapsed}

    return run


if __name__ == "__main__":
    keep_freed_memory()
    serve(load, ("trl", "transformers", "torch"))
