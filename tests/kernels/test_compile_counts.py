"""Run-time lengths are not compiled in: what launchers would compile stays the same whatever the lengths; and what is
compiled ahead is what a launch looks for on disk.

Launches are written down on the meta device, with Triton's rules of specialisation (an integer that is 1, or a multiple
of 16), in a process of its own, since this one may run the interpreter.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from sagc_fast.kernels.compile_ahead import recording
from sagc_fast.ops import triton_ops, triton_varlen
from sagc_fast.ops.decode_rows import DecodeRows
from sagc_fast.ops.layouts import PackedLayout, PagedLayout

HEADS, KV, D, E, V = 6, 2, 64, 384, 4096


def empty(*size, dtype=torch.bfloat16, grad=False):
    return torch.empty(size, dtype=dtype, device="meta", requires_grad=grad)


def training(prompt, completions):
    spans, place = [], prompt
    for n in completions:
        spans.append((place, n))
        place += n
    T = place
    layout = PackedLayout(empty(T, dtype=torch.int64), ((0, prompt),), (tuple(spans),))
    x = empty(T, E, grad=True)
    normed, total = triton_ops.add_rms_norm(triton_ops.rms_norm(x, empty(E), 1e-6), x, empty(E), 1e-6)
    qkv = empty(T, (HEADS + 2 * KV) * D, grad=True)
    q, k, v = triton_ops.rotary_split(qkv, *empty(2, T, D // 2, dtype=torch.float32), HEADS, KV)
    out = triton_varlen.varlen_attention(q, k, v, layout, 0.1)
    gated = triton_ops.silu_mul(empty(T, 2 * 512, grad=True))
    logp, entropy = triton_ops.token_logprobs(total, empty(V, E, grad=True), empty(T, dtype=torch.int64), 0.9)
    (out.sum() + gated.sum() + normed.sum() + logp.sum() + entropy.sum()).backward()


def rollout(contexts, queries):
    S, T = len(contexts), sum(queries)
    int32 = {"dtype": torch.int32}
    columns = -(-max(contexts) // 16)
    long = empty(T, dtype=torch.int64)
    layout = PagedLayout(long, empty(S + 1, **int32), empty(S, **int32), empty(S, columns, **int32), long,
        long, empty(S, **int32), empty(S, **int32), max(queries), max(contexts))
    caches = empty(64, KV, 16, D), empty(64, KV, 16, D)
    q, k, v = empty(T, HEADS + 2 * KV, D).split((HEADS, KV, KV), 1)
    tables = empty(2, 5000, D // 2, dtype=torch.float32)
    if max(queries) == 1:
        triton_ops.rope_and_attend(q, k, v, *tables, *caches, layout, 0.1)
    else:
        q = triton_ops.rope_and_cache(q, k, v, *tables, long, *caches, long)
        triton_ops.paged_attention(q, *caches, layout, 0.1)
    keys = tuple(empty(S, dtype=torch.int64) for _ in range(4))
    logits, temperature = empty(S, V), empty(S, dtype=torch.float32)
    triton_ops.sample_keyed_tokens(logits, keys, temperature)
    triton_ops.sample_keyed_tokens(logits, keys, temperature, keys[0], temperature, temperature)
    state = {name: empty(S, dtype=torch.int64) for name in DecodeRows.__dataclass_fields__}
    state |= {name: empty(S, **int32) for name in ("is_live_R", "is_kept_R", "shared_blocks_R", "context_R")}
    state |= {"block_tables_RB": layout.block_tables_SB, "end_ids_SI": empty(4, S, dtype=torch.int64)}
    state |= {"drawn_KR": empty(S + 1, S, dtype=torch.int64), "logprobs_KR": empty(S + 1, S, dtype=torch.float32)}
    triton_ops.place_rows(DecodeRows(**state), 16, 3 * S)
    triton_ops.advance_rows(DecodeRows(**state), keys[0], temperature)


STEPS = {
    training: [(5, (3, 9)), (1, (1,)), (16, (16, 32)), (33, (1, 700, 40)), (4096, (17,)), (2, (0, 15))],
    rollout: [((20, 37), (1, 1)), ((1,), (1,)), ((16, 16, 16), (1, 1, 1)), ((2048,) * 48, (1,) * 48),
              ((4001,) * 5, (1,) * 4 + (16,)), ((600, 31), (33, 1)), ((77,) * 129, (1,) * 129)],
}
for step, cases in STEPS.items():
    seen = {}
    for case in cases:
        with recording() as found:
            step(*case)
        kinds = [(launch.name, *(name for name, value in launch.constants if value is True)) for launch in found]
        first = set(kinds) - set(seen)  # a switch has two kinds of a kernel, whatever the lengths
        for kind, launch in zip(kinds, found):
            known = seen.setdefault(kind, set())
            if kind not in first and launch not in known:
                print(step.__name__, case, launch.title, "aligned:", *launch.aligned)
            known.add(launch)
    print(step.__name__, "launched", *sorted({name for name, *_ in seen}))
"""


def test_compilations_do_not_grow_with_lengths() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["training", "launched"], ["rollout", "launched"]], done.stdout
    launched = set(" ".join(lines).split())
    assert launched >= {
        "varlen_forward",
        "varlen_backward_kv",
        "rotary",
        "token_logprobs_backward",
        "rms_norm_backward",
    }
    assert launched >= {"paged_decode", "group_decode", "merge_splits", "paged_prefill", "sample_pick", "rope_cache"}
    assert launched >= {"sample_filtered", "place_rows", "advance_rows"}


KEYS = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction, create_function_from_signature
from sagc_fast.kernels import compile_ahead
from sagc_fast.kernels.launch_all import Shape, launch_all

backend, looked_for, compiled = make_backend(GPUTarget("cuda", 90, 32)), set(), set()


def run(self, *args, grid, warmup, **kwargs):
    binder = create_function_from_signature(self.signature, self.params, backend)
    kwargs["debug"] = False
    bound, specialization, options = binder(*args, **kwargs)
    options, signature, constants, attributes = self._pack_args(backend, kwargs, bound, specialization, options)
    looked_for.add((self.fn.__name__, ASTSource(self, signature, constants, attributes).hash(), options.hash()))


def run_tuned(self, *args, **kwargs):
    for config in self.configs:
        self.fn.run(*args, **kwargs, **config.all_kwargs())


plain = JITFunction.run, Autotuner.run
JITFunction.run, Autotuner.run = run, run_tuned
shape = Shape(6, 2, 64, 384, 512, 4096)
launch_all(shape, torch.bfloat16, "cpu")
JITFunction.run, Autotuner.run = plain
compile_ahead.triton.compile = lambda source, target, options: compiled.add(
    (source.fn.fn.__name__, source.hash(), backend.parse_options(options).hash()))
with compile_ahead.recording() as launches:
    launch_all(shape, torch.bfloat16, "meta")
for launch in launches:
    compile_ahead.compile_launch(launch, 90)
print(len(looked_for), *sorted(name for name, *_ in looked_for ^ compiled))
"""


def test_what_is_compiled_ahead_is_what_a_launch_looks_for_on_disk() -> None:
    """By Triton's own rules, on tensors of the CPU; else a warm cache would compile everything twice. Triton 3.9 writes
    down arguments without a known divisor too, and does compile twice."""
    if not importlib.metadata.version("triton").startswith("3.6."):
        pytest.skip("the keys are those of Triton 3.6")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", KEYS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    count, *different = done.stdout.split()
    assert int(count) >= 35
    assert not different
