"""The memory behind the KV blocks: one tensor for all layers, written in place.

Shape suffixes: L layers, N blocks, K kv heads, D head width.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from sagc_fast.errors import ConfigError
from sagc_fast.rollout.uploads import uploaded

CACHE_LINE_BYTES = 64
COPY_BYTES, DEVICE_COPY_BYTES = 2**19, 2**26
"""Blocks are copied for as many layers at a time as this holds (ours), on the CPU and elsewhere: when a whole batch has
forked, the copies of all layers at once would be the memory peak of the call; on a GPU every piece is a launch."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """The torch dtype for ``fp32``, ``bf16`` or ``fp16`` (a torch dtype passes through when it is one of the three)."""
    dtype = DTYPES.get(name) if isinstance(name, str) else name
    if dtype not in DTYPES.values():
        raise ConfigError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)}.")
    return dtype


class KVCache:
    """Keys and values of every layer, [N, K, block_size, D] each; slot = block * block_size + offset."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        has_scratch: bool = False,
    ) -> None:
        """``has_scratch`` takes one block more, number ``num_blocks``, that belongs to nobody: rows that are over, and
        those that only fill a batch up, write there."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_layers, 2, num_blocks + has_scratch, num_kv_heads, block_size, head_dim)
        self._data_L2NKBD = _zeros(shape, dtype, torch.device(device))
        self._keys = [self._data_L2NKBD[layer, 0] for layer in range(num_layers)]
        self._values = [self._data_L2NKBD[layer, 1] for layer in range(num_layers)]

    def k(self, layer: int) -> torch.Tensor:
        """Keys of one layer, [N, K, block_size, D], contiguous."""
        return self._keys[layer]

    def v(self, layer: int) -> torch.Tensor:
        """Values of one layer, [N, K, block_size, D], contiguous."""
        return self._values[layer]

    @property
    def memory(self) -> torch.Tensor:
        """All of it, [L, 2, N, K, block_size, D]."""
        return self._data_L2NKBD

    @property
    def scratch_block(self) -> int:
        return self.num_blocks

    @property
    def scratch_slot(self) -> int:
        return self.num_blocks * self.block_size

    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy whole blocks in all layers. Of the keys, or values, of a layer all sources are read before a target is
        written."""
        layers = self._data_L2NKBD.flatten(0, 1)
        source_ids, target_ids = uploaded([sources.astype(np.int64), targets.astype(np.int64)], layers.device)
        bytes_each = sources.size * self.num_bytes // (len(layers) * self.num_blocks)
        most_bytes = COPY_BYTES if layers.device.type == "cpu" else DEVICE_COPY_BYTES
        for part in layers.split(max(1, most_bytes // max(1, bytes_each))):
            part.index_copy_(1, target_ids, part.index_select(1, source_ids))

    @property
    def num_bytes(self) -> int:
        return self._data_L2NKBD.numel() * self._data_L2NKBD.element_size()

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Bytes of one block over all layers, keys and values."""
        return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that cost no memory on the CPU until a block is first written (calloc maps pages on demand).

    NumPy asks the kernel for huge pages, and the tensor starts at a cache line: calloc's own 16 bytes past one would
    make every wide load of a key or value touch two lines (the decode kernel then takes 1.3 times as long).
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    storage = np.zeros(num_bytes + CACHE_LINE_BYTES, dtype=np.uint8)
    start = -storage.ctypes.data % CACHE_LINE_BYTES
    return torch.from_numpy(storage[start : start + num_bytes]).view(dtype).view(shape)
