"""A policy of two layers, 32 wide, over twenty characters, configurations of runs that use it, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sagc_fast.model.config import ModelConfig
from sagc_fast.model.loader import random_model, save_model
from sagc_fast.train.trainer import Trainer

CHARACTERS = "0123456789+=-.,:ab \n"
EOS = len(CHARACTERS)
STEP_FIELDS = {
    "event", "step", "time_seconds", "controller", "group_size", "lambda", "delta", "tau", "num_groups",
    "num_straggler_groups", "straggler_rate", "straggler_ratio_mean", "straggler_ratio_max", "clipped_ratio",
    "reward_mean", "reward_std", "outcome_mean", "num_groups_kept", "num_groups_sampled", "length_mean", "length_max",
    "length_quantiles", "num_output_tokens", "num_prompt_tokens", "num_update_tokens", "rollout_seconds",
    "reward_seconds", "pack_seconds", "gap_seconds",
    "update_seconds", "checkpoint_seconds", "step_seconds", "tokens_per_second", "idle_fraction",
    "tail_fraction", "num_preemptions", "loss", "grad_norm", "clip_low_fraction", "clip_high_fraction", "entropy", "kl",
    "logprob_diff_mean", "logprob_diff_max", "learning_rate", "num_reward_errors", "is_skipped",
}  # fmt: skip
"""What every line of a step in metrics.jsonl has."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {c: i for i, c in enumerate(CHARACTERS)} | {"<eos>": EOS, "<unk>": EOS + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


def make_policy(folder: Path, eos_bias: float = 1.5) -> Path:
    """Random weights that like to end after a few characters, so that lengths differ and few reach the cap."""
    config = ModelConfig.from_hf_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": EOS + 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "eos_token_id": EOS,
            "hidden_act": "silu",
        }
    )
    model = random_model(config, seed=1)
    with torch.no_grad():
        model.lm_head_weight[EOS] *= eos_bias
    save_model(model, folder, tokenizer=tiny_tokenizer())
    return folder


def tiny_values(policy: Path, run_dir: Path, **sections: Any) -> dict[str, Any]:
    """The configuration of a run of a few hundredths of a second per step, as nested plain values."""
    values: dict[str, Any] = {
        "model": {"path": str(policy)},
        "task": {"name": "addition", "max_digits": 1, "max_terms": 2, "reward": "train_scorers:digits"},
        "rollout": {"prompts_per_step": 3, "max_new_tokens": 12, "kv_budget_gb": 0.01, "max_num_seqs": 5},
        "controller": {"candidates": [2, 4], "tau": 1.5, "delta": 0.4},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "update": {"micro_batch_tokens": 64},
        "evaluation": {"every": 2, "num_problems": 4},
        "checkpoint": {"every": 2, "keep_last": 2},
        "metrics": {"timeline_every": 2, "tensorboard": False, "display": "off"},
        "steps": 4,
        "seed": 3,
        "threads": 1,
        "run_dir": str(run_dir),
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return values


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_seconds(path: Path) -> list[dict]:
    return [{k: v for k, v in r.items() if not k.endswith("_seconds") and "per_second" not in k} for r in read(path)]


def events(run_dir: Path | str, kind: str) -> list[dict]:
    return [r for r in read(Path(run_dir) / "metrics.jsonl") if r["event"] == kind]


def assert_same_run(a: Path, b: Path, step: int) -> None:
    for name in ("metrics.jsonl", "lengths.jsonl", "timeline.jsonl"):
        assert without_seconds(a / name) == without_seconds(b / name), name
    folders = [run / f"checkpoints/step-{step:06d}" for run in (a, b)]
    tensors = [path.name for path in folders[0].glob("*.safetensors")]
    assert len(tensors) == 2
    for name in (*tensors, "length_history.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def crash_after(trainer: Trainer, step: int) -> None:
    """A bug in the middle of the run, after the step's lines are written and before its checkpoint."""
    original = trainer._evaluate_if_due

    def crash():
        if trainer.state.step >= step:
            raise ZeroDivisionError
        original()

    trainer._evaluate_if_due = crash
