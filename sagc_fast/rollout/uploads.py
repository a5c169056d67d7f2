"""Host arrays to a device in one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 16
"""Bytes; every array starts at such a place in the packed copy."""


def uploaded(arrays: Sequence[NDArray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on ``device``; on the CPU they share the arrays' memory.

    On a GPU they are views of one tensor that is copied from pinned memory behind what is queued already. torch keeps
    that memory until the copy is done, so the host goes on at once.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, place in zip(arrays, packed.split(sizes), strict=True):
        place.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    places = packed.to(device, non_blocking=True).split(sizes)
    return [
        place[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, place in zip(arrays, places, strict=True)
    ]
