"""The memory behind the blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sagc_fast.errors import ConfigError
from sagc_fast.rollout import kv_cache
from sagc_fast.rollout.kv_cache import KVCache, dtype_of


def test_layers_are_contiguous_zeroed_and_apart():
    kv = KVCache(2, num_blocks=3, block_size=4, num_kv_heads=5, head_dim=6, dtype=torch.bfloat16)
    assert kv.k(1).shape == kv.v(0).shape == (3, 5, 4, 6)
    assert kv.k(1).is_contiguous()
    assert kv.k(0).dtype == torch.bfloat16
    kv.k(1).fill_(1)
    assert not kv.k(0).any()
    assert not kv.v(1).any()
    assert kv.num_bytes == 3 * KVCache.bytes_per_block(2, 4, 5, 6, torch.bfloat16) == 3 * 2 * 2 * 5 * 4 * 6 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_memory_begins_at_a_cache_line(dtype: torch.dtype):
    """Where it did not, every wide load of the decode kernel touched two lines."""
    for num_blocks in (1, 30, 3000):
        assert KVCache(2, num_blocks, 16, 2, 32, dtype).k(0).data_ptr() % 64 == 0


@pytest.mark.parametrize("copy_bytes", [1, 2**20])
def test_all_sources_are_read_before_a_target_is_written(monkeypatch, copy_bytes):
    """A block that one copy fills may be the source of another: it was free for new use in the same step."""
    monkeypatch.setattr(kv_cache, "COPY_BYTES", copy_bytes)  # layer by layer, all layers at once
    kv = KVCache(2, num_blocks=4, block_size=1, num_kv_heads=1, head_dim=1)
    for layer in range(2):
        kv.k(layer).view(-1).copy_(torch.arange(4) + 10 * layer)
        kv.v(layer).view(-1).copy_(torch.arange(4) + 100)
    kv.copy_blocks(np.array([0, 1]), np.array([2, 0]))
    assert kv.k(0).view(-1).tolist() == [1, 1, 0, 3]
    assert kv.k(1).view(-1).tolist() == [11, 11, 10, 13]
    assert kv.v(1).view(-1).tolist() == [101, 101, 100, 103]


def test_dtype_names():
    assert [dtype_of(name) for name in ("fp32", "bf16", "fp16")] == [torch.float32, torch.bfloat16, torch.float16]
    assert dtype_of(torch.float16) == torch.float16
    for bad in ("int8", torch.int8):
        with pytest.raises(ConfigError, match="must be one of fp32, bf16, fp16"):
            dtype_of(bad)
