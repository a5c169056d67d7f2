"""Kernels compile for GPUs that are not here, without spills and within shared memory, at the shapes of real models.

Every kernel in every configuration is in the table; resources.json keeps what was compiled before, line by line under a
hash of all that the line depends on, so only changed kernels are compiled here, and a few anew. Processes of their own,
since this one may run the interpreter.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TABLE = Path(__file__).parent / "resources.json"
# A product with tensor cores and the others' most crowded, for either architecture.
ANEW = {
    "sm_90": ("--arch", "90", "--model", "Llama-3.2-3B", "--first", "--only", "varlen_forward", "sample_pick"),
    "sm_80": ("--arch", "80", "--model", "Qwen2.5-0.5B", "--first", "--only", "paged_decode", "policy", "rotary"),
}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sagc_fast.kernels.aot", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def anew() -> dict[str, subprocess.Popen[str]]:
    return {name: _start(*arguments) for name, arguments in ANEW.items()}


@pytest.fixture(scope="module")
def table(anew: dict[str, subprocess.Popen[str]]) -> str:
    """All of it; on another Triton than the one of the file, which knows nothing then, the first configurations."""
    is_known = f'"triton": "{importlib.metadata.version("triton")}"' in TABLE.read_text()
    process = _start("--known", str(TABLE), *(() if is_known else ("--first", "--model", "Qwen2.5-0.5B")))
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return said


def test_every_kernel_and_configuration_fits(table: str, record_property: Callable[[str, object], None]) -> None:
    rows = re.findall(r"^sm_(\d+) +(\d+) +(\d+) +([\d.]+) +(\d+) +(\S+)  (\S+)", table, re.MULTILINE)
    record_property("triton_table", table)
    assert len(rows) > 40
    assert {kernel for *_, kernel in rows} >= {path.stem for path in _kernel_files()}
    for architecture, registers, shared, occupancy, tensor_core, spills, kernel in rows:
        assert spills == "-", kernel
        assert 0 < int(registers) <= 255
        assert int(shared) <= {"80": 163, "90": 227}[architecture] * 1024
        assert float(occupancy) > 0, kernel
        is_product = kernel.startswith("varlen") or kernel in ("paged_prefill", "paged_decode", "group_decode")
        assert (int(tensor_core) > 0) == is_product, kernel


def _kernel_files() -> list[Path]:
    files = (Path(__file__).parents[2] / "kernels").glob("[a-z]*.py")
    return [path for path in files if f"def {path.stem}_kernel(" in path.read_text()]


@pytest.mark.parametrize("name", ANEW)
def test_lines_compiled_anew_are_those_of_the_table(
    name: str, anew: dict[str, subprocess.Popen[str]], table: str
) -> None:
    said, _ = anew[name].communicate()
    assert anew[name].returncode == 0, said
    lines = [line for line in said.splitlines() if line.startswith("sm_")]
    assert len(lines) >= 3
    if len(table.splitlines()) > 100:
        assert set(lines) <= set(table.splitlines())


def test_a_spill_and_an_overfull_block_are_seen() -> None:
    """What the table must catch, in a fresh process: a kernel with far more live values than registers."""
    program = (
        "import torch\n"
        "from sagc_fast.kernels import compile_ahead as ahead, rms_norm\n"
        "with ahead.recording() as found:\n"
        "    x = torch.empty(4, 8192, dtype=torch.bfloat16, device='meta')\n"
        "    rms_norm.rms_norm_kernel[(4,)](x, x, x, x, x, x, 1e-6, 8192, 8192, 8192,"
        " HAS_RESIDUAL=True, BLOCK_E=8192, num_warps=1)\n"
        "usage = ahead.usage_of(ahead.compile_launch(found[0], 80), 80)\n"
        "assert usage.has_spills, usage\n"
        "assert not usage.fits(80)\n"
        "assert ahead.occupancy(255, 0, 8, ahead.LIMITS[80]) == 0.125\n"
        "assert ahead.occupancy(32, 0, 8, ahead.LIMITS[80]) == 1.0\n"
        "assert ahead.occupancy(32, 100 * 1024, 4, ahead.LIMITS[90]) == 2 * 128 / 2048\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


def test_only_lines_of_these_kernels_are_believed(tmp_path: Path) -> None:
    file, only = tmp_path / "kept.json", ("--arch", "80", "--model", "Qwen2.5-0.5B", "--only", "uniforms")
    written, _ = _start("--update", str(file), *only).communicate()
    file.write_text(re.sub(r'"registers": \d+', '"registers": 99', file.read_text()))
    believed, _ = _start("--known", str(file), *only).communicate()
    assert re.search(r"sm_80 +99 ", believed), believed
    file.write_text(re.sub(r'"key": "\w{4}', '"key": "zzzz', file.read_text()))
    compiled, _ = _start("--known", str(file), *only).communicate()
    assert "1 of these are not in" in compiled
    assert next(line for line in written.splitlines() if line.startswith("sm_")) in compiled


WIDE_FP32 = """
import torch
from sagc_fast.kernels.aot import Shape, launches
from sagc_fast.kernels.compile_ahead import compile_launch

for launch in launches(Shape(4, 2, 128, 64, 96, 300), torch.float32):
    if launch.name in ("varlen_forward", "varlen_backward_kv"):
        print(launch.name, compile_launch(launch, 80).metadata.shared)
"""


def test_wide_heads_in_fp32_fit_the_shared_memory_of_every_architecture() -> None:
    """With the tiles of bf16 they took 224 KiB, and 20 s of compilation."""
    done = subprocess.run([sys.executable, "-c", WIDE_FP32], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in found] == ["varlen_forward", "varlen_backward_kv"]
    assert all(int(shared) <= 163 * 1024 for _, shared in found)


ROTATIONS = """
import re
from dataclasses import replace
from sagc_fast.kernels.aot import Shape, launches
from sagc_fast.kernels.compile_ahead import compile_launch

for launch in launches(Shape(4, 2, 64, 64, 96, 300), first=True):
    if launch.name in ("rope_cache", "rotary") or "ROTATES" in launch.title:
        launch = replace(launch, options=(*launch.options, ("enable_fp_fusion", False)))
        print(launch.name, len(re.findall("fma.rn.f32", compile_launch(launch, 90).asm["ptx"])))
"""


def test_rotations_do_not_leave_their_rounding_to_the_compiler() -> None:
    """Who may fuse a product and a sum may do it otherwise in another kernel, and a key that is computed again would
    have other bits: the fused operations stand in the source, so they are there also where the compiler may fuse none.
    """
    done = subprocess.run([sys.executable, "-c", ROTATIONS], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in found] == [
        "rope_cache", "group_decode", "paged_decode", "paged_decode", "rotary", "rotary",
    ]  # fmt: skip
    assert all(int(count) > 0 for _, count in found), found
