"""The GPU-marked tests, a process per file and several at a time; each file a row, each failure a row of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from gpu.report import is_rehearsal, out_folder, part, row

ROOT = Path(__file__).resolve().parents[2]
MOST_PROCESSES = 8
COMPILES_LITTLE = ("test_mixed_devices", "test_build", "test_sample_keyed", "test_step_rows", "test_decode_rows")
"""Files that go last: what compiles for a minute should begin first."""
MOST_FAILURES = 5
"""Rows of failed tests per file."""


def files() -> list[Path]:
    found = [*sorted((ROOT / "tests/gpu").glob("test_*.py")), *sorted((ROOT / "tests/kernels/cases").glob("test_*.py"))]
    found += sorted((ROOT / "tests/cuda").glob("test_*.py"))
    found.sort(key=lambda path: path.stem in COMPILES_LITTLE)
    return [path for path in found if path.parent.name == "gpu"] if is_rehearsal() else found


def run_file(path: Path) -> tuple[Path, int, str, Path]:
    result = out_folder() / "tests" / f"{path.parent.name}-{path.stem}.xml"
    result.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:xdist", "-p", "no:randomly",
               f"--junitxml={result}", "--maxfail=20", str(path)]  # fmt: skip
    # Kernels tuned on the tests' tiny inputs must not serve the measurements.
    environment = os.environ | {"OMP_NUM_THREADS": "2", "TRITON_CACHE_DIR": str(out_folder() / "triton")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return path, done.returncode, done.stdout + done.stderr, result


def main() -> None:
    with part() as outcome:
        if importlib.util.find_spec("pytest") is None:
            row("GPU-marked tests", None, beside="pytest is not installed")
            return
        processes = 1 if is_rehearsal() else max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) // 2))
        passed = failed = skipped = 0
        with ThreadPoolExecutor(processes) as pool:
            for job in as_completed([pool.submit(run_file, path) for path in files()]):
                path, status, said, result = job.result()
                name = path.relative_to(ROOT / "tests")
                print(f"---- {name}: {status}\n{said}")
                if not result.exists():
                    outcome.errors.append(
                        f"{name} did not run: {(said.strip() or 'it wrote nothing').splitlines()[-1]}"
                    )
                    row(str(name), None, beside=outcome.errors[-1][:300])
                    continue
                bad, counts = _read(result)
                passed, failed, skipped = passed + counts[0], failed + counts[1], skipped + counts[2]
                row(str(name), f"{counts[0]} passed", beside=f"{counts[1]} failed, {counts[2]} skipped")
                for test, words in bad[:MOST_FAILURES]:
                    row(f"  {test}"[:58], None, beside=f"failed: {words}")
        row("GPU-marked tests", f"{passed} passed", beside=f"{failed} failed, {skipped} skipped")
        if failed:
            outcome.errors.append(f"{failed} tests failed")


def _read(result: Path) -> tuple[list[tuple[str, str]], tuple[int, int, int]]:
    """(failed tests with their message's first line), (passed, failed, skipped)."""
    bad, skipped, total = [], 0, 0
    for case in ElementTree.parse(result).iter("testcase"):
        total += 1
        skipped += case.find("skipped") is not None
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            words = (problem.get("message") or "").strip().splitlines()
            bad.append((case.get("name", "?"), words[0][:200] if words else "no message"))
    return bad, (total - len(bad) - skipped, len(bad), skipped)


if __name__ == "__main__":
    main()
