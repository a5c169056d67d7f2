"""Compile a launch for a GPU that is not here, and read what it takes from its machine code.

A launcher is called with tensors of the meta device, and what it would launch is written down: kernel, argument
types, divisibility, constants, every tuned configuration. Spills show as a stack frame or as local loads and stores in
the machine code; ``cuobjdump`` comes in Triton's wheel.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
