"""Kernels compile for GPUs that are not here, without spills and within shared memory, at the shapes of real models.

A process of its own, since this one may run the interpreter. All shapes and configurations: python -m
sagc_fast.kernels.aot (docs/kernels.md).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

# The kernels with the most registers for both architectures; one model of each head width.
TABLES = {
    "attention_sm90": ("--arch", "90", "--model", "Llama-3.2-3B", "--first", "--only", "varlen", "prefill", "decode"),
    "attention_sm80": ("--arch", "80", "--model", "Qwen2.5-0.5B", "--first", "--only", "varlen", "decode"),
    "others_sm90": (
        "--arch",
        "90",
        "--model",
        "Qwen2.5-3B",
        "--only",
        "sample_pick",
        "token",
        "policy",
        "rope",
        "rotary",
        "pack_decode",
        "norm",
    ),
}


def _processes() -> dict[str, subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "sagc_fast.kernels.aot"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    return {name: subprocess.Popen([*command, *arguments], **pipes) for name, arguments in TABLES.items()}


@pytest.fixture(scope="module")
def tables() -> dict[str, subprocess.Popen[str]]:
    return _processes()


@pytest.mark.parametrize("name", TABLES)
def test_no_spills_and_shared_memory_within_limits(name: str, tables: dict[str, subprocess.Popen[str]]) -> None:
    out, errors = tables[name].communicate()
    rows = re.findall(r"^sm_(\d+) +(\d+) +(\d+) +([\d.]+) +(\d+) +(\S+)  (\S+)", out, re.MULTILINE)
    assert tables[name].returncode == 0, out + errors[-3000:]
    assert len(rows) >= 5
    for _, registers, shared, occupancy, tensor_core, spills, kernel in rows:
        assert spills == "-", kernel
        assert 0 < int(registers) <= 255
        assert int(shared) <= 227 * 1024
        assert float(occupancy) > 0, kernel
        is_product = kernel.startswith("varlen") or kernel in ("paged_prefill", "paged_decode", "group_decode")
        assert (int(tensor_core) > 0) == is_product, kernel


def test_a_spill_and_an_overfull_block_are_seen() -> None:
    """What the table must catch, in a fresh process: a kernel with far more live values than registers."""
    program = (
        "import torch\n"
        "from sagc_fast.kernels import compile_ahead as aot, rms_norm\n"
        "with aot.recording() as found:\n"
        "    x = torch.empty(4, 8192, dtype=torch.bfloat16, device='meta')\n"
        "    rms_norm.rms_norm_kernel[(4,)](x, x, x, x, x, x, 1e-6, 8192, 8192, 8192,"
        " HAS_RESIDUAL=True, BLOCK_E=8192, num_warps=1)\n"
        "usage = aot.usage_of(aot.compile_launch(found[0], 80), 80)\n"
        "assert usage.has_spills, usage\n"
        "assert aot.occupancy(255, 0, 8, aot.LIMITS[80]) == 0.125\n"
        "assert aot.occupancy(32, 0, 8, aot.LIMITS[80]) == 1.0\n"
        "assert aot.occupancy(32, 100 * 1024, 4, aot.LIMITS[90]) == 2 * 128 / 2048\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
