"""Tiny random models and a byte tokenizer, shared by every area. Everything is seeded and offline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest


class ByteTokenizer:
    """One token per UTF-8 byte (ids 0-255), end of sequence 256, beginning 257; called like one of transformers."""

    eos_token_id = 256
    bos_token_id = 257
    vocab_size = 258

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        special = {256: "<eos>", 257: "<bos>"}
        parts, run = [], bytearray()
        for token_id in token_ids:
            if token_id < 256:
                run.append(token_id)
            else:
                parts += [run.decode("utf-8", errors="replace"), "" if skip_special_tokens else special[token_id]]
                run = bytearray()
        return "".join([*parts, run.decode("utf-8", errors="replace")])

    def __len__(self) -> int:
        return self.vocab_size


@pytest.fixture(scope="session")
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., Any]:
    """``tiny_config("qwen3", vocab_size=300)``: a two-layer configuration of the family, any field overridden."""

    def make(family: str = "llama", **overrides: Any) -> Any:
        from sagc_fast.model.config import ModelConfig

        config = ModelConfig(
            family=family,
            vocab_size=258,
            hidden_size=32,
            intermediate_size=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            has_qkv_bias=family == "qwen2",
            eos_token_ids=(256,),
        )
        return replace(config, **overrides)

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_config: Callable[..., Any]) -> Callable[..., Any]:
    """``tiny_model("llama", seed=1, dtype="fp32", **config_fields)``: random weights, the same for the same call."""

    def make(family: str = "llama", seed: int = 0, dtype: str = "fp32", **overrides: Any) -> Any:
        from sagc_fast.model.loader import random_model

        return random_model(tiny_config(family, **overrides), seed=seed, dtype=dtype)

    return make


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``hf_folder("qwen2", vocab_size=97)``: folder of a random model made and saved by transformers."""

    def make(family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
        import torch
        import transformers

        fields = {
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
        if family == "qwen3":
            fields["head_dim"] = 16
        torch.manual_seed(seed)
        config = getattr(transformers, f"{name}Config")(**{**fields, **overrides})
        folder = tmp_path_factory.mktemp(f"hf-{family}")
        getattr(transformers, f"{name}ForCausalLM")(config).eval().save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def random_decode_rows():
    """``random_decode_rows(num_rows, page)``: views of wider memory, as the runner's are; half of the rows live, and
    their record is about to wrap around."""
    import torch

    from sagc_fast.ops import DecodeRows

    def make(num_rows: int, page: int) -> DecodeRows:
        g = torch.Generator().manual_seed(num_rows)

        def integers(low: int, high: int, shape: tuple[int, ...] = (num_rows,), dtype: torch.dtype = torch.int64):
            return torch.randint(low, high, shape, generator=g).to(dtype)

        int32, num_steps, capacity = torch.int32, 5, num_rows + 29
        return DecodeRows(
            token_R=integers(0, 50),
            position_R=integers(0, 5 * page),
            index_R=integers(0, 9),
            max_output_R=integers(1, 12),
            is_live_R=integers(0, 2, dtype=int32),
            is_kept_R=(integers(0, 4) > 0).to(int32),
            end_set_R=integers(0, 3),
            shared_blocks_R=integers(0, 3, dtype=int32),
            step_R=torch.full((num_rows,), num_steps - 1),
            context_R=torch.zeros(num_rows, dtype=int32),
            slot_R=torch.zeros(num_rows, dtype=torch.int64),
            block_tables_RB=integers(0, 99, (num_rows, 6), int32),
            end_ids_SI=torch.tensor([[-1, -1, -1], [3, 4, -1], [5, 6, 7]]),
            drawn_KR=torch.full((num_steps, capacity), 77)[:, :num_rows],
            logprobs_KR=torch.full((num_steps, capacity), 0.5)[:, :num_rows],
        )

    return make
