"""Writing files so that a crash leaves the old or the new one, and so that a full disk ends in one clear sentence."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sagc_fast.errors import CheckpointError

_REASONS = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "it would be larger than the limit on file sizes; raise it (ulimit -f)",
    errno.EROFS: "the file system is read-only; choose another run_dir",
    errno.EACCES: "the folder is not writable; change its permissions or choose another run_dir",
    errno.ENOTDIR: "a part of its path is a file and no directory; choose another run_dir",
    errno.EPERM: "the folder is not writable; change its permissions or choose another run_dir",
}


@contextlib.contextmanager
def writing(what: str, consequence: str | Callable[[], str] = "") -> Iterator[None]:
    """Turns whatever goes wrong on the disk into a CheckpointError: ``what`` cannot be written, why, what remains."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        remains = consequence if isinstance(consequence, str) else consequence()
        raise CheckpointError(f"{what} cannot be written: {_reason(error)}.{remains and ' ' + remains}") from error


def _reason(error: Exception) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code is None:  # the safetensors library reports the system's error as text
        code = next((c for c in _REASONS if f"os error {c}" in str(error)), None)
    return _REASONS.get(code, str(getattr(error, "strerror", None) or error))


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8): a reader or a crash sees the old or the new content, never a part."""
    aside = path.with_name(f".{path.name}.writing")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    fsync_folder(path.parent)


def fsync_file(path: Path) -> None:
    """Wait until the file's content is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Wait until the folder's entries (new and renamed files) are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """SHA-256 of the file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_text(value: Any, **options: Any) -> str:
    """Strict JSON: a NaN or infinity is a bug here and raises ValueError."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, **options)
