"""The commands of Nsight Systems and Nsight Compute, run where the two are installed, on a short generation."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys

from gpu.device import DEVICE
from gpu.report import is_rehearsal, keep_file, out_folder, part, row

TIMEOUT_SECONDS = 120.0 if is_rehearsal() else 26.0
GENERATE = ("generate", "--model", "addition", "--device", "cuda", "--prompt", "17+25=", "--n", "16")
REPORTS = {"nsys": "timeline.nsys-rep", "ncu": "kernels.ncu-rep"}


def main() -> None:
    with part() as outcome:
        with outcome.section("torch.profiler"):
            out = out_folder() / "profile_torch"
            program = [*GENERATE[:4], DEVICE.type, *GENERATE[5:]]
            said = _sagc_fast("profile", "--tool", "torch", "--out", str(out), "--", *program)
            print(said)
            row("torch.profiler", "ran", beside=keep_file(out / "trace.json.gz"))
        for tool, name in REPORTS.items():
            with outcome.section(tool):
                _profile(tool, name)


def _profile(tool: str, name: str) -> None:
    out = out_folder() / f"profile_{tool}"
    arguments = ("profile", "--tool", tool, "--out", str(out))
    command = _sagc_fast(*arguments, "--print", "--", *GENERATE).strip()
    if is_rehearsal() or shutil.which(tool) is None:
        row(tool, "printed only" if shutil.which(tool) else "not installed", beside=command)
        return
    print(_sagc_fast(*arguments, "--", *GENERATE))
    there = (out / name).exists()
    row(tool, "ran" if there else None, beside=keep_file(out / name) if there else f"left no {name}; {command}")


def _sagc_fast(*arguments: str) -> str:
    command = [sys.executable, "-m", "sagc_fast", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "it wrote nothing").splitlines()
        raise RuntimeError(f"{shlex.join(arguments[:3])} ended with {done.returncode}: {lines[-1]}")
    return done.stdout


if __name__ == "__main__":
    main()
