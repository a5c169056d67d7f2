"""Compile the kernels ahead of time, without a GPU, exactly as their launchers would launch them; look at the result.

    python -m sagc_fast.kernels.aot                     the table: every kernel and configuration, sm_80 and sm_90
    python -m sagc_fast.kernels.aot --only decode --arch 90
    python -m sagc_fast.kernels.aot --update tests/kernels/resources.json        compile what the file does not know yet
    python -m sagc_fast.kernels.aot --check tests/kernels/resources.json         is the file that of these kernels?

A launcher is called with tensors of the meta device, and what it would launch is written down: kernel, argument
types, divisibility, constants, every tuned configuration. So the table cannot drift from the code. Spills show as a
stack frame or as local loads and stores in the machine code; ``cuobjdump`` comes in Triton's wheel.

Compiling everything takes minutes, so the whole table is kept in a file: each line carries a hash of all that its
machine code depends on, so a line that no longer belongs to the kernels is found without compiling.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
ARCHITECTURES = (80, 90)
HEADER = f"{'arch':<6}{'registers':>10}{'shared':>9}{'occup.':>8}{'tensor':>8}{'spills':>8}  kernel"
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor offers (CUDA programming guide, table of compute capabilities)."""

    registers: int = 65_536
    threads: int = 2048
    blocks: int = 32
    shared_bytes: int = 0
    """For all resident blocks."""
    block_shared_bytes: int = 0
    """For one block, dynamic."""


LIMITS = {
    80: Limits(shared_bytes=164 * 1024, block_shared_bytes=163 * 1024),
    90: Limits(shared_bytes=228 * 1024, block_shared_bytes=227 * 1024),
}


@dataclass(frozen=True)
class Launch:
    """A kernel with everything that its compilation depends on."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    """Arguments known to be multiples of 16 (pointers: 16-byte aligned)."""
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__.removesuffix("_kernel")

    @property
    def title(self) -> str:
        """The kernel, its dtypes and the constants that set its shape."""
        dtypes = {t for _, t in self.signature if t in ("*fp32", "*bf16", "*fp16")}
        precision = next((t[1:] for t in ("*bf16", "*fp16", "*fp32") if t in dtypes), "")
        shape = " ".join(f"{n}={v}" for n, v in self.constants if n.isupper() and not isinstance(v, bool))
        switches = " ".join(n for n, v in self.constants if v is True)
        options = " ".join(f"{n.removeprefix('num_')}={v}" for n, v in self.options if n != "num_ctas")
        return " ".join(filter(None, (self.name, precision, shape, switches, options)))

    @property
    def key(self) -> str:
        """Changes with the kernel's source, what it calls, and everything else here; not with comments around it."""
        parts = (*_sources(self.kernel), self.signature, self.constants, self.aligned, self.options)
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def _sources(kernel: JITFunction) -> list[str]:
    """The source of a kernel, of the functions it calls, and the values of the globals it reads."""
    found: dict[str, str] = {}

    def visit(function: JITFunction) -> None:
        found[function.fn.__name__] = function.src
        for node in ast.walk(ast.parse(function.src)):
            value = function.fn.__globals__.get(node.id) if isinstance(node, ast.Name) else None
            if isinstance(value, JITFunction) and value.fn.__name__ not in found:
                visit(value)
            elif isinstance(value, int | float | str):
                found[node.id] = repr(value)

    visit(kernel)
    return [text for _, text in sorted(found.items())]


@dataclass(frozen=True)
class Usage:
    """Resources of one compiled kernel."""

    registers: int
    """Per thread."""
    shared_bytes: int
    """Per block."""
    stack_bytes: int
    num_local: int
    """Local loads and stores in the machine code."""
    num_tensor_core: int
    """Tensor-core instructions in the machine code."""
    occupancy: float
    """Share of a multiprocessor's threads that can be resident, from registers, shared memory and block size."""

    @property
    def has_spills(self) -> bool:
        return self.stack_bytes > 0 or self.num_local > 0

    def fits(self, architecture: int) -> bool:
        """No spills, and a block's shared memory within the limit."""
        return not self.has_spills and self.shared_bytes <= LIMITS[architecture].block_shared_bytes

    def line(self, architecture: int, title: str) -> str:
        """A row of the table under HEADER."""
        return (
            f"sm_{architecture:<3}{self.registers:>10}{self.shared_bytes:>9}{self.occupancy:>8.2f}"
            f"{self.num_tensor_core:>8}{'-' if self.fits(architecture) else 'SPILLS':>8}  {title}"
        )


@contextmanager
def recording(first: bool = False) -> Iterator[list[Launch]]:
    """Write launches down instead of running them, in every configuration of a tuned kernel or only the first."""
    launches: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = _launch_of(self, args, kwargs)
        if launch not in launches:
            launches.append(launch)

    def run_tuned(self: Autotuner, *args: Any, **kwargs: Any) -> None:
        for config in self.configs[:1] if first else self.configs:
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    plain, plain_tuned = JITFunction.run, Autotuner.run
    JITFunction.run, Autotuner.run = run, run_tuned
    try:
        yield launches
    finally:
        JITFunction.run, Autotuner.run = plain, plain_tuned


def _launch_of(kernel: JITFunction, args: tuple, kwargs: dict[str, Any]) -> Launch:
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    general = {p.name for p in kernel.params if p.do_not_specialize}
    signature, constants, aligned = [], [], []
    for name in kernel.arg_names:
        value = values[name]
        if name in fixed or value is None or (type(value) is int and value == 1 and name not in general):
            signature.append((name, "constexpr"))
            constants.append((name, value))
            continue
        if isinstance(value, torch.Tensor):
            kind, is_aligned = POINTERS[value.dtype], True
        elif isinstance(value, int):
            kind, is_aligned = "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0 and name not in general
        else:
            kind, is_aligned = "fp32", False
        signature.append((name, kind))
        if is_aligned:
            aligned.append(name)
    options = tuple((name, kwargs[name]) for name in OPTIONS if kwargs.get(name) is not None)
    return Launch(kernel, tuple(signature), tuple(constants), tuple(aligned), options)


def compile_launch(launch: Launch, architecture: int) -> Any:
    """Triton's compiled kernel for ``sm_<architecture>``; needs no GPU."""
    index = {name: i for i, name in enumerate(launch.kernel.arg_names)}
    source = ASTSource(
        fn=launch.kernel,
        signature=dict(launch.signature),
        constexprs={(index[name],): value for name, value in launch.constants},
        attrs={(index[name],): [["tt.divisibility", 16]] for name in launch.aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(launch.options))


def usage_of(compiled: Any, architecture: int) -> Usage:
    """Resources of a compiled kernel, read from its machine code."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        resources = dict(re.findall(r"(REG|STACK):(\d+)", _cuobjdump("-res-usage", cubin)))
        opcodes = re.findall(r"\s/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_]*)", _cuobjdump("-sass", cubin))
    registers, shared = int(resources["REG"]), compiled.metadata.shared
    return Usage(
        registers=registers,
        shared_bytes=shared,
        stack_bytes=int(resources["STACK"]),
        num_local=sum(code in ("LDL", "STL") for code in opcodes),
        num_tensor_core=sum(code in ("HMMA", "HGMMA", "IMMA", "DMMA") for code in opcodes),
        occupancy=occupancy(registers, shared, compiled.metadata.num_warps, LIMITS[architecture]),
    )


def _cuobjdump(option: str, cubin: Path) -> str:
    path = os.pathsep.join((str(TOOLS), os.environ.get("PATH", "")))
    command = [str(TOOLS / "cuobjdump"), option, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}).stdout


def occupancy(registers: int, shared_bytes: int, num_warps: int, limits: Limits) -> float:
    """Resident threads of a multiprocessor over its maximum. Registers are handed out to a warp in steps of 256; every
    block takes 1 KiB of shared memory for itself."""
    registers_per_warp = -(-max(registers, 1) * 32 // 256) * 256
    blocks = min(
        limits.blocks,
        limits.threads // (num_warps * 32),
        limits.registers // (registers_per_warp * num_warps),
        limits.shared_bytes // (shared_bytes + 1024),
    )
    return blocks * num_warps * 32 / limits.threads


@dataclass(frozen=True)
class Shape:
    """What the kernels see of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int


SHAPES = {
    "Llama-3.2-3B": Shape(24, 8, 128, 3072, 8192, 128_256),
    "Qwen2.5-0.5B": Shape(14, 2, 64, 896, 4864, 151_936),
    "Qwen2.5-3B": Shape(16, 2, 128, 2048, 11_008, 151_936),
}


def launch_all(shape: Shape, dtype: torch.dtype, device: torch.device | str, page: int = 16) -> None:
    """Launch every kernel once as a model of this shape does, on small made-up inputs.

    Under :func:`recording`, with the meta device, that yields what to compile; on a GPU it compiles and tunes.
    """
    from sagc_fast.kernels.group_decode import group_decode
    from sagc_fast.kernels.merge_splits import merge_splits
    from sagc_fast.kernels.pack_decode_rows import pack_decode_rows
    from sagc_fast.kernels.paged_decode import paged_decode
    from sagc_fast.kernels.paged_prefill import paged_prefill
    from sagc_fast.kernels.philox import uniforms
    from sagc_fast.kernels.policy_loss import policy_loss
    from sagc_fast.kernels.reduce_kv import reduce_kv
    from sagc_fast.kernels.rms_norm import rms_norm
    from sagc_fast.kernels.rms_norm_backward import rms_norm_backward
    from sagc_fast.kernels.rope_cache import rope_cache
    from sagc_fast.kernels.rotary import rotary_merge, rotary_split
    from sagc_fast.kernels.sample_blocks import sample_blocks
    from sagc_fast.kernels.sample_filtered import sample_filtered
    from sagc_fast.kernels.sample_pick import sample_pick
    from sagc_fast.kernels.silu_mul import silu_mul
    from sagc_fast.kernels.silu_mul_backward import silu_mul_backward
    from sagc_fast.kernels.token_logprobs import token_logprobs
    from sagc_fast.kernels.token_logprobs_backward import token_logprobs_backward
    from sagc_fast.kernels.varlen_backward_kv import varlen_backward_kv
    from sagc_fast.kernels.varlen_backward_q import varlen_backward_q
    from sagc_fast.kernels.varlen_forward import varlen_forward

    heads, kv_heads, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
    num_tokens, num_rows = 256, 8

    def zeros(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=of, device=device)

    def integers(rows: list, of: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(rows, dtype=of, device=device)

    qkv = zeros(num_tokens, heads + 2 * kv_heads, width)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    # A prompt of 128 tokens with a completion of 128; its keys' gradients come in two slots.
    tiles, own = integers([[0, 128, 0, 0], [128, 256, 0, 128]]), integers([0] * 128 + [128] * 128)
    items = integers(
        [[128, 256, 128, 256, 0, 0, -1, 0], [0, 128, 0, 128, 128, 192, 0, 0], [0, 128, 0, 0, 192, 256, 1, 0]]
    )
    q = q.contiguous()
    out, lse = varlen_forward(q, k, v, tiles, own, 0.1)
    _, delta = varlen_backward_q(q, k, v, out, out, lse, tiles, own, 0.1)
    grad_k, grad_v, slots = varlen_backward_kv(q, k, v, out, lse, delta, items, 2, own, 0.1)
    reduce_kv(slots, grad_k, grad_v, integers([[0, 128, 0, 2]]))

    # Two siblings that decode over a shared block, and a prefill chunk.
    caches = [zeros(16, kv_heads, page, width) for _ in "kv"]
    table, places = zeros(num_rows, width // 2, of=torch.float32), zeros(num_rows, of=torch.int64)
    rope_cache(qkv[:num_rows, :heads], k[:num_rows], v[:num_rows], table, table, places, *caches, places)
    cu, context, blocks = integers([0, 1, 2, 34]), integers([20, 20, 32]), integers([[0, 1], [0, 2], [3, 4]])
    shared, runs = integers([page, page, 0]), integers([0, 0, 2])
    paged_prefill(q, *caches, out, cu, context, blocks, 32, 0.1, min_queries=2)
    part, part_lse = zeros(3, heads, 4, width, of=torch.float32), zeros(3, heads, 4, of=torch.float32)
    group_decode(q, *caches, part, part_lse, cu, shared, runs, blocks, 2, 0.1)
    paged_decode(q, *caches, part, part_lse, cu, context, shared, blocks, 2, 2, 0.1)
    merge_splits(part, part_lse, out, cu, shared, 2)

    angles = zeros(num_tokens, width // 2, of=torch.float32)
    rotary_merge(*rotary_split(qkv.flatten(1), angles, angles, heads, kv_heads), angles, angles)

    x, weight = zeros(num_rows, shape.hidden_size), zeros(shape.hidden_size)
    for residual in (None, x):
        normed, total, rstd = rms_norm(x, weight, 1e-6, residual)
        rms_norm_backward(total, weight, rstd, normed, residual)
    gate_up = zeros(num_rows, 2 * shape.intermediate_size)
    silu_mul_backward(gate_up, silu_mul(gate_up))

    row_keys = tuple(zeros(num_rows, of=torch.int64) for _ in range(4))
    ones = zeros(num_rows, of=torch.float32) + 1
    for logits_dtype in {dtype, torch.float32}:
        logits = zeros(num_rows, shape.vocab_size, of=logits_dtype)
        for noise in (uniforms(*row_keys), None):
            sample_pick(logits, ones, sample_blocks(logits, ones), noise, row_keys)
            sample_filtered(logits, ones, row_keys[0], ones, ones - 1, noise, row_keys)
    int32 = [zeros(*size, of=torch.int32) for size in ((8,), (1,), (8, 4), (8,), (8,))]
    table = (*int32[:2], zeros(8, of=torch.bool), zeros(8, of=torch.int64), *int32[2:])
    sizes = [(8,), (1,), (8,), (8,), (8,), (9,), (8, 4), (8,), (8,)]
    packed = [zeros(*size, of=torch.int64 if i in (2, 3) else torch.int32) for i, size in enumerate(sizes)]
    pack_decode_rows(table, tuple(packed), page, 0)

    logits = zeros(num_rows, shape.vocab_size)
    logp, entropy, lse = (zeros(num_rows, of=torch.float32) for _ in "pel")
    token_logprobs(logits, row_keys[0], 1.0, logp, entropy, lse)
    token_logprobs_backward(logits, row_keys[0], 1.0, lse, entropy, logp, logp)
    grpo = {"is_cispo": False, "clip_low": 0.2, "clip_high": 0.2}
    kl = {"kl_beta": 0.01, "kl_estimator": 3, "rollout_is": 1, "is_cap": 2.0}
    policy_loss(logp, logp, ones, row_keys[0], ones, None, entropy, None, None, **grpo)
    policy_loss(logp, logp, ones, row_keys[0], ones, None, entropy, logp, logp, **grpo, **kl)


def launches(shape: Shape, dtype: torch.dtype = torch.bfloat16, first: bool = False) -> list[Launch]:
    """What a model of this shape launches, with every configuration of a tuned kernel or only the first."""
    with recording(first) as found:
        launch_all(shape, dtype, "meta")
    return list(found)


@dataclass(frozen=True)
class Line:
    """One compiled kernel of the table."""

    architecture: int
    key: str
    title: str
    usage: Usage

    def __str__(self) -> str:
        return self.usage.line(self.architecture, self.title)


def wanted_launches(models: Iterable[str] = SHAPES, first: bool = False) -> dict[str, Launch]:
    """By key, each once, of all models."""
    return {launch.key: launch for model in models for launch in launches(SHAPES[model], first=first)}


def read_table(path: Path) -> tuple[str, dict[tuple[int, str], Line]]:
    """(Triton's version, lines by architecture and key) of a file that write_table wrote."""
    content = json.loads(path.read_text())
    lines = [Line(**{**row, "usage": Usage(**row["usage"])}) for row in content["kernels"]]
    return content["triton"], {(line.architecture, line.key): line for line in lines}


def write_table(path: Path, lines: Iterable[Line]) -> None:
    rows = sorted((asdict(line) for line in lines), key=lambda row: (row["title"], row["architecture"]))
    text = ",\n  ".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"triton": "{triton.__version__}", "kernels": [\n  {text}\n]}}\n')


def update_table(path: Path, num_processes: int) -> list[Line]:
    """Compile what the file lacks, drop what no longer belongs to it, write it, return its lines."""
    version, known = read_table(path) if path.exists() else ("", {})
    known = known if version == triton.__version__ else {}
    wanted = [(architecture, key) for key in wanted_launches() for architecture in ARCHITECTURES]
    known = {place: line for place, line in known.items() if place in wanted}
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for line in pool.map(_compile_line, [place for place in wanted if place not in known]):
            print(line, flush=True)
            known[line.architecture, line.key] = line
            write_table(path, known.values())
    write_table(path, known.values())
    return list(known.values())


@functools.cache
def _all_launches() -> dict[str, Launch]:
    return wanted_launches()


def _compile_line(place: tuple[int, str]) -> Line:
    architecture, key = place
    launch = _all_launches()[key]
    return Line(architecture, key, launch.title, usage_of(compile_launch(launch, architecture), architecture))


def stale_lines(path: Path) -> list[str]:
    """What the file lacks and what it holds too much, one sentence each; nothing when it is that of these kernels."""
    _, known = read_table(path)
    launches_by_key = wanted_launches()
    wanted = {(architecture, key) for key in launches_by_key for architecture in ARCHITECTURES}
    missing = [f"sm_{arch} {launches_by_key[key].title} is not in it" for arch, key in sorted(wanted - set(known))]
    return missing + [f"sm_{arch} {known[arch, key].title} is of an older source" for arch, key in set(known) - wanted]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sagc_fast.kernels.aot", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, action="append", help="80 or 90; default: both")
    parser.add_argument("--model", choices=SHAPES, action="append", help="default: all three")
    parser.add_argument("--first", action="store_true", help="only the first configuration of a tuned kernel")
    parser.add_argument("--only", metavar="WORD", nargs="+", default=[""], help="kernels whose name holds a WORD")
    parser.add_argument("--update", metavar="FILE", type=Path, help="bring a file with the whole table up to date")
    parser.add_argument("--check", metavar="FILE", type=Path, help="print such a file and say what in it is stale")
    parser.add_argument("--processes", type=int, default=2, help="that compile at a time for --update; default: 2")
    options = parser.parse_args(arguments)
    if options.update:
        lines = update_table(options.update, options.processes)
        return _verdict([line.usage.fits(line.architecture) for line in lines])
    print(f"{HEADER} (Triton {triton.__version__ if options.check is None else read_table(options.check)[0]})")
    if options.check:
        lines = list(read_table(options.check)[1].values())
        print(*lines, *(stale := stale_lines(options.check)), sep="\n")
        return 1 if stale else _verdict([line.usage.fits(line.architecture) for line in lines])
    found = []
    for launch in wanted_launches(options.model or SHAPES, options.first).values():
        if any(word in launch.name for word in options.only):
            for architecture in options.arch or ARCHITECTURES:
                usage = usage_of(compile_launch(launch, architecture), architecture)
                found.append(usage.fits(architecture))
                print(usage.line(architecture, launch.title), flush=True)
    return _verdict(found)


def _verdict(fits: list[bool]) -> int:
    print(f"{fits.count(False)} of {len(fits)} spill or exceed shared memory.")
    return 1 if False in fits else 0


if __name__ == "__main__":
    sys.exit(main())
