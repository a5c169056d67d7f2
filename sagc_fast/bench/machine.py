"""What a figure was measured on: processor, memory, load, software, commit. Standard library only."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "numba", "transformers", "triton")
FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "SAGC_BACKEND", "SAGC_CPU_LEVEL")
"""Environment variables that change what is measured."""


def describe_machine(threads: int) -> dict[str, Any]:
    """A record of this machine now; ``threads`` is what the benchmark was told to use."""
    total, available = memory_bytes()
    return {
        "cpu": cpu_name(),
        "features": [name for name in FEATURES if name in cpu_flags()],
        "cores": num_cores(),
        "threads": threads,
        "memory_gb": round(total / 1e9, 1),
        "available_gb": round(available / 1e9, 1),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": {name: found for name in ("sagc_fast", *PACKAGES) if (found := version_of(name))},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def commit() -> str | None:
    """Short hash of the checkout that this package is imported from, ``+`` behind it when files differ; else None."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=+"],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
        tracked = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--error-unmatch", "machine.py"], capture_output=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # A package inside somebody else's repository (a virtual environment, say) is not at that repository's commit.
    return done.stdout.strip() or None if done.returncode == 0 == tracked.returncode else None


def version_of(package: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_flags() -> set[str]:
    """Instruction-set names that the kernel reports; empty where it reports none."""
    return set(_cpuinfo("flags").split())


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use: its affinity, narrowed by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def memory_bytes() -> tuple[int, int]:
    """(total, available) in bytes, narrowed by the container's limit."""
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    total, available = (
        int(fields[key].split()[0]) * 1024 if key in fields else 0 for key in ("MemTotal", "MemAvailable")
    )
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit() and int(limit) < total:
        total, available = int(limit), min(available, max(0, int(limit) - int(used)))
    return total, available


def _cpuinfo(key: str) -> str:
    lines = (line.partition(":") for line in _read("/proc/cpuinfo").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "")


def _read(path: str) -> str:
    """A file's text, or nothing where the system has no such file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
