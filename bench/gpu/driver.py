"""Runs the parts of the GPU check one after another, each in a process of its own with a time limit, and sums up.

Standard library only, so that it ends with its table whatever is missing or broken. A part writes its rows as it goes
(report.py): one that fails or is ended keeps what it had measured, and gets one more row that says why. Parts stand in
the order of their worth; when the budget runs out, the later ones are left out, and say so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "bench") not in sys.path:
    sys.path.insert(0, str(ROOT / "bench"))

from gpu import report  # noqa: E402
from gpu.table import render, targets_of  # noqa: E402

BUDGET_SECONDS = 470.0
"""Of the whole check: 8 minutes, less the table."""
REHEARSAL_FACTOR = 4.0
"""Limits and budget of a rehearsal, which takes a minute, are so many times as long: the machine may be busy."""
LEAST_SECONDS = 8.0
"""A part is not begun with less than this left."""
GRACE_SECONDS = 3.0
"""Between asking a part to end and ending it."""
NOISE = ("warning", "traceback", "^", "during handling", 'file "', "the above exception")


@dataclass(frozen=True)
class Part:
    """A module of this package (or any command, for tests) and the seconds that it may take."""

    name: str
    arguments: tuple[str, ...]
    """Behind ``python -m``."""
    limit_seconds: float
    is_rehearsed: bool = True
    """False where a rehearsal would run the very same lines once more."""


PARTS = (
    Part("machine", ("gpu.machine",), 30),
    Part("build", ("gpu.build",), 90),
    Part("warm", ("gpu.warm",), 75),
    Part("ceilings", ("gpu.ceilings",), 20),
    Part("tests", ("gpu.tests",), 100),
    Part("rollout 3B", ("gpu.rollout", "3B"), 150),
    Part("kernels", ("gpu.kernels",), 75),
    Part("rollout 0.5B", ("gpu.rollout", "0.5B"), 90, is_rehearsed=False),
    Part("step 0.5B", ("gpu.step", "0.5B"), 30, is_rehearsed=False),
    Part("step 3B", ("gpu.step", "3B"), 45),
    Part("sagc", ("gpu.sagc",), 80),
    Part("nsight", ("gpu.nsight",), 60),
)


def run(parts: Sequence[Part], out: Path, budget_seconds: float, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Every part's record: name, status (``ok``, ``failed``, ``out of time``, ``left out``), seconds, rows."""
    started = time.monotonic()
    records = []
    for part in parts:
        left = budget_seconds - (time.monotonic() - started)
        if left < LEAST_SECONDS:
            record = {"part": part.name, "status": "left out", "seconds": 0.0, "rows": []}
            record["error"] = f"the budget of {budget_seconds:.0f} s was used up"
        else:
            print(f"[{time.monotonic() - started:5.0f} s] {part.name}", flush=True)
            record = run_part(part, out, min(part.limit_seconds, left), environment)
            if record["status"] != "ok":
                print(f"          {record['status']}: {record['error']}", flush=True)
        records.append(record)
    return records


def run_part(part: Part, out: Path, limit_seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """One part in a process group of its own, which is ended whole when the limit is reached."""
    stem = part.name.replace(" ", "_")
    rows_path, log_path = out / "rows" / f"{stem}.jsonl", out / "logs" / f"{stem}.txt"
    for path in (rows_path, log_path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    mine = {report.ROWS_VARIABLE: str(rows_path), report.LIMIT_VARIABLE: f"{limit_seconds:.1f}"}
    started = time.monotonic()
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *part.arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            cwd=ROOT, env=environment | mine, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)  # what the part may have left behind, too
    seconds = time.monotonic() - started
    record = {"part": part.name, "status": "ok", "seconds": round(seconds, 1), "rows": report.read_rows(rows_path)}
    if status is None:
        where = _last_frame(log_path)
        record |= {"status": "out of time", "error": f"ended after {limit_seconds:.0f} s{where}"}
    elif status != 0:
        how = f"signal {-status}" if status < 0 else f"exit {status}"
        record |= {"status": "failed", "error": f"{_last_line(log_path)} ({how})"}
    return record


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if process.poll() is None:
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    said = [line for line in lines if line and not line.lower().startswith(NOISE)]
    return said[-1][:300] if said else "it wrote nothing"


def _last_frame(log: Path) -> str:
    """Where the main thread stood, from the dump that report.part() makes shortly before the limit."""
    text = log.read_text(encoding="utf-8", errors="replace")
    dump = text.rpartition("most recent call first")[2]
    frames = [line.strip() for line in dump.splitlines() if line.strip().startswith("File ")]
    return f", in {frames[0].removeprefix('File ')}" if frames else ""


def make_environment(out: Path, is_rehearsal: bool) -> dict[str, str]:
    """What the parts run under: the package as a tree of links, since nothing is installed; no network."""
    site = link_package(out / "site")
    # Expandable segments: growing caches of the peer fragment the memory otherwise.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(site), str(ROOT / "bench"), os.environ.get("PYTHONPATH", ""))).rstrip(":"),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        report.OUT_VARIABLE: str(out),
    }
    environment.pop("TRITON_INTERPRET", None)
    environment.pop("SAGC_BACKEND", None)
    if is_rehearsal:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "SAGC_BACKEND": "torch"}
        environment[report.REHEARSAL_VARIABLE] = "1"
    return environment


def link_package(site: Path) -> Path:
    """A folder in which ``import sagc_fast`` finds the repository's package with ``kernels/`` inside it."""
    package = site / "sagc_fast"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {entry.name: entry for entry in (ROOT / "sagc_fast").iterdir() if entry.name != "__pycache__"}
    wanted["kernels"] = ROOT / "kernels"
    for link in package.iterdir():
        if link.is_symlink():
            link.unlink()
    for name, entry in wanted.items():
        if not (package / name).exists():  # a library built by this check goes before one in the tree
            (package / name).symlink_to(entry)
    return site


def sees_gpu() -> bool:
    """Asked of another process, so that this one never holds the device."""
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu_check.sh", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="every part on the CPU with tiny shapes")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="parts whose name begins with a WORD")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, metavar="S", help="seconds of the whole check")
    default = Path(os.environ.get("OUT") or ROOT / "build/gpu_check")
    parser.add_argument("--out", type=Path, default=default, metavar="DIR", help="default: $OUT or build/gpu_check")
    options = parser.parse_args(arguments)
    parts = [
        p
        for p in PARTS
        if (options.only is None or p.name.startswith(tuple(options.only))) and (p.is_rehearsed or not options.rehearse)
    ]
    if not parts:
        parser.error(f"--only {' '.join(options.only)} names no part; they are {', '.join(p.name for p in PARTS)}.")
    if not options.rehearse and not sees_gpu():
        print("torch sees no CUDA GPU here; bench/gpu_check.sh --rehearse shows the check on the CPU.", file=sys.stderr)
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    if options.rehearse:
        options.budget *= REHEARSAL_FACTOR
        parts = [replace(part, limit_seconds=REHEARSAL_FACTOR * part.limit_seconds) for part in parts]
    records = run(parts, out, options.budget, make_environment(out, options.rehearse))
    return summarize(records, out, options.rehearse, time.time() - started)


def summarize(records: list[dict[str, Any]], out: Path, is_rehearsal: bool, seconds: float) -> int:
    """Write gpu_check.json and gpu_check.txt, print the table and one JSON line; how many parts did not go through."""
    targets = targets_of(records, is_rehearsal)
    failed = [r["part"] for r in records if r["status"] != "ok"]
    whole = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "is_rehearsal": is_rehearsal,
        "seconds": round(seconds, 1),
        "failed": failed,
        "targets": targets,
        "parts": records,
    }
    (out / "gpu_check.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    text = render(whole)
    (out / "gpu_check.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    brief = {name: whole[name] for name in ("date", "is_rehearsal", "seconds", "failed")}
    brief["targets"] = {target["name"]: target["status"] for target in targets}
    print(json.dumps(brief | {"json": str(out / "gpu_check.json")}), flush=True)
    return min(len(failed), 125)


if __name__ == "__main__":
    sys.exit(main())
