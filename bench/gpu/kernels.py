"""Every Triton kernel at the shapes of the two models: bytes or operations per second, beside the ceilings.

Operations are called as the engine and the trainer call them (``sagc_fast.ops``), so a figure includes what their
launchers do on the device. Beside them: the CUDA C++ twins where they are built, and flash-attn, or torch's copy of its
kernels where that is not installed. Times are the device's own, with a cold second-level cache.

A rehearsal runs the kernels in Triton's interpreter, where Triton is installed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gpu.device import CONFIGS, DEVICE, DTYPE, REHEARSAL, ceilings, config_of, free_memory, kernel_seconds, shape_of
from gpu.report import part, row
from sagc_fast import ops
from sagc_fast.algo.config import DAPO
from sagc_fast.algo.loss import linear_policy_loss
from sagc_fast.ops.backend import cuda_module, flash_module, triton_module
from sagc_fast.ops.decode_rows import DecodeRows
from sagc_fast.ops.layouts import PackedLayout, PagedLayout

ROWS, TOKENS, PAGE = (8, 24, 16) if REHEARSAL else (128, 8192, 16)
GROUPS, GROUP_SIZE = (2, 4) if REHEARSAL else (8, 16)
PROMPT, OWN = (40, 9) if REHEARSAL else (512, 128)
CHUNK = 32 if REHEARSAL else 2048
TARGETS = 16 if REHEARSAL else 4096
SEQUENCES = 2 if REHEARSAL else 16
"""Of the plain causal batch, PROMPT + OWN tokens each."""


class Bench:
    """The measurements of one model's shape."""

    def __init__(self, name: str, outcome: Any) -> None:
        self.name, self.outcome = name, outcome
        self.config = config_of(name)
        self.shape = shape_of(self.config)
        self.rates = ceilings()
        self.generator = torch.Generator(DEVICE).manual_seed(0)

    def random(self, *size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.randn(size, generator=self.generator, device=DEVICE, dtype=torch.float32).to(dtype)

    def measure(
        self,
        what: str,
        call: Callable[[], Any],
        *,
        num_bytes: float = 0.0,
        flops: float = 0.0,
        backend: str | None = None,
        beside: str = "",
    ) -> float | None:
        """A row with the rate that binds; the seconds, or None when it failed."""
        label = f"{what}, {self.name}" + (f" [{backend}]" if backend else "")
        seconds = None
        with self.outcome.section(label):
            if backend is not None:
                with ops.use_backend(backend):
                    seconds = kernel_seconds(call)
            else:
                seconds = kernel_seconds(call)
            rate, ceiling, unit = (
                (flops / 1e12, self.rates["matrix_flops"] / 1e12, "TFLOP/s")
                if flops
                else (num_bytes / 1e9, self.rates["read_bytes"] / 1e9, "GB/s")
            )
            note = f"{1e6 * seconds:,.0f} us" + (f"; {beside}" if beside else "")
            row(label, rate / seconds, unit, ceiling=ceiling, beside=note)
        return seconds

    # ---- rollout -------------------------------------------------------------------------------------------------

    def paged(self) -> None:
        """A decode step's attention with and without sharing, a prefill chunk, rotary embedding with the KV write."""
        c, item = self.config, DTYPE.itemsize
        scale = c.head_dim**-0.5
        context = PROMPT + OWN
        for shared in (True, False):
            layout, num_blocks = decode_layout(shared)
            caches = [self.random(num_blocks, c.num_kv_heads, PAGE, c.head_dim) for _ in "kv"]
            own = self.random(GROUPS * GROUP_SIZE, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
            own = own.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), 1)
            tables = [self.random(context, c.head_dim // 2, dtype=torch.float32) for _ in "cs"]
            tokens = (GROUPS if shared else GROUPS * GROUP_SIZE) * PROMPT + GROUPS * GROUP_SIZE * OWN
            self.measure(
                f"decode attention {'shared' if shared else 'unshared'}",
                lambda own=own, tables=tables, caches=caches, layout=layout: ops.rope_and_attend(
                    *own, *tables, *caches, layout, scale
                ),
                num_bytes=2.0 * tokens * c.num_kv_heads * c.head_dim * item,
                beside=f"{GROUPS} x {GROUP_SIZE} rows, context {PROMPT} + {OWN}, rope and KV write included",
            )
        layout = chunk_layout(context + CHUNK)
        caches = [self.random(layout.block_tables_SB.numel(), c.num_kv_heads, PAGE, c.head_dim) for _ in "kv"]
        q = self.random(CHUNK, c.num_heads, c.head_dim)
        pairs = CHUNK * context + CHUNK * (CHUNK + 1) / 2
        self.measure(
            "paged prefill", lambda: ops.paged_attention(q, *caches, layout, scale),
            flops=4.0 * pairs * c.num_heads * c.head_dim, beside=f"{CHUNK} tokens behind {context}",
        )  # fmt: skip
        qkv = self.random(CHUNK, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), 1)
        tables = [self.random(context + CHUNK, c.head_dim // 2, dtype=torch.float32) for _ in "cs"]
        self.measure(
            "rope + KV write",
            lambda: ops.rope_and_cache(q, k, v, *tables, layout.positions_T, *caches, layout.slots_T),
            num_bytes=2.0 * qkv.nbytes,
        )

    def sampling(self) -> None:
        """One token per row from the product's logits, with and without filters; the CUDA twin beside it."""
        logits = self.random(ROWS, self.config.vocab_size)
        keys = tuple(torch.arange(ROWS, device=DEVICE) for _ in range(4))
        hot = torch.ones(ROWS, device=DEVICE)
        self.twins("keyed sampling", lambda: ops.sample_keyed_tokens(logits, keys, hot), logits.nbytes)
        top_k, top_p = torch.full((ROWS,), 50, device=DEVICE), torch.full((ROWS,), 0.9, device=DEVICE)
        self.measure(
            "keyed sampling, top-k + top-p",
            lambda: ops.sample_keyed_tokens(logits, keys, hot, top_k, top_p, torch.zeros_like(hot)),
            num_bytes=logits.nbytes,
        )

    def decode_rows(self) -> None:
        """Where the rows of a burst stand, before a step and after its draw; the CUDA twins beside them."""
        state = row_state()
        tokens, logprobs = torch.zeros(ROWS, dtype=torch.int64, device=DEVICE), torch.zeros(ROWS, device=DEVICE)

        def step() -> None:
            ops.place_rows(state, PAGE, 0)
            ops.advance_rows(state, tokens, logprobs)

        num_bytes = sum(8 * ROWS for name in DecodeRows.__dataclass_fields__ if name.endswith("_R"))
        self.twins("place + advance rows", step, num_bytes, beside=f"{ROWS} rows")

    def twins(self, what: str, call: Callable[[], Any], num_bytes: float, beside: str = "") -> None:
        """In Triton and in CUDA C++, where that is there; the ratio decides who serves (backend.MEASURED_FASTER)."""
        triton, *others = (
            self.measure(what, call, num_bytes=num_bytes, backend=backend, beside=beside)
            for backend in (None, *twins())
        )
        if triton and others and others[0]:
            ratio = triton / others[0]
            verdict = "CUDA C++ is faster: name it in MEASURED_FASTER" if ratio > 1.05 else "Triton stays"
            row(f"CUDA C++ against Triton, {what}, {self.name}", ratio, "x", beside=verdict)

    def rows(self) -> None:
        """Norms and the gate, forward and backward."""
        c = self.config
        x, residual, grad = (self.random(TOKENS, c.hidden_size) for _ in "xrg")
        weight = torch.ones(c.hidden_size, device=DEVICE, dtype=DTYPE)
        eps = c.rms_norm_eps
        self.measure("rms_norm", lambda: ops.rms_norm(x, weight, eps), num_bytes=2.0 * x.nbytes)
        self.measure("add + rms_norm", lambda: ops.add_rms_norm(x, residual, weight, eps), num_bytes=4.0 * x.nbytes)
        self.backward("rms_norm backward", lambda y: ops.rms_norm(y, weight, eps), x, grad, 3.0 * x.nbytes)
        gate_up, grad = self.random(TOKENS, 2 * c.intermediate_size), self.random(TOKENS, c.intermediate_size)
        self.measure("silu_mul", lambda: ops.silu_mul(gate_up), num_bytes=1.5 * gate_up.nbytes)
        self.backward("silu_mul backward", ops.silu_mul, gate_up, grad, 2.5 * gate_up.nbytes)

    def backward(self, what: str, operation: Callable, x: torch.Tensor, grad: torch.Tensor, num_bytes: float) -> None:
        x = x.detach().requires_grad_()
        out = operation(x)
        self.measure(what, lambda: torch.autograd.grad(out, x, grad, retain_graph=True), num_bytes=num_bytes)

    # ---- training ------------------------------------------------------------------------------------------------

    def attention(self) -> None:
        """Packed attention, forward and backward, of plain causal sequences (where every peer does the same work) and
        of groups with a shared prompt (where flash-attn copies the prompt's keys)."""
        c = self.config
        length = PROMPT + OWN
        plain = [(length, ())] * SEQUENCES
        groups = [(PROMPT, (OWN,) * GROUP_SIZE)] * (1 if REHEARSAL else 4)
        for what, sizes in (("causal sequences", plain), ("groups", groups)):
            layout = packed_layout(sizes)
            pairs = sum(p * (p + 1) / 2 + sum(n * p + n * (n + 1) / 2 for n in ns) for p, ns in sizes)
            flops = 4.0 * pairs * c.num_heads * c.head_dim
            ours = self._attention(f"attention, {what}", lambda q, k, v, la=layout: _varlen(q, k, v, la), layout, flops)
            peer, name = flash_peer()
            theirs = None
            if peer is not None:
                theirs = self._attention(
                    f"{name}, {what}", lambda q, k, v, la=layout, peer=peer: _flash(peer, q, k, v, la), layout, flops
                )
            if theirs is None and what == "causal sequences":
                name = "torch's flash SDPA"
                theirs = self._attention(f"{name}, {what}", lambda q, k, v: _sdpa(q, k, v, SEQUENCES), layout, flops)
            if ours and theirs:
                row(
                    f"speed against {name}, {what}, {self.name}", theirs / ours, "x",
                    beside="forward and backward" + self._difference(peer, layout), target="attention",
                    ratio=theirs / ours,
                )  # fmt: skip

    def _difference(self, peer: ModuleType | None, layout: PackedLayout) -> str:
        """How far the outputs are from those of flash-attn, in words."""
        if peer is None:
            return ""
        c, tokens = self.config, len(layout.positions_T)
        q = self.random(tokens, c.num_heads, c.head_dim)
        k, v = (self.random(tokens, c.num_kv_heads, c.head_dim) for _ in "kv")
        with torch.no_grad():
            apart = (_varlen(q, k, v, layout).float() - _flash(peer, q, k, v, layout).float()).abs().max()
        return f"; outputs at most {float(apart):.2g} apart"

    def _attention(self, what: str, call: Callable, layout: PackedLayout, flops: float) -> float | None:
        """Forward, then forward and backward together; the seconds of the latter."""
        c, tokens = self.config, len(layout.positions_T)
        q = self.random(tokens, c.num_heads, c.head_dim).requires_grad_()
        k, v = (self.random(tokens, c.num_kv_heads, c.head_dim).requires_grad_() for _ in "kv")
        grad = self.random(tokens, c.num_heads, c.head_dim)

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return call(q, k, v)

        self.measure(f"{what}, forward", forward, flops=flops)
        # The backward pass has five products of the forward's two.
        return self.measure(
            f"{what}, both", lambda: torch.autograd.grad(call(q, k, v), (q, k, v), grad), flops=3.5 * flops
        )

    def head(self) -> None:
        """Log-probs and the loss from hidden states and head: dense products, and one sweep over the logits."""
        c = self.config
        hidden = self.random(TARGETS, c.hidden_size).requires_grad_()
        head = (self.random(c.vocab_size, c.hidden_size) * c.hidden_size**-0.5).detach().requires_grad_()
        targets = torch.randint(c.vocab_size, (TARGETS,), device=DEVICE)
        product = 2.0 * TARGETS * c.vocab_size * c.hidden_size

        def logprobs() -> Any:
            with torch.no_grad():
                return ops.token_logprobs(hidden, head, targets)

        self.measure("token log-probs, forward", logprobs, flops=product, beside=f"{TARGETS} tokens")
        self.measure(
            "token log-probs, both",
            lambda: torch.autograd.grad(ops.token_logprobs(hidden, head, targets)[0].sum(), (hidden, head)),
            flops=4 * product, beside="4 products: logits twice, two gradients",
        )  # fmt: skip
        old = torch.full((TARGETS,), -10.0, device=DEVICE)
        index = torch.arange(TARGETS, device=DEVICE) % 8
        advantages = torch.linspace(-1, 1, 8, device=DEVICE)

        def loss() -> Any:
            output, _ = linear_policy_loss(
                hidden, head, targets, old, advantages, index, temperature=1.0, config=DAPO, normalizer=float(TARGETS)
            )
            return torch.autograd.grad(output.loss, (hidden, head))

        self.measure("fused loss, both", loss, flops=3 * product, beside="3 products")


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    module, scale = triton_module(), q.shape[-1] ** -0.5
    return (ops if module is None else module).varlen_attention(q, k, v, layout, scale)


def _flash(peer: ModuleType, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    return peer.varlen_attention(q, k, v, layout, q.shape[-1] ** -0.5)


@functools.cache
def flash_peer() -> tuple[ModuleType | None, str]:
    """(sagc_fast.ops.flash, name) over the flash-attn package, or over torch's own copy of its kernels where that is
    not installed; None where neither is to be had. Which backend the operations use stays as it is."""
    if flash_module() is not None:
        return flash_module(), "flash-attn"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, ""
    if REHEARSAL:  # it has no CPU kernels
        return None, ""

    def flash_attn_varlen_func(
        q, k, v, cu_query, cu_key, max_query, max_key, *, dropout_p: float, softmax_scale: float, causal: bool
    ) -> torch.Tensor:  # fmt: skip
        window = (-1, 0) if causal else (-1, -1)
        return varlen_attn(q, k, v, cu_query, cu_key, max_query, max_key, scale=softmax_scale, window_size=window)

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func
    sys.modules["flash_attn"] = package
    try:
        from sagc_fast.ops import flash
    finally:
        del sys.modules["flash_attn"]
    return flash, "torch's flash-attn"


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: int) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.view(sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH if REHEARSAL else SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def twins() -> list[str]:
    """The backend of the CUDA C++ operators, where it is there."""
    return ["cuda"] if not REHEARSAL and cuda_module() is not None else []


def row_state() -> DecodeRows:
    """Live rows that never end."""
    state = {name: torch.zeros(ROWS, dtype=torch.int64) for name in DecodeRows.__dataclass_fields__}
    state |= {name: state[name].int() for name in ("is_live_R", "is_kept_R", "shared_blocks_R", "context_R")}
    state["is_live_R"] += 1
    state["is_kept_R"] += 1
    state["max_output_R"] += 1 << 40
    state["block_tables_RB"] = torch.zeros(ROWS, 512, dtype=torch.int32)
    state["end_ids_SI"] = torch.full((4, 8), -1)
    state["drawn_KR"], state["logprobs_KR"] = torch.zeros(64, ROWS, dtype=torch.int64), torch.zeros(64, ROWS)
    return DecodeRows(**{name: tensor.to(DEVICE) for name, tensor in state.items()})


def decode_layout(shared: bool) -> tuple[PagedLayout, int]:
    """GROUPS x GROUP_SIZE decode rows with PROMPT + OWN tokens each, and the number of blocks."""
    rows, prompt_blocks, own_blocks = GROUPS * GROUP_SIZE, PROMPT // PAGE, -(-(PROMPT % PAGE + OWN) // PAGE)
    num_prompts = GROUPS if shared else rows
    prompts = torch.arange(num_prompts * prompt_blocks).view(num_prompts, -1)
    prompts = prompts.repeat_interleave(rows // num_prompts, 0)
    own = num_prompts * prompt_blocks + torch.arange(rows * own_blocks).view(rows, -1)
    tables = torch.cat((prompts, own), 1).int()
    groups = torch.arange(rows) // GROUP_SIZE if shared else torch.full((rows,), -1)
    context = PROMPT + OWN
    layout = PagedLayout(
        positions_T=torch.full((rows,), context - 1).to(DEVICE),
        cu_query_S1=torch.arange(rows + 1).int().to(DEVICE),
        context_lens_S=torch.full((rows,), context).int().to(DEVICE),
        block_tables_SB=tables.to(DEVICE),
        slots_T=(tables[:, (context - 1) // PAGE].long() * PAGE + (context - 1) % PAGE).to(DEVICE),
        logits_rows_R=torch.arange(rows).to(DEVICE),
        share_group_S=groups.int().to(DEVICE),
        shared_blocks_S=torch.full((rows,), prompt_blocks if shared else 0).int().to(DEVICE),
        max_query_len=1,
        max_context_len=context,
    )
    return layout, int(tables.max()) + 1


def chunk_layout(context: int) -> PagedLayout:
    """One prefill chunk of CHUNK tokens at the end of its context."""
    blocks = torch.randperm(-(-context // PAGE), generator=torch.Generator().manual_seed(0)).int()
    positions = torch.arange(context - CHUNK, context)
    one = torch.zeros(1, dtype=torch.int32)
    return PagedLayout(
        positions_T=positions.to(DEVICE),
        cu_query_S1=torch.tensor([0, CHUNK]).int().to(DEVICE),
        context_lens_S=torch.tensor([context]).int().to(DEVICE),
        block_tables_SB=blocks.unsqueeze(0).to(DEVICE),
        slots_T=(blocks[positions // PAGE].long() * PAGE + positions % PAGE).to(DEVICE),
        logits_rows_R=torch.tensor([CHUNK - 1]).to(DEVICE),
        share_group_S=(one - 1).to(DEVICE),
        shared_blocks_S=one.to(DEVICE),
        max_query_len=CHUNK,
        max_context_len=context,
    )


def packed_layout(sizes: list[tuple[int, tuple[int, ...]]]) -> PackedLayout:
    """(prompt, completions) lengths laid out one after another."""
    prompts, completions, positions, place = [], [], [], 0
    for prompt, lengths in sizes:
        prompts.append((place, prompt))
        positions.append(torch.arange(prompt))
        place += prompt
        spans = []
        for length in lengths:
            spans.append((place, length))
            positions.append(torch.arange(prompt, prompt + length))
            place += length
        completions.append(tuple(spans))
    return PackedLayout(torch.cat(positions).to(DEVICE), tuple(prompts), tuple(completions))


def interpret() -> None:
    """Choose Triton's interpreter, which has to be done before Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/kernels"))
    from interpreter import repair

    repair()
    ops.set_backend("triton")


def main() -> None:
    with part() as outcome:
        if REHEARSAL and importlib.util.find_spec("triton") is not None:
            interpret()
        is_triton = triton_module() is not None
        row("backends", ("interpreted triton" if REHEARSAL else "triton") if is_triton else "torch",
            beside=f"flash-attn {'installed' if flash_module() is not None else 'not installed'}")  # fmt: skip
        for name in list(reversed(CONFIGS))[: 1 if REHEARSAL else None]:  # whose shapes are all tiny there
            bench = Bench(name, outcome)
            for section in (bench.paged, bench.sampling, bench.decode_rows, bench.attention, bench.head, bench.rows):
                with outcome.section(f"{section.__name__}, {name}"):
                    section()
                free_memory()


if __name__ == "__main__":
    main()
