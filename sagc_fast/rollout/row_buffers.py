"""Memory of the decode rows on the device: taken once, filled by whole copies, seen through typed views.

What the host writes is packed, so that an upload is one copy. Two host buffers take turns: one may still be on its way
while the next is written (see :meth:`Packed.write`).

Shape suffixes as in :mod:`sagc_fast.ops.decode_rows`.
"""

from __future__ import annotations

import math

import torch
from numpy.typing import NDArray

from sagc_fast.ops import DecodeRows
from sagc_fast.rollout.device import Device

ALIGNMENT = 256
"""Bytes; every column starts at such a place, as cudaMalloc would have it."""
RECORD_STEPS = 128
"""Draws on record: more than two bursts, one that the host reads and one that runs."""

Fields = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Packed:
    """Tensors side by side in one piece of device memory, and two host buffers of the same layout."""

    def __init__(self, device: Device, fields: Fields) -> None:
        self._device = device
        spans, size = {}, 0
        for name, (shape, dtype) in fields.items():
            spans[name] = (size, size + math.prod(shape) * dtype.itemsize)
            size = -(-spans[name][1] // ALIGNMENT) * ALIGNMENT

        def views(memory: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: memory[slice(*spans[name])].view(dtype).view(shape) for name, (shape, dtype) in fields.items()
            }

        self.memory = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
        self.tensors = views(self.memory)
        self._hosts = [device.host_buffer((size,), torch.uint8) for _ in range(2)]
        self._arrays = [{name: view.numpy() for name, view in views(host).items()} for host in self._hosts]
        self._turn = 0

    def write(self) -> dict[str, NDArray]:
        """The host arrays to fill before :meth:`upload`, with old contents. Between a call and the next but one, the
        host must have waited for work that was queued behind the first one's upload."""
        self._turn = 1 - self._turn
        return self._arrays[self._turn]

    def upload(self) -> None:
        self._device.upload(self.memory, self._hosts[self._turn])


class RowBuffers:
    """State, block tables and record of up to ``capacity`` rows; ``max_blocks`` columns, ``num_sets`` x ``num_ids``
    ending ids."""

    def __init__(self, device: Device, capacity: int, max_blocks: int, num_sets: int, num_ids: int) -> None:
        self.capacity, self.max_blocks, self.num_sets, self.num_ids = capacity, max_blocks, num_sets, num_ids
        long, int32, fp32 = torch.int64, torch.int32, torch.float32
        columns = {
            "token": long, "position": long, "index": long, "max_output": long, "is_live": int32, "end_set": long,
            "shared_blocks": int32, "share_group": int32, "step": long, "seed": long, "prompt_id": long,
            "sample_index": long, "temperature": fp32, "top_k": long, "top_p": fp32, "min_p": fp32,
        }  # fmt: skip
        fields: Fields = {name: ((capacity,), dtype) for name, dtype in columns.items()}
        self.state = Packed(device, fields | {"end_ids": ((num_sets, num_ids), long)})
        """Written when the rows change."""
        self.tables = Packed(device, {"is_kept": ((capacity,), int32), "block_tables": ((capacity, max_blocks), int32)})
        """Written before every burst."""
        on_device = {"device": device.torch_device}
        self._context = torch.zeros(capacity, dtype=int32, **on_device)
        self._slot = torch.zeros(capacity, dtype=long, **on_device)
        self._starts = torch.arange(capacity + 1, dtype=int32, **on_device)
        self._all_rows = torch.arange(capacity, dtype=long, **on_device)
        shape = (RECORD_STEPS, capacity)
        self.drawn, self.logprobs = (torch.zeros(shape, dtype=dtype, **on_device) for dtype in (long, fp32))
        self._host_drawn, self._host_logprobs = (device.host_buffer(shape, dtype) for dtype in (long, fp32))

    def fits(self, capacity: int, max_blocks: int, num_sets: int, num_ids: int) -> bool:
        sizes = (self.capacity, self.max_blocks, self.num_sets, self.num_ids)
        return all(have >= need for have, need in zip(sizes, (capacity, max_blocks, num_sets, num_ids), strict=True))

    @property
    def memory(self) -> list[torch.Tensor]:
        """Everything that a step may touch."""
        return [
            self.state.memory, self.tables.memory, self._context, self._slot, self._starts, self._all_rows, self.drawn,
            self.logprobs,
        ]  # fmt: skip

    def rows(self, count: int) -> DecodeRows:
        """The first ``count`` rows."""
        state, tables = self.state.tensors, self.tables.tensors
        return DecodeRows(
            token_R=state["token"][:count],
            position_R=state["position"][:count],
            index_R=state["index"][:count],
            max_output_R=state["max_output"][:count],
            is_live_R=state["is_live"][:count],
            is_kept_R=tables["is_kept"][:count],
            end_set_R=state["end_set"][:count],
            shared_blocks_R=state["shared_blocks"][:count],
            step_R=state["step"][:count],
            context_R=self._context[:count],
            slot_R=self._slot[:count],
            block_tables_RB=tables["block_tables"][:count],
            end_ids_SI=state["end_ids"],
            drawn_KR=self.drawn[:, :count],
            logprobs_KR=self.logprobs[:, :count],
        )

    def starts(self, count: int) -> torch.Tensor:
        """int32 [count + 1], 0 to count: every row brings one token."""
        return self._starts[: count + 1]

    def all_rows(self, count: int) -> torch.Tensor:
        """int64 [count], 0 to count - 1."""
        return self._all_rows[:count]

    def record_pairs(self, start: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(host buffer, tensor) of ``count`` record rows from ``start``, which may wrap around."""
        pieces = [slice(start, min(start + count, RECORD_STEPS)), slice(0, max(0, start + count - RECORD_STEPS))]
        return [
            (host[piece], tensor[piece])
            for piece in pieces
            if piece.stop > piece.start
            for host, tensor in ((self._host_drawn, self.drawn), (self._host_logprobs, self.logprobs))
        ]

    def record(self, start: int, count: int, num_rows: int) -> tuple[NDArray, NDArray]:
        """The draws and log-probs [count, num_rows] that were downloaded by :meth:`record_pairs`."""
        steps = [(start + i) % RECORD_STEPS for i in range(count)]
        return self._host_drawn.numpy()[steps, :num_rows], self._host_logprobs.numpy()[steps, :num_rows]
