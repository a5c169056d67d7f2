"""csrc/cuda without a GPU: the kernels compiled for the host, their machine code, the library beside a CPU torch."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sagc_fast.ops import DecodeRows

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc/cuda").glob("*.cu"))

LOGITS_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class SampleArgs(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("type", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size", "stride")),
        *((name, ctypes.c_void_p) for name in ("temperature", "seed", "prompt_id", "sample_index", "position")),
        *((name, ctypes.c_void_p) for name in ("token", "logprob")),
    )


class PlaceArgs(ctypes.Structure):
    _fields_ = (
        *((f"tensor_{i}", ctypes.c_void_p) for i in range(7)),
        *((name, ctypes.c_int64) for name in ("num_rows", "table_stride", "block_size", "scratch_slot")),
    )


class AdvanceArgs(ctypes.Structure):
    _fields_ = (
        *((f"tensor_{i}", ctypes.c_void_p) for i in range(12)),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_ids", "num_steps")),
        *((f"{name}_stride", ctypes.c_int64) for name in ("end", "record", "record_logprob")),
    )


class HostKernels:
    """The kernels' own source, compiled for the host; calls take CPU tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def sample(
        self, logits: torch.Tensor, keys: tuple[torch.Tensor, ...], temperature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token, logprob = torch.full((len(logits),), -1), torch.zeros(len(logits))
        pointers = [x.data_ptr() for x in (temperature, *keys, token, logprob)]
        size = (len(logits), logits.shape[1], logits.stride(0))
        args = SampleArgs(logits.data_ptr(), LOGITS_TYPES[logits.dtype], *size, *pointers)
        assert self.library.sagc_cuda_sample_keyed(None, ctypes.byref(args)) == 0
        return token, logprob

    def place_rows(self, rows: DecodeRows, block_size: int, scratch_slot: int) -> None:
        tensors = (rows.position_R, rows.is_live_R, rows.is_kept_R, rows.shared_blocks_R, rows.block_tables_RB,
                   rows.context_R, rows.slot_R)  # fmt: skip
        size = (len(rows.token_R), rows.block_tables_RB.stride(0), block_size, scratch_slot)
        args = PlaceArgs(*(x.data_ptr() for x in tensors), *size)
        assert self.library.sagc_cuda_place_rows(None, ctypes.byref(args)) == 0

    def advance_rows(self, rows: DecodeRows, token: torch.Tensor, logprob: torch.Tensor) -> None:
        tensors = (token, logprob, rows.token_R, rows.position_R, rows.index_R, rows.max_output_R, rows.is_live_R,
                   rows.end_set_R, rows.step_R, rows.end_ids_SI, rows.drawn_KR, rows.logprobs_KR)  # fmt: skip
        size = (len(token), rows.end_ids_SI.shape[1], len(rows.drawn_KR))
        strides = (x.stride(0) for x in (rows.end_ids_SI, rows.drawn_KR, rows.logprobs_KR))
        args = AdvanceArgs(*(x.data_ptr() for x in tensors), *size, *strides)
        assert self.library.sagc_cuda_advance_rows(None, ctypes.byref(args)) == 0


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """csrc/cuda as it stands, compiled by g++ against the stand-in of tests/cuda/host."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the host build of the CUDA kernels needs g++")
    library = tmp_path_factory.mktemp("cuda") / "host.so"
    host = Path(__file__).parent / "host"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-w"]
    sources = ["-x", "c++", host / "host.cpp", *SOURCES]
    subprocess.run([compiler, *flags, f"-I{host}", f"-I{ROOT / 'csrc/cuda'}", *sources, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(params=["forwards", "backwards"])
def host(request: pytest.FixtureRequest, host_library: ctypes.CDLL) -> Iterator[HostKernels]:
    """The kernels with the threads of a block in either order."""
    host_library.sagc_host_order(request.param == "backwards")
    yield HostKernels(host_library)
    host_library.sagc_host_order(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of what each kernel takes, where it was compiled."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "nvcc_table":
                terminalreporter.write_sep("-", "csrc/cuda: registers per thread, bytes of shared memory per block")
                terminalreporter.write_line(text)
    if any("there is no nvcc here" in str(report.longrepr) for report in terminalreporter.getreports("skipped")):
        terminalreporter.write_line("csrc/cuda was not compiled for sm_80 and sm_90: there is no nvcc here.")
