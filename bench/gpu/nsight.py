"""The commands of Nsight Systems and Nsight Compute, run where the two are installed, on a short generation."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time

from gpu.device import DEVICE
from gpu.report import LIMIT_VARIABLE, is_rehearsal, keep_file, out_folder, part, row

GENERATE = ("generate", "--model", "addition", "--device", "cuda", "--prompt", "17+25=", "--n", "16")
REPORTS = {"nsys": "timeline.nsys-rep", "ncu": "kernels.ncu-rep"}
RESERVE_SECONDS = 4.0
"""Of the part's limit, so that a tool which takes too long leaves a row that says so."""


def main() -> None:
    deadline = time.monotonic() + float(os.environ.get(LIMIT_VARIABLE, "600")) - RESERVE_SECONDS
    with part() as outcome:
        with outcome.section("torch.profiler"):
            out = out_folder() / "profile_torch"
            program = [*GENERATE[:4], DEVICE.type, *GENERATE[5:]]
            print(_profile("torch", deadline, "--out", str(out), "--", *program))
            row("torch.profiler", "ran", beside=keep_file(out / "trace.json.gz"))
        for tool, name in REPORTS.items():
            with outcome.section(tool):
                _run_tool(tool, name, deadline)


def _run_tool(tool: str, name: str, deadline: float) -> None:
    out, there = out_folder() / f"profile_{tool}", shutil.which(tool) is not None
    row(f"{tool}, command", "printed" if there else "not installed", beside=command_of(tool, str(out)))
    if is_rehearsal() or not there:
        return
    print(_profile(tool, deadline, "--out", str(out), "--", *GENERATE))
    has_report = (out / name).exists()
    row(tool, "ran" if has_report else None, beside=keep_file(out / name) if has_report else f"left no {name}")


def command_of(tool: str, out: str) -> str:
    """What ``sagc-fast profile --tool TOOL --print`` prints for the generation."""
    from sagc_fast.commands.profile import nsight_command

    arguments = argparse.Namespace(out=out, skip_steps=1, steps=3)
    command, environment = nsight_command(tool, list(GENERATE), arguments)
    return shlex.join([*(f"{name}={value}" for name, value in environment.items()), *command])


def _profile(tool: str, deadline: float, *arguments: str) -> str:
    command = [sys.executable, "-m", "sagc_fast", "profile", "--tool", tool, *arguments]
    seconds = max(1.0, deadline - time.monotonic())
    try:  # what a tool leaves running is in this part's process group, which the driver ends
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"profile --tool {tool} was ended after {seconds:.0f} s, the end of this part") from None
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "it wrote nothing").splitlines()
        raise RuntimeError(f"profile --tool {tool} ended with {done.returncode}: {lines[-1]}")
    return done.stdout


if __name__ == "__main__":
    main()
