"""One decode step as a CUDA graph, for each bucket of rows; kept by an engine from call to call.

A graph holds addresses. Parameters are updated in place and the KV cache stays where it is, so graphs survive optimizer
steps; before each call :meth:`DecodeGraphs.prepare` compares every address with those of the capture and drops the
graphs when one has moved. Launch grids depend on the bucket and on the width of the block tables, never on a context:
rows that are shorter leave programs that return at once.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any, Literal

import torch

from sagc_fast import ops
from sagc_fast.ops.backend import resolve
from sagc_fast.ops.layouts import PagedLayout
from sagc_fast.profiling import annotate
from sagc_fast.rollout.device import CudaDevice, Device
from sagc_fast.rollout.kv_cache import KVCache
from sagc_fast.rollout.row_buffers import RowBuffers

log = logging.getLogger(__name__)

GraphsMode = Literal["auto", "off"]
GRAPHS_MODES: tuple[GraphsMode, ...] = ("auto", "off")
LEAST_BLOCKS, LEAST_SETS, LEAST_IDS = 16, 4, 8
"""Smallest tables, so that small differences between calls do not move them."""


def bucket_of(num_rows: int) -> int:
    """Rows that a step of ``num_rows`` is computed with: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, ...

    Powers of two and, from 16 on, the numbers half way: at most a third of the rows is padding.
    """
    power = 1 << (num_rows - 1).bit_length()
    middle = power * 3 // 4
    return middle if power >= 32 and num_rows <= middle else power


def describe_use() -> str:
    """Whether an engine on this machine's GPU would use graphs, and why not."""
    if not torch.cuda.is_available():
        return "not used: there is no GPU that this torch can use"
    if resolve("paged_attention", "cuda", torch.bfloat16) != "triton":
        return "not used: the Triton kernels are not to be had, and plain torch waits for the device at every step"
    return "used for decode steps; graphs='off' (rollout.graphs of a run) switches them off"


def burst_device(torch_device: torch.device, dtype: torch.dtype) -> Device | None:
    """The device to run bursts on for a model there; None where its steps are planned one by one (the CPU, and a GPU
    without Triton, whose attention in plain torch would read the whole width of the tables)."""
    if torch_device.type != "cuda" or resolve("paged_attention", "cuda", dtype) != "triton":
        return None
    return CudaDevice(torch_device)


class DecodeGraphs:
    """Buffers and graphs of one engine's decode steps. Mode ``off``: bursts run operator by operator, from the same
    buffers."""

    def __init__(self, device: Device, mode: GraphsMode = "auto") -> None:
        self.device = device
        self.mode = mode
        self.buffers: RowBuffers | None = None
        self.refusal: str | None = None
        """Why steps run without graphs although they are wanted: what the capture raised."""
        self._graphs: dict[tuple[int, bool], Any] = {}
        self._addresses: tuple[Any, ...] = ()
        self._model: Any = None
        self._kv: KVCache | None = None

    @property
    def buckets(self) -> list[tuple[int, bool]]:
        """(rows, with filters) of the graphs at hand."""
        return sorted(self._graphs)

    @torch.inference_mode()
    def prepare(self, model: Any, kv: KVCache, capacity: int, max_blocks: int, num_sets: int, num_ids: int) -> None:
        """Buffers that suffice for a call; drops graphs whose memory has moved."""
        sizes = (
            bucket_of(capacity),
            max(LEAST_BLOCKS, _power_of_two(max_blocks)),
            max(LEAST_SETS, _power_of_two(num_sets)),
            max(LEAST_IDS, _power_of_two(num_ids)),
        )
        buffers = self.buffers
        self.device.wait(self.device.record())  # of a call that was broken off, work and copies may still be under way
        if buffers is None or not buffers.fits(*sizes):
            if buffers is not None:  # grow only, or two kinds of calls in turn would capture every time
                old = (buffers.capacity, buffers.max_blocks, buffers.num_sets, buffers.num_ids)
                sizes = tuple(map(max, sizes, old))
            self.drop()
            self.buffers = RowBuffers(self.device, *sizes)
        self._model, self._kv = model, kv
        operators = ("paged_attention", "sample_keyed_tokens", "place_rows", "advance_rows")
        backends = [resolve(operator, model.device.type, model.dtype) for operator in operators]
        addresses = (*backends, *(tensor.data_ptr() for tensor in (*self._reads(), *self._writes())))
        if addresses != self._addresses:
            if self._graphs:
                log.info("weights, KV cache or tables have moved: %d graphs are captured anew", len(self._graphs))
            self._graphs.clear()
        self._addresses = addresses

    def drop(self) -> None:
        """Give the memory of buffers and graphs back."""
        self._graphs.clear()
        self._addresses = ()
        self.buffers = self._model = self._kv = None

    def ready(self, bucket: int, has_filters: bool) -> None:
        """Capture the graph that :meth:`launch` needs, unless it is there. All rows are over afterwards."""
        if self.mode == "off" or self.refusal or (bucket, has_filters) in self._graphs:
            return
        assert self.buffers is not None
        with self.device.eager():
            self.buffers.state.tensors["is_live"].zero_()  # so that steps run for the capture change nothing
        try:
            with annotate("capture"):
                graph = self.device.capture(
                    lambda: self._step(bucket, has_filters),
                    self._reads(),
                    self._writes(),
                    # They run one after another, and a step leaves nothing behind but in the buffers.
                    beside=next(iter(self._graphs.values()), None),
                )
        except RuntimeError as error:
            self.refusal = str(error)
            warnings.warn(
                f"The decode step cannot be captured into a CUDA graph, so it runs operator by operator: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            self._graphs[bucket, has_filters] = graph

    def launch(self, bucket: int, has_filters: bool, num_steps: int) -> None:
        """Queue decode steps of the first ``bucket`` rows."""
        graph = self._graphs.get((bucket, has_filters))
        for _ in range(num_steps):
            if graph is not None:
                self.device.replay(graph)
            else:
                with self.device.eager():
                    self._step(bucket, has_filters)

    def _step(self, bucket: int, has_filters: bool) -> None:
        """Place the rows, run the model, draw, advance the rows: nothing comes from or goes to the host."""
        buffers, model, kv = self.buffers, self._model, self._kv
        assert buffers is not None
        assert kv is not None
        rows, state = buffers.rows(bucket), buffers.state.tensors
        ops.place_rows(rows, kv.block_size, kv.scratch_slot)
        layout = PagedLayout(  # made anew each time: what operators keep with it belongs to this step alone
            positions_T=rows.position_R,
            cu_query_S1=buffers.starts(bucket),
            context_lens_S=rows.context_R,
            block_tables_SB=rows.block_tables_RB,
            slots_T=rows.slot_R,
            logits_rows_R=buffers.all_rows(bucket),
            share_group_S=state["share_group"][:bucket],
            shared_blocks_S=rows.shared_blocks_R,
            max_query_len=1,
            max_context_len=buffers.max_blocks * kv.block_size,
            is_captured=True,
        )
        # Not widened to fp32: the draw reads the product as it is, in fp32 arithmetic.
        logits_RV = ops.linear(model.forward_paged(rows.token_R, layout, kv), model.lm_head_weight)
        keys = (*(state[name][:bucket] for name in ("seed", "prompt_id", "sample_index")), rows.index_R)
        filters = [state[name][:bucket] for name in ("top_k", "top_p", "min_p")] if has_filters else ()
        drawn = ops.sample_keyed_tokens(logits_RV, keys, state["temperature"][:bucket], *filters)
        ops.advance_rows(rows, *drawn)

    def _reads(self) -> list[torch.Tensor]:
        assert self.buffers is not None
        assert self._kv is not None
        angles = self._model.rope(self.buffers.max_blocks * self._kv.block_size)
        return [*self._model.parameters(), *angles]

    def _writes(self) -> list[torch.Tensor]:
        assert self.buffers is not None
        assert self._kv is not None
        return [*self.buffers.memory, self._kv.memory]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
