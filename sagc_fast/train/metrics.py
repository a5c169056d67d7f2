"""What a run writes while it trains: metrics.jsonl, lengths.jsonl, timeline.jsonl; and what it shows on its boards.

Each file is append-only, one JSON object per line. A checkpoint stores the files' sizes; a resumed run cuts them back
to those sizes, so that the lines of steps that are done again do not stand twice. Sizes alone do not tell after a file
lost lines: it has grown again since, and the size that an older checkpoint knows then holds later steps. So every line
says its step, and what lies behind the checkpoint goes. A file that was damaged in the meantime is cut back to whole
lines, so that new ones do not stick to a torn one.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from sagc_fast.train.boards import Board, Boards
from sagc_fast.train.files import json_text, write_atomically, writing

logger = logging.getLogger(__name__)

FILES = ("metrics.jsonl", "lengths.jsonl", "timeline.jsonl")


class MetricsWriter:
    """Appends records and knows how far each file is.

    Args:
        folder: the run directory.
        offsets: bytes of each file that stay (from :meth:`sync`); a file that is not named starts empty.
        boards: where else the numbers are shown; closed with the files.
        what_remains: tells, when a file cannot be written, what the run can be continued from.
        is_done: whether a record belongs to what the run has behind it; others among those bytes are left out.
    """

    def __init__(
        self,
        folder: Path,
        offsets: Mapping[str, int],
        boards: Sequence[Board] = (),
        what_remains: Callable[[], str] = lambda: "",
        is_done: Callable[[Mapping[str, Any]], bool] = lambda record: True,
    ) -> None:
        self._folder, self._what_remains = folder, what_remains
        self._files = {}
        with writing(f"The metrics in {folder}"):
            for name in FILES:
                self._files[name] = _open_at(folder / name, offsets.get(name, 0), is_done)
        self._boards = Boards(boards)

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Append ``record`` to the file ``name``; NaN and infinities become null. Raises CheckpointError on a full
        disk."""
        with writing(str(self._folder / name), self._what_remains):
            self._files[name].write((json_text(_finite(record)) + "\n").encode("utf-8"))
            self._files[name].flush()

    def show(
        self, record: Mapping[str, Any], prefix: str, histograms: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """The numbers of ``record`` as scalars ``prefix/name`` at ``record["step"]`` on the boards, and histograms."""
        shown = {f"{prefix}/{name}": values for name, values in (histograms or {}).items()}
        self._boards.write(record["step"], dict(_numbers(record, prefix)), shown)

    def sync(self) -> dict[str, int]:
        """Wait until everything is on the disk; the size of each file in bytes."""
        with writing(f"The metrics in {self._folder}", self._what_remains):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            return {name: file.tell() for name, file in self._files.items()}

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            try:
                file.close()
            except OSError as error:  # the last write has failed already, and was reported
                logger.debug("closing %s: %s", file.name, error)
        self._boards.close()


def _open_at(path: Path, size: int, is_done: Callable[[Mapping[str, Any]], bool]) -> BinaryIO:
    """Open ``path`` to append behind its first ``size`` bytes; lines among them that are not legible are left out, and
    so are those of steps that will be done again."""
    if path.exists():
        _with_our_line_ends(path)
    present = path.stat().st_size if path.exists() else 0
    if present < size:
        logger.warning("%s has %d bytes where the checkpoint knows %d; some lines are missing", path, present, size)
    if present:
        with open(path, "r+b") as file:
            file.truncate(min(present, size))
        _mend(path)
        _leave_out_what_comes_again(path, is_done)
    return open(path, "ab")


def _with_our_line_ends(path: Path) -> None:
    """Turn CRLF, which an editor or a copy has put there, back into LF: the checkpoint's sizes count one byte a line
    end. No record holds a raw CR, because JSON escapes it."""
    content = path.read_bytes()
    if b"\r\n" in content:
        aside = path.with_name(path.name + ".tmp")
        aside.write_bytes(content.replace(b"\r\n", b"\n"))
        os.replace(aside, path)
        logger.warning("%s had CRLF line ends; they are LF again", path)


def _mend(path: Path) -> None:
    """Leave whole, legible lines alone in ``path``: a torn last line is cut off; a file with other damage is kept under
    another name."""
    lines = path.read_bytes().splitlines(keepends=True)
    legible = [line for line in lines if _record(line) is not None]
    if len(legible) == len(lines):
        return
    num_bytes = sum(map(len, legible))
    if legible == lines[:-1] and legible:
        os.truncate(path, num_bytes)
        logger.warning("%s ended in a torn line and was cut back to its last whole one, %d bytes", path, num_bytes)
        return
    aside = _free_name(path)
    os.rename(path, aside)
    path.write_bytes(b"".join(legible))
    logger.warning(
        "%s held %d lines that are no records; it is kept as %s, and the run goes on with the %d others",
        path, len(lines) - len(legible), aside.name, len(legible),
    )  # fmt: skip


def _leave_out_what_comes_again(path: Path, is_done: Callable[[Mapping[str, Any]], bool]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if is_done(_record(line))]
    if len(kept) < len(lines):
        write_atomically(path, b"".join(kept).decode("utf-8"))
        logger.warning("%s: %d lines of steps that are done again were left out", path, len(lines) - len(kept))


def _record(line: bytes) -> dict[str, Any] | None:
    """What a whole line holds; None for anything but a record."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _free_name(path: Path) -> Path:
    candidates = (path.with_name(f"damaged-{number}-{path.name}") for number in itertools.count(1))
    return next(candidate for candidate in candidates if not candidate.exists())


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def _numbers(record: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}/{key}")
        elif isinstance(value, (int, float)) and key != "step" and math.isfinite(value):
            yield f"{prefix}/{key}", float(value)
