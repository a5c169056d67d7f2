"""What a part of the check says: rows, written one JSON line at a time so that none is lost with the process.

A row is one figure: ``what`` (words), ``value`` and ``unit``; where it has one, ``ceiling`` in the same unit and
``share`` of it; ``beside`` (a second figure in words); and for the targets ``target`` with its ``ratio``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROWS_VARIABLE = "GPU_CHECK_ROWS"
LIMIT_VARIABLE = "GPU_CHECK_LIMIT"
OUT_VARIABLE = "GPU_CHECK_OUT"
RESULTS_VARIABLE = "GPU_CHECK_RESULTS"
REHEARSAL_VARIABLE = "GPU_CHECK_REHEARSAL"
DUMP_SECONDS = 2.0
"""So long before the limit, a part writes where all its threads stand."""


def is_rehearsal() -> bool:
    return os.environ.get(REHEARSAL_VARIABLE) == "1"


def out_folder() -> Path:
    return Path(os.environ.get(OUT_VARIABLE, "build/gpu_check"))


MOST_RESULT_BYTES = 15 * 2**20
"""A larger file stays behind: what comes back from a machine elsewhere is bounded."""


def keep_file(path: Path) -> str:
    """Copy a file to the results, of which there are few; its name there, or why it stayed behind."""
    folder = Path(os.environ.get(RESULTS_VARIABLE, out_folder()))
    if path.stat().st_size > MOST_RESULT_BYTES:
        return f"{path.name} of {path.stat().st_size / 2**20:.0f} MiB is too large to keep"
    if folder.resolve() != path.parent.resolve():
        shutil.copyfile(path, folder / path.name)
    return path.name


def row(
    what: str,
    value: float | str | None,
    unit: str = "",
    *,
    ceiling: float | None = None,
    beside: str = "",
    target: str = "",
    ratio: float | None = None,
) -> None:
    """Write one row. ``value`` None is a figure that could not be measured; ``beside`` says why."""
    record: dict[str, Any] = {"what": what, "value": value, "unit": unit}
    if ceiling and isinstance(value, (int, float)):
        record |= {"ceiling": ceiling, "share": value / ceiling}
    record |= {name: x for name, x in (("beside", beside), ("target", target), ("ratio", ratio)) if x not in ("", None)}
    line = json.dumps(record)
    print(line, flush=True)
    if path := os.environ.get(ROWS_VARIABLE):
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last one may be cut off by the end of its process."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


class Outcome:
    """Counts the sections of a part that failed."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    @contextlib.contextmanager
    def section(self, what: str) -> Iterator[None]:
        """A block whose failure becomes a row and hides nothing that follows."""
        try:
            yield
        except Exception as error:
            import traceback

            traceback.print_exc()
            words = " ".join(str(error).split())[:300] or type(error).__name__
            self.errors.append(f"{what}: {words}")
            row(what, None, beside=f"failed: {type(error).__name__}: {words}")


@contextlib.contextmanager
def part() -> Iterator[Outcome]:
    """The body of a part: exits 1 when a section failed, and dumps all threads shortly before its time is up."""
    limit = float(os.environ.get(LIMIT_VARIABLE, "inf"))
    if DUMP_SECONDS < limit < float("inf"):
        faulthandler.dump_traceback_later(limit - DUMP_SECONDS)
    outcome = Outcome()
    yield outcome
    faulthandler.cancel_dump_traceback_later()
    if outcome.errors:
        print(outcome.errors[0])
        sys.exit(1)
