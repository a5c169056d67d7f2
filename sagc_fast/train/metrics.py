"""What a run writes while it trains: metrics.jsonl, lengths.jsonl, timeline.jsonl; and what it shows on its boards.

Each file is append-only, one JSON object per line. A checkpoint stores the files' sizes; a resumed run cuts them back
to those sizes, so that the lines of steps that are done again do not stand twice.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sagc_fast.train.boards import Board, Boards
from sagc_fast.train.files import json_text, writing

logger = logging.getLogger(__name__)

FILES = ("metrics.jsonl", "lengths.jsonl", "timeline.jsonl")


class MetricsWriter:
    """Appends records and knows how far each file is.

    Args:
        folder: the run directory.
        offsets: bytes of each file that stay (from :meth:`sync`); a file that is not named starts empty.
        boards: where else the numbers are shown; closed with the files.
    """

    def __init__(self, folder: Path, offsets: Mapping[str, int], boards: Sequence[Board] = ()) -> None:
        self._folder = folder
        self._files = {}
        with writing(f"The metrics in {folder}"):
            for name in FILES:
                self._files[name] = _open_at(folder / name, offsets.get(name, 0))
        self._boards = Boards(boards)

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Append ``record`` to the file ``name``; NaN and infinities become null. Raises CheckpointError on a full
        disk."""
        with writing(str(self._folder / name), "--resume continues from the newest checkpoint."):
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
        with writing(f"The metrics in {self._folder}"):
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


def _open_at(path: Path, size: int):
    file = open(path, "ab")  # noqa: SIM115 (stays open for the run)
    present = file.tell()
    if present < size:
        logger.warning("%s has %d bytes where the checkpoint knows %d; some lines are missing", path, present, size)
    elif present > size:
        file.truncate(size)
        file.seek(size)
    return file


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
