"""setup.py and csrc/cuda: compiled for sm_80 and sm_90 without spills, loaded beside a CPU torch, never in the way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT = shutil.ignore_patterns("__pycache__", "*.so", "*.o", "*.egg-info")
MAX_REGISTERS = {"sample_keyed": 64, "place_rows": 64, "advance_rows": 64}
"""1024 threads of a block share 65,536; more does not launch."""


def _copy(to: Path) -> Path:
    to.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "sagc_fast", "kernels", "csrc"):
        source = ROOT / name
        shutil.copytree(source, to / name, ignore=BUILT) if source.is_dir() else shutil.copy2(source, to / name)
    return to


def _build(source: Path, **environment: str) -> str:
    env = os.environ | {"SAGC_BUILD_NATIVE": "0"} | environment
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A source tree with the library in it, and what its build said."""
    if shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("there is no nvcc here")
    source = _copy(tmp_path_factory.mktemp("cuda") / "source")
    said = _build(source, SAGC_BUILD_CUDA="1", SAGC_CUDA_ARCH="80;90")
    assert (source / "sagc_fast/_cuda.so").exists(), said
    return source, said


def _resources(said: str) -> list[tuple[str, int, int, int, int]]:
    """(kernel, architecture, registers, bytes of shared memory, bytes of stack and spills) of each compilation."""
    pattern = (
        r"Compiling entry function '(\S+)' for 'sm_(\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?"
    )
    rows = []
    for mangled, architecture, *spills, registers, shared in re.findall(pattern, said, re.DOTALL):
        name = next(name for name in MAX_REGISTERS if name in mangled)
        kind = re.search(r"kernelI(\S+?)Lb([01])", mangled)
        if kind:
            dtype = {"f": "fp32"}.get(kind[1], "bf16" if "BFloat16" in kind[1] else "fp16")
            name = f"{name} {dtype}{' 16-byte loads' if kind[2] == '1' else ''}"
        rows.append((name, int(architecture), int(registers), int(shared or 0), sum(map(int, spills))))
    return sorted(rows)


def test_no_kernel_spills(built: tuple[Path, str], record_property: Callable[[str, object], None]) -> None:
    rows = _resources(built[1])
    assert len(rows) == 2 * (6 + 2)  # three dtypes with and without alignment, and the rows; two architectures
    lines = [f"sm_{row[1]:<3}{row[2]:>10}{row[3]:>9}{'SPILLS' if row[4] else '-':>8}  {row[0]}" for row in rows]
    record_property("nvcc_table", "\n".join(lines))
    for name, _, registers, shared, spilled in rows:
        assert spilled == 0, name
        assert registers <= MAX_REGISTERS[name.split()[0]], name
        assert shared <= 48 * 1024, name


PROGRAM = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from sagc_fast import ops
from sagc_fast.errors import BackendError
from sagc_fast.ops import cuda_ops

with FakeTensorMode():
    logits = torch.empty(3, 50, dtype=torch.bfloat16, device="cuda")
    keys = tuple(torch.zeros(3, dtype=torch.int64, device="cuda") for _ in range(4))
    token, logprob = cuda_ops.sample_keyed_tokens(logits, keys, torch.ones(3, device="cuda"))
    assert (token.dtype, logprob.dtype, token.shape) == (torch.int64, torch.float32, (3,))
    assert token.device.type == "cuda"
schema = torch.ops.sagc_fast.place_rows.default._schema
assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] == ["is_live", "context", "slot"]
keys = tuple(torch.zeros(3, dtype=torch.int64) for _ in range(4))
for call, kind in (
    (lambda: torch.ops.sagc_fast.sample_keyed_tokens(torch.zeros(3, 5), *keys, torch.ones(3)), NotImplementedError),
    (lambda: ops.set_backend("cuda"), BackendError),
):
    try:
        call()
    except kind as error:
        print(error)
    else:
        raise AssertionError(kind)
"""


def test_the_library_loads_beside_a_cpu_torch(built: tuple[Path, str]) -> None:
    """Fakes are registered; without a GPU the backend says what is missing."""
    env = {name: value for name, value in os.environ.items() if name != "SAGC_BACKEND"} | {"PYTHONPATH": str(built[0])}
    env["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=built[0], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Backend 'cuda' (set_backend) is not there" in done.stdout
    assert "nvcc" in done.stdout


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source tree, and a toolkit whose nvcc fails."""
    folder = tmp_path_factory.mktemp("broken")
    files = {"bin/nvcc": "#!/bin/sh\necho 'no such host compiler' >&2\nexit 1\n", "lib64/libcudart_static.a": ""}
    for name, text in files.items():
        path = folder / "toolkit" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    return _copy(folder / "source"), folder / "toolkit"


def test_a_broken_nvcc_does_not_break_the_install(broken: tuple[Path, Path]) -> None:
    source, toolkit = broken
    said = _build(source, SAGC_BUILD_CUDA="1", CUDA_HOME=str(toolkit))
    assert "no such host compiler" in said
    assert "nvcc could not compile csrc/cuda/sample_keyed.cu" in said
    assert not (source / "sagc_fast/_cuda.so").exists()


@pytest.mark.parametrize("asked", ["0", None])
def test_nvcc_is_left_alone_where_nobody_can_run_its_work(broken: tuple[Path, Path], asked: str | None) -> None:
    source, toolkit = broken
    environment = {"SAGC_BUILD_CUDA": asked} if asked else {}
    assert "nvcc" not in _build(source, CUDA_HOME=str(toolkit), **environment)
