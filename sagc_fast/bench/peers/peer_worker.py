"""The other end of sagc_fast.bench.worker: load once, then one timed run per line. Standard library only.

What engines print goes to stderr; the real stdout carries answers alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[dict[str, Any]], dict[str, Any]]
"""One run of what the request asks for. A rollout's request: {"prompts": token ids, "lengths": completion lengths to
force, one list per prompt, "seed"}; its answer: {"lengths": what came out, and counts: "steps", "row_steps" (rows
computed, over all steps, and drafted tokens), "prefill_tokens"}, without those that an engine does not tell.
wall_seconds and cpu_seconds of the whole run are added; an answer that has them (its run had to set something up first)
keeps its own."""


def serve(load: Callable[[dict[str, Any]], Run], versions: tuple[str, ...]) -> None:
    """``load`` gets the settings of the first line. For rollouts: model (folder), dtype, threads, max_rows (completions
    at once), max_context (tokens of the longest), kv_gb (room for all of them, shared or not)."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    started = time.perf_counter()
    run = load(settings)
    _answer(
        answers,
        {
            "load_seconds": time.perf_counter() - started,
            "load_rss_bytes": _status_bytes("VmRSS"),
            "versions": {name: _version(name) for name in versions},
        },
    )
    for line in sys.stdin:
        request = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        result = run(request)
        elapsed = {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        _answer(answers, {**elapsed, **result, "peak_rss_bytes": _status_bytes("VmHWM")})


def _answer(answers: Any, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _status_bytes(field: str) -> int | None:
    """Memory of this process from the kernel's bookkeeping; None where there is none."""
    try:
        with open("/proc/self/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith(f"{field}:")), None)
    except OSError:
        return None
