"""The tests of tests/kernels/cases in Triton's CPU interpreter, which a process has to choose before importing Triton.

One process per file, two at a time. By hand: TRITON_INTERPRET=1 pytest tests/kernels/cases/test_rowwise.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

CASES = sorted((Path(__file__).parent / "cases").glob("test_*.py"))


def _run(case: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-W", "ignore::RuntimeWarning", str(case)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future]]:
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {case.stem: pool.submit(_run, case) for case in CASES}


@pytest.mark.parametrize("name", [case.stem for case in CASES])
def test_interpreted(name: str, runs: dict[str, Future]) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
