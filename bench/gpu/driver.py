"""Runs the parts of the GPU check stage by stage, each in a process of its own with a time limit, and sums up.

Standard library only, so that it ends with its table whatever is missing or broken. A part writes its rows as it goes
(report.py): one that fails or is ended keeps what it had measured, and gets one more row that says why. Stages stand in
the order of their worth; with every part at its limit all of them fit the budget.

The results are a handful of files that are written anew behind every stage, so that a machine that is taken away, or a
command that is ended, leaves what there was; everything else lies in a folder of its own that goes at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "bench") not in sys.path:
    sys.path.insert(0, str(ROOT / "bench"))

from gpu import report  # noqa: E402
from gpu.table import render, targets_of  # noqa: E402

BUDGET_SECONDS = 455.0
"""Of all stages: 8 minutes, less the first look for a GPU, parts that have to be killed, and the table."""
LOOK_SECONDS, LOOK_LIMIT_SECONDS = 20.0, 150.0
"""What the first look may take before it shortens the budget, and before it is given up: on a machine that was started
for this, loading torch for the first time reads gigabytes."""
MOST_SPARE_FACTOR = 2.0
"""A part may take so many times its limit where the parts before it took less than theirs."""
REHEARSAL_FACTOR = 4.0
"""Limits and budget of a rehearsal, which takes minutes of CPU, are so many times as long: the machine may be busy."""
LEAST_SECONDS = 8.0
"""A stage is not begun with less than this left."""
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
    expected_seconds: float = 0.0
    """On an H200 with 16 cores, by estimate; documentation (docs/gpu.md)."""
    is_rehearsed: bool = True
    """False where a rehearsal would run the very same lines once more."""


STAGES: tuple[tuple[Part, ...], ...] = (
    # Work of the host: nothing is measured here, so all of it runs at once.
    (
        Part("machine", ("gpu.machine",), 40, 15),
        Part("build", ("gpu.build",), 60, 25),
        Part("warm", ("gpu.warm",), 100, 35),
        Part("tests", ("gpu.tests",), 112, 80),
    ),
    (Part("ceilings", ("gpu.ceilings",), 26, 18),),
    (Part("rollout 3B", ("gpu.rollout", "3B"), 120, 110),),
    (Part("kernels", ("gpu.kernels",), 46, 35),),
    (Part("step", ("gpu.step", "3B", "0.5B"), 35, 22),),
    (Part("rollout 0.5B", ("gpu.rollout", "0.5B"), 41, 40, is_rehearsed=False),),
    (Part("sagc", ("gpu.sagc",), 35, 25),),
    (Part("nsight", ("gpu.nsight",), 40, 35),),
)
"""The parts of a stage run at the same time."""


def run(
    stages: Iterable[Sequence[Part]], work: Path, budget_seconds: float, environment: dict[str, str], keep: Any = None
) -> list[dict[str, Any]]:
    """Every part's record: name, status (``ok``, ``failed``, ``out of time``, ``left out``), seconds, rows.

    ``keep`` is called with the records so far behind every stage.
    """
    started = time.monotonic()
    records: list[dict[str, Any]] = []
    stages = list(stages)
    for index, stage in enumerate(stages):
        left = budget_seconds - (time.monotonic() - started)
        spare = left - sum(max(part.limit_seconds for part in later) for later in stages[index:])
        if left < LEAST_SECONDS:
            records += [
                {"part": part.name, "status": "left out", "seconds": 0.0, "rows": [],
                 "error": f"the budget of {budget_seconds:.0f} s was used up"}
                for part in stage
            ]  # fmt: skip
            continue
        print(f"[{time.monotonic() - started:5.0f} s] {', '.join(part.name for part in stage)}", flush=True)
        with ThreadPoolExecutor(len(stage)) as pool:
            jobs = [pool.submit(run_part, p, work, limit_of(p, left, spare), environment) for p in stage]
            done = [job.result() for job in jobs]
        for record in done:
            if record["status"] != "ok":
                print(f"          {record['part']} {record['status']}: {record['error']}", flush=True)
        records += done
        if keep is not None:
            keep(records)
    return records


def limit_of(part: Part, left_seconds: float, spare_seconds: float) -> float:
    """Its own limit, longer by what earlier parts did not use (``spare``: what is left beyond the limits of all that
    follow), so that no later part pays for it."""
    longest = min(part.limit_seconds + max(0.0, spare_seconds), MOST_SPARE_FACTOR * part.limit_seconds)
    return min(longest, left_seconds)


def run_part(part: Part, work: Path, limit_seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """One part in a process group of its own, which is ended whole when the limit is reached."""
    rows_path, log_path = work / "rows" / f"{_stem(part.name)}.jsonl", work / "logs" / f"{_stem(part.name)}.txt"
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


def _stem(name: str) -> str:
    return name.replace(" ", "_")


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


def make_environment(work: Path, out: Path, is_rehearsal: bool) -> dict[str, str]:
    """What the parts run under: the package as a tree of links, since nothing is installed; no network."""
    site = link_package(work / "site")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(site), str(ROOT / "bench"), os.environ.get("PYTHONPATH", ""))).rstrip(":"),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "PASSIVE",
        report.OUT_VARIABLE: str(work),
        report.RESULTS_VARIABLE: str(out),
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


SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Growing caches of the peer fragment the memory otherwise. Not every virtual machine serves what it takes."""
LOOK = """
import sys, torch
if not torch.cuda.is_available():
    sys.exit(3)
print("there is a GPU", flush=True)
x, graph = torch.ones(2**28, device="cuda"), torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    y = x * 2
graph.replay()
sys.exit(0 if y[-1].item() == 2 else 4)
"""


def look_for_gpu() -> tuple[bool, dict[str, str]]:
    """Whether torch sees a GPU, and what to set for its memory: expandable segments where they are served, to an
    allocation and to a graph. Asked of another process, so that this one never holds the device."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOOK], capture_output=True, cwd=ROOT, env=os.environ | SEGMENTS,
            timeout=LOOK_LIMIT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return b"there is a GPU" in (error.stdout or b""), {}
    return b"there is a GPU" in done.stdout, SEGMENTS if done.returncode == 0 else {}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu_check.sh", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="every part on the CPU with tiny shapes")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="parts whose name begins with a WORD")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="S",
        help=f"seconds of all stages; default: {BUDGET_SECONDS:.0f} and a little less"
        " where the first look for a GPU takes long",
    )
    default = Path(os.environ.get("OUT") or ROOT / "build/gpu_check")
    parser.add_argument("--out", type=Path, default=default, metavar="DIR", help="default: $OUT or build/gpu_check")
    options = parser.parse_args(arguments)
    words = None if options.only is None else tuple(options.only)
    stages = [[p for p in stage if words is None or p.name.startswith(words)] for stage in STAGES]
    if not any(stages):
        names = ", ".join(part.name for stage in STAGES for part in stage)
        parser.error(f"--only {' '.join(options.only)} names no part; they are {names}.")
    looked = time.monotonic()
    has_gpu, memory = (False, {}) if options.rehearse else look_for_gpu()
    late = max(0.0, time.monotonic() - looked - LOOK_SECONDS)
    if options.budget is None:
        options.budget = BUDGET_SECONDS - late
    if not options.rehearse and not has_gpu:
        print("torch sees no CUDA GPU here; bench/gpu_check.sh --rehearse shows the check on the CPU.", file=sys.stderr)
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    if options.rehearse:  # one part at a time: the cores are few and may be busy
        options.budget *= REHEARSAL_FACTOR
        stages = [
            [replace(part, limit_seconds=REHEARSAL_FACTOR * part.limit_seconds)]
            for stage in stages
            for part in stage
            if part.is_rehearsed
        ]
    work = Path(tempfile.mkdtemp(prefix="gpu_check-"))
    try:
        environment = make_environment(work, out, options.rehearse) | memory

        def keep(records: list[dict[str, Any]]) -> None:
            write_results(records, work, out, options.rehearse, time.time() - started)

        records = run(filter(None, stages), work, options.budget, environment, keep)
        return summarize(write_results(records, work, out, options.rehearse, time.time() - started), out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_results(
    records: list[dict[str, Any]], work: Path, out: Path, is_rehearsal: bool, seconds: float
) -> dict[str, Any]:
    """gpu_check.json, gpu_check.txt and logs.txt with what there is so far; returns what the JSON holds."""
    whole = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "is_rehearsal": is_rehearsal,
        "seconds": round(seconds, 1),
        "failed": [r["part"] for r in records if r["status"] != "ok"],
        "targets": targets_of(records, is_rehearsal),
        "parts": records,
    }
    (out / "gpu_check.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    (out / "gpu_check.txt").write_text(render(whole) + "\n", encoding="utf-8")
    with (out / "logs.txt").open("w", encoding="utf-8") as file:
        for record in records:
            path = work / "logs" / f"{_stem(record['part'])}.txt"
            if path.exists():
                said = path.read_text(encoding="utf-8", errors="replace")
                file.write(f"======== {record['part']} ({record['status']})\n{said}\n")
    return whole


def summarize(whole: dict[str, Any], out: Path) -> int:
    """Print the table and one JSON line; how many parts did not go through."""
    print(render(whole))
    brief = {name: whole[name] for name in ("date", "is_rehearsal", "seconds", "failed")}
    brief["targets"] = {target["name"]: target["status"] for target in whole["targets"]}
    print(json.dumps(brief | {"json": str(out / "gpu_check.json")}), flush=True)
    return min(len(whole["failed"]), 125)


if __name__ == "__main__":
    sys.exit(main())
