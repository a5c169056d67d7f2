"""What the machine is: the GPU, its driver, the software that the figures depend on, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess

from gpu.report import is_rehearsal, part, row

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "numpy", "numba", "pytest")
NEEDED = ("numpy", "safetensors", "transformers", "numba", "yaml", "rich")
TOOLS = ("nvcc", "nsys", "ncu", "g++")


def main() -> None:
    with part() as outcome:
        row("python", platform.python_version(), beside=f"{platform.platform(terse=True)}, {os.cpu_count()} cores")
        for name in PACKAGES:
            try:
                row(name, importlib.metadata.version(name))
            except importlib.metadata.PackageNotFoundError:
                row(name, None, beside="not installed")
        for name in TOOLS:
            row(name, shutil.which(name) or "-")
        with outcome.section("commit"):
            from sagc_fast.bench.machine import commit

            row("commit", commit() or "-")
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            outcome.errors.append(f"sagc_fast needs {', '.join(missing)}, and this interpreter has none of it")
        if not is_rehearsal():
            with outcome.section("GPU"):
                _gpu()


def _gpu() -> None:
    import torch

    properties = torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability(0)
    memory = f"sm_{major}{minor}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs"
    row("GPU", properties.name, beside=memory)
    row("CUDA of torch", torch.version.cuda)
    fields = "driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu,utilization.gpu,memory.used"
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    row("driver", said.partition(",")[0] or "-", beside=f"{fields}: {said}" if said else "nvidia-smi is not there")


if __name__ == "__main__":
    main()
