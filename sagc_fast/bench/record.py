"""One benchmark's outcome as one JSON line, and the history file that keeps such lines. Standard library and numpy."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from sagc_fast.bench.machine import commit, describe_machine
from sagc_fast.bench.stats import summarize
from sagc_fast.errors import ConfigError

SCHEMA = 1
DIGITS = 6


def new_record(bench: str, settings: dict[str, Any], threads: int, label: str | None) -> dict[str, Any]:
    """The frame of a record. ``settings`` are what two records must share to be comparable.

    Fields: schema, bench, label, commit, time (UTC), machine, settings, ceilings, results, absent, notes. ``results``
    holds one :func:`result` per thing that was measured; ``absent`` names peers that were not there.
    """
    return {
        "schema": SCHEMA,
        "bench": bench,
        "label": label,
        "commit": commit(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(threads),
        "settings": settings,
        "ceilings": {},
        "results": [],
        "absent": [],
        "notes": [],
    }


def metric(
    values: Sequence[float], unit: str, better: Literal["higher", "lower"], is_primary: bool = False
) -> dict[str, Any]:
    """The runs of one metric with median and quartiles; ``compare`` looks at primary ones unless told otherwise."""
    summary = summarize(values)
    return {
        "unit": unit,
        "better": better,
        "primary": is_primary,
        "median": rounded(summary.median),
        "q25": rounded(summary.q25),
        "q75": rounded(summary.q75),
        "values": [rounded(value) for value in values],
    }


def result(name: str, metrics: dict[str, dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """What was measured of ``name``; ``facts`` are figures that do not vary from run to run, and versions."""
    return {"name": name, "metrics": metrics, "facts": facts}


def rounded(value: float) -> float:
    """To six significant digits: histories stay readable, and no run is told to more than that."""
    return float(f"{value:.{DIGITS}g}")


def open_history(path: Path) -> TextIO:
    """The file, made with its folders, to append to; ConfigError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--out {path} cannot be written: {reason}; name a file such as bench.jsonl.") from error


def append_history(path: Path, record: dict[str, Any]) -> None:
    """Add one line; ConfigError when the file cannot be written."""
    with open_history(path) as history:
        history.write(json.dumps(record) + "\n")


def read_history(path: Path) -> list[dict[str, Any]]:
    """All records of a history file; ConfigError names a line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise ConfigError(
            f"Benchmark history {path} cannot be read: {reason}; give a file that `sagc-fast bench --out` wrote."
        ) from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not {"bench", "settings", "results"} <= record.keys():
            raise ConfigError(
                f"{path} line {number} is no benchmark record; it must come from `sagc-fast bench --out`."
            )
        if record.get("schema") != SCHEMA:
            raise ConfigError(f"{path} line {number} has schema {record.get('schema')}; this version reads {SCHEMA}.")
        records.append(record)
    if not records:
        raise ConfigError(f"Benchmark history {path} is empty; measure with `sagc-fast bench ... --out {path}` first.")
    return records
