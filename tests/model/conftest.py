"""Tiny transformers models saved to folders, and a bare KV cache to drive the paged forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sagc_fast.model.config import ModelConfig
from sagc_fast.ops.backend import native_module, use_backend
from sagc_fast.ops.layouts import PagedLayout

VOCAB = 97


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Path]]:
    """``hf_folder("Qwen3Config", max_shard_size=..., **config_fields)`` -> (transformers model, its folder)."""
    import transformers

    def make(config_class: str, max_shard_size: str = "5GB", **fields: Any) -> tuple[Any, Path]:
        sizes = {
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            "pad_token_id": None,
        }
        config = getattr(transformers, config_class)(**{**sizes, **fields})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():  # norms and biases other than ones and zeros, so that none can be forgotten unseen
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.normal_(0.5, 0.5)
        folder = tmp_path_factory.mktemp("hf")
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return model, folder

    return make


class BareCache:
    """Keys and values of every layer in NaN-filled blocks, and block tables handed out in random order."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int = 40,
        block_size: int = 16,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self._layers = [[torch.full(shape, float("nan"), dtype=dtype) for _ in "kv"] for _ in range(config.num_layers)]
        self._block_size = block_size
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self._tables: dict[Any, list[int]] = {}
        self._lengths: dict[Any, int] = {}

    def k(self, layer: int) -> torch.Tensor:
        return self._layers[layer][0]

    def v(self, layer: int) -> torch.Tensor:
        return self._layers[layer][1]

    def drop(self, name: Any) -> None:
        """Forget a sequence, as preemption does."""
        self._free += self._tables.pop(name)
        del self._lengths[name]

    def append(self, step: dict[Any, int]) -> PagedLayout:
        """Layout that appends so many tokens to each named sequence; every row's output is wanted."""
        positions, tables = [], []
        for name, count in step.items():
            start = self._lengths.get(name, 0)
            table = self._tables.setdefault(name, [])
            while len(table) * self._block_size < start + count:
                table.append(self._free.pop())
            self._lengths[name] = start + count
            positions.append(torch.arange(start, start + count))
            tables.append(torch.tensor(table))
        block_tables = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).int()
        lengths = torch.tensor(list(step.values()))
        flat, sequence = torch.cat(positions), torch.arange(len(step)).repeat_interleave(lengths)
        size = self._block_size
        return PagedLayout(
            positions_T=flat,
            cu_query_S1=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
            context_lens_S=torch.tensor([self._lengths[name] for name in step], dtype=torch.int32),
            block_tables_SB=block_tables,
            slots_T=block_tables[sequence, flat // size].long() * size + flat % size,
            logits_rows_R=torch.arange(len(flat)),
            share_group_S=torch.full((len(step),), -1, dtype=torch.int32),
            shared_blocks_S=torch.zeros(len(step), dtype=torch.int32),
            max_query_len=int(lengths.max()),
            max_context_len=max(self._lengths[name] for name in step),
        )


@pytest.fixture(scope="session")
def bare_cache() -> type[BareCache]:
    return BareCache


@pytest.fixture(params=["torch", *(["native"] if native_module() is not None else [])])
def each_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Plain torch, and the native operators where they are built (their own tests are in tests/native)."""
    with use_backend(request.param):
        yield request.param


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
