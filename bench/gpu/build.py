"""Builds the libraries of csrc into the tree that the other parts import; what cannot be built is left out, aloud.

Not the CPU operators: they take minutes of g++, and nothing here runs on them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from gpu.report import is_rehearsal, out_folder, part, row

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"CUDA operators": "_cuda.so", "reader of the controller's lists": "controller/_fill.so"}
PROGRAM = """
import sys
import setuptools
from distutils.core import run_setup
distribution = run_setup("setup.py", stop_after="init")
distribution.ext_modules = [e for e in distribution.ext_modules if e.name != "sagc_fast._C"]
command = distribution.get_command_obj("build_ext")
command.build_lib, command.build_temp = sys.argv[1:]
distribution.run_command("build_ext")
"""


def main() -> None:
    with part() as outcome, outcome.section("build"):
        out, started = out_folder(), time.perf_counter()
        environment = os.environ | ({"SAGC_BUILD_NATIVE": "0"} if is_rehearsal() else {})
        environment.pop("PYTHONSAFEPATH", None)
        command = [sys.executable, "-c", PROGRAM, str(out / "site"), str(out / "objects")]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        print(done.stdout, done.stderr, sep="\n")
        said = next((line for line in done.stdout.splitlines() if line.startswith("sagc_fast: ")), "")
        row("build_ext", time.perf_counter() - started, "s", beside=said or f"exit {done.returncode}")
        for what, name in LIBRARIES.items():
            there = (out / "site/sagc_fast" / name).exists()
            row(what, "built" if there else "-", beside="" if there else "see logs/build.txt")
        if done.returncode != 0:
            raise RuntimeError(f"build_ext ended with {done.returncode}; see logs/build.txt")


if __name__ == "__main__":
    main()
