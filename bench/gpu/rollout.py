"""Rollout of one model's shape: decode and prefill against their bounds, the host's gap, and the long-tail workload
with graphs and prompt sharing on and off beside transformers.generate of the same weights in this process.

    python -m gpu.rollout 3B

Lengths are forced, so every engine does the same useful work. Costs per step are differences of two calls that differ
in nothing but how many steps they have: start, prefill and stop drop out, also where a runner works ahead of the host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gpu.device import DEVICE, DTYPE, REHEARSAL, ceilings, config_of, free_memory, random_model, shape_of, wall_seconds
from gpu.hf import Peer
from gpu.profiled import busy_seconds
from gpu.report import part, row
from sagc_fast import RolloutEngine, SamplingParams
from sagc_fast.bench.workload import Workload
from sagc_fast.rollout.rows import RowTable

NUM_GROUPS, GROUP_SIZE, PROMPT = (2, 2, 20) if REHEARSAL else (8, 16, 256)
SHORT, LONG = (3, 6) if REHEARSAL else (32, 96)
"""Forced lengths of the two calls whose difference is the decode step."""
NUM_PREFILL, PREFILL_PROMPT = (2, 40) if REHEARSAL else (16, 2048)
MOST_ROWS = 1024
"""At a time, as of the peer, which takes a whole workload in one batch."""
KV_GB = 0.02 if REHEARSAL else 48.0
WORKLOADS = (
    {f"{n} x 2": Workload(n, 2, mean_length=8, max_length=10, min_prompt=8, max_prompt=16) for n in (2, 4)}
    if REHEARSAL
    else {"8 x 16": Workload(), "64 x 16": Workload(num_prompts=64)}
)


@dataclass(frozen=True)
class Mode:
    """How the engine runs."""

    graphs: bool = True
    sharing: bool = True

    def __str__(self) -> str:
        return f"graphs {'on' if self.graphs else 'off'}, sharing {'on' if self.sharing else 'off'}"


MODES = [Mode(graphs, sharing) for graphs in (True, False) for sharing in (True, False)]
BEST = MODES[0]


class Engines:
    """One engine per setting of the graphs, on one model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._made: dict[tuple[bool, int, int], RolloutEngine] = {}

    def get(self, mode: Mode, max_batch_tokens: int = 2048, max_num_seqs: int = 256) -> RolloutEngine:
        key = (mode.graphs, max_batch_tokens, max_num_seqs)
        if key not in self._made:
            self.release()  # two caches of this size do not fit beside the peer's
            self._made[key] = RolloutEngine(
                self.model, kv_budget_gb=KV_GB, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs,
                speculation="off", graphs="auto" if mode.graphs else "off",
            )  # fmt: skip
        return self._made[key]

    def release(self) -> None:
        self._made.clear()
        free_memory()


@contextmanager
def _no_group_decode() -> Iterator[None]:
    """Rows say that they share no block, so that attention reads every row's whole context by itself."""
    plain = RowTable.set_blocks

    def set_blocks(self: RowTable, slot: int, blocks: Any, num_computed: int, shared_blocks: int) -> None:
        plain(self, slot, blocks, num_computed, 0)

    RowTable.set_blocks = set_blocks
    try:
        yield
    finally:
        RowTable.set_blocks = plain


def generate(engine: RolloutEngine, mode: Mode, prompts: Sequence[list[int]], lengths: list[list[int]]) -> Any:
    """One call with forced lengths; its statistics. Without sharing every completion is a prompt of its own."""
    params = [[SamplingParams(max_new_tokens=n, ignore_eos=True) for n in group] for group in lengths]
    sizes = [len(group) for group in lengths]
    if not mode.sharing:
        prompts = [prompt for prompt, size in zip(prompts, sizes, strict=True) for _ in range(size)]
        params = [[one] for group in params for one in group]
        sizes = [1] * len(prompts)
    with nullcontext() if mode.sharing else _no_group_decode():
        groups = engine.generate(prompts, sizes, params)
    made = [n for group in groups for n in group.lengths]
    if made != [n for group in lengths for n in group]:
        raise RuntimeError("the engine returned other lengths than those forced")
    return engine.stats


def measure_decode(engines: Engines, name: str, rates: dict[str, float]) -> None:
    """Milliseconds of a decode step with all rows live, its bound, and how long the device waits for the host."""
    shape, item = shape_of(engines.model.config), DTYPE.itemsize
    rows = NUM_GROUPS * GROUP_SIZE
    prompts = [[4 + (7 * i + j) % 4000 for j in range(PROMPT)] for i in range(NUM_GROUPS)]
    kv_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * item
    own = rows * (SHORT + LONG) / 2
    for mode in MODES:
        engine = engines.get(mode)

        def call(length: int, engine: RolloutEngine = engine, mode: Mode = mode) -> Any:
            return generate(engine, mode, prompts, [[length] * GROUP_SIZE] * NUM_GROUPS)

        call(SHORT), call(LONG)
        steps = LONG - SHORT
        repeats = 3 if mode.graphs and not REHEARSAL else 1
        seconds = min(_difference(call, wall_seconds) for _ in range(repeats)) / steps
        context = (NUM_GROUPS if mode.sharing else rows) * PROMPT + own
        bound = (shape.weight_elements * item + kv_bytes * context) / rates["read_bytes"]
        is_target = name == "3B" and mode == BEST
        row(
            f"decode step, {rows} rows, {mode}", 1e3 * seconds, "ms",
            beside=f"bound {1e3 * bound:.3g} ms (weights + KV), {seconds / bound:.2f} x",
            target="decode" if is_target else "", ratio=seconds / bound,
        )  # fmt: skip
        if mode.sharing:
            busy = _difference(call, busy_seconds) / steps
            gap = 1 - busy / seconds if busy > 0 else None
            beside = f"device busy {1e3 * busy:.3g} ms" if busy > 0 else "the profiler saw no kernel"
            if engine.stats.num_graph_replays:
                beside += "" if gap is None else f"; with the gaps between a graph's kernels {gap:.1%}"
                gap = _difference(call, lambda run: run().device_idle_seconds) / steps / seconds
            gap = None if gap is None else max(0.0, gap)
            row(
                f"host gap of that step, {mode}", gap, beside=beside, target="gap" if is_target else "", ratio=gap
            )  # fmt: skip


def _difference(call: Any, clock: Any) -> float:
    return clock(lambda: call(LONG)) - clock(lambda: call(SHORT))


def measure_prefill(engines: Engines, name: str, rates: dict[str, float]) -> None:
    """Arithmetic per second of long prompts through the engine, one token drawn of each."""
    shape, engine = shape_of(engines.model.config), engines.get(BEST, max_batch_tokens=8192)
    prompts = [[4 + (7 * i + j) % 4000 for j in range(PREFILL_PROMPT)] for i in range(NUM_PREFILL)]
    tokens = NUM_PREFILL * PREFILL_PROMPT

    def call() -> None:
        generate(engine, BEST, prompts, [[1]] * NUM_PREFILL)

    call()
    seconds = min(wall_seconds(call) for _ in range(1 if REHEARSAL else 3))
    flops = shape.layer_flops_per_token() * tokens + shape.head_flops_per_row() * NUM_PREFILL
    flops += shape.attention_flops(NUM_PREFILL * PREFILL_PROMPT * (PREFILL_PROMPT + 1) / 2)
    share = flops / seconds / rates["matrix_flops"]
    row(
        f"prefill, {NUM_PREFILL} x {PREFILL_PROMPT} tokens", flops / seconds / 1e12, "TFLOP/s",
        ceiling=rates["matrix_flops"] / 1e12, beside=f"{tokens / seconds:,.0f} tokens/s",
        target="prefill" if name == "3B" else "", ratio=share,
    )  # fmt: skip


def measure_workload(
    engines: Engines, label: str, workload: Workload, outcome: Any, modes: Sequence[Mode] = MODES
) -> dict[Mode, float]:
    """Useful tokens per second of every mode. What can be captured or compiled is, in a call before: all of the same
    lengths where graphs of all row counts will be needed, else a short one."""
    lengths, rates = workload.lengths(), {}
    output = sum(map(sum, lengths))
    for mode in modes:
        with outcome.section(f"rollout {label}, {mode}"):
            rows = min(MOST_ROWS, sum(map(len, lengths)))
            engine = engines.get(mode, max_batch_tokens=max(2048, 4 * rows), max_num_seqs=rows)
            longest = workload.max_length if mode == BEST else 12
            generate(engine, mode, workload.prompts(0), [[min(n, longest) for n in group] for group in lengths])
            stats: list[Any] = []
            seconds = wall_seconds(
                lambda mode=mode, engine=engine, stats=stats: stats.append(
                    generate(engine, mode, workload.prompts(1), lengths)
                )
            )
            rates[mode] = output / seconds
            done = stats[0]
            row(
                f"rollout {label}, {mode}", output / seconds, "tokens/s",
                beside=f"{seconds:.2f} s, {done.num_steps} steps, {done.capacity_rows} rows, "
                f"rows idle {done.idle_fraction:.0%}, device idle {done.device_idle_seconds / done.total_seconds:.1%}, "
                f"{done.num_graph_captures} captures, {done.num_graph_replays} replays",
            )  # fmt: skip
    return rates


def measure_peer(peer: Peer, label: str, workload: Workload, ours: dict[Mode, float]) -> None:
    """transformers.generate on the same prompts and lengths, all in one batch; halves where memory ends."""
    lengths = workload.lengths()
    output = sum(map(sum, lengths))
    peer.generate(workload.prompts(0), [[min(n, 4) for n in group] for group in lengths], batch=64)
    batch, done = sum(map(len, lengths)), None
    while done is None:
        try:
            seconds = wall_seconds(lambda batch=batch: peer.generate(workload.prompts(1), lengths, batch))
            done = output / seconds
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
            free_memory()
            batch //= 2
    best = max(ours.values(), default=0.0)
    row(
        f"transformers.generate {label}", done, "tokens/s",
        beside=f"{seconds:.2f} s in batches of {batch}; ours {best / done:.1f} x",
        target="generate", ratio=best / done if best else None,
    )  # fmt: skip


def main(name: str) -> None:
    with part() as outcome:
        config = config_of(name)
        model = random_model(config)
        model.requires_grad_(False)
        parameters = sum(p.numel() for p in model.parameters())
        row("model", f"{parameters / 1e9:.2f} B", beside=f"{DTYPE} on {DEVICE}")
        rates, engines = ceilings(), Engines(model)
        ours: dict[str, dict[Mode, float]] = {}
        labels = list(WORKLOADS)
        ours[labels[0]] = measure_workload(engines, labels[0], WORKLOADS[labels[0]], outcome)
        with outcome.section("decode step"):
            measure_decode(engines, name, rates)
        with outcome.section("prefill"):
            measure_prefill(engines, name, rates)
        engines.release()
        peer = None
        with outcome.section("transformers"):
            peer = Peer(model)
        for label in labels:
            if label not in ours:
                ours[label] = measure_workload(engines, label, WORKLOADS[label], outcome, MODES[:1])
                engines.release()
            if peer is not None:
                with outcome.section(f"transformers.generate {label}"):
                    measure_peer(peer, label, WORKLOADS[label], ours[label])
                free_memory()
        # What is compared stands by now; if the time ends here, it is these that are missing.
        for label in labels[1:]:
            measure_workload(engines, label, WORKLOADS[label], outcome, MODES[1:])
        engines.release()
        if DEVICE.type == "cuda":
            row("most memory held", torch.cuda.max_memory_allocated() / 2**30, "GiB")


if __name__ == "__main__":
    main(sys.argv[1])
