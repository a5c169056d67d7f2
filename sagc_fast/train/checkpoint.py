"""Checkpoints that survive a kill at any moment: written aside, flushed to the disk, renamed, verified when read.

    checkpoints/step-000010/     config.json, model.safetensors, tokenizer files    loadable by transformers as it is
                                 optimizer.safetensors                              moments, and masters of bf16 weights
                                 length_history.json                                what the engine admits by
                                 state.json                                         everything else, see trainer.py
                                 manifest.json                                      size and SHA-256 of every file

The folder gets its name only when all of it is on the disk, so a folder that exists is complete; the manifest catches
what happens to it later. There is no random-generator state to save: all noise is a function of (seed, position).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagc_fast.errors import CheckpointError
from sagc_fast.profiling import ranged
from sagc_fast.train.files import checksum, fsync_file, fsync_folder, json_text, write_atomically, writing

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})$")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    step: int
    state: dict[str, Any]


class CheckpointStore:
    """The ``checkpoints`` folder of a run.

    Args:
        folder: made when the first checkpoint is saved.
        keep_last: newest checkpoints that are kept.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder = Path(folder)
        self.keep_last = keep_last

    @ranged("checkpoint")
    def save(
        self, step: int, write_tensors: Callable[[Path], None], state: dict[str, Any], best_step: int | None = None
    ) -> Path:
        """Write the checkpoint of ``step`` and drop the ones no longer kept (``best_step`` always is).

        ``write_tensors(folder)`` puts weights and optimizer into the folder; ``state`` becomes state.json.
        Raises CheckpointError when the disk is full or read-only; earlier checkpoints are untouched then.
        """
        target = self.folder / f"step-{step:06d}"
        aside = self.folder / f".writing-{target.name}"
        with writing(f"Checkpoint {target}", lambda: self.what_remains(step)):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir()
                write_tensors(aside)
                (aside / STATE).write_text(json_text(state, indent=1), encoding="utf-8")
                _seal(aside, step)
                if target.exists():
                    self._remove(target)
                os.rename(aside, target)
                fsync_folder(self.folder)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
        self._prune({step, best_step})
        return target

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies; None when there is none at all.

        A damaged one is set aside as ``damaged-step-...`` with a warning, and the one before it is taken. Raises
        CheckpointError when there are checkpoints and every one is damaged.
        """
        self._clear_leftovers()
        steps = self.steps()
        for step in reversed(steps):
            path = self.folder / f"step-{step:06d}"
            problem = verify(path)
            if problem is None:
                return Checkpoint(path, step, json.loads((path / STATE).read_text(encoding="utf-8")))
            logger.warning("checkpoint %s is damaged (%s); falling back to the one before it", path, problem)
            shutil.rmtree(path.with_name(f"damaged-{path.name}"), ignore_errors=True)
            with writing(f"Damaged checkpoint {path}"):
                os.rename(path, path.with_name(f"damaged-{path.name}"))
        if steps:
            raise CheckpointError(
                f"Every checkpoint in {self.folder} is damaged; start the run anew in another run_dir, "
                "or restore one from a backup."
            )
        return None

    def what_remains(self, failed_step: int | None = None) -> str:
        """What a run that cannot write can be continued from, as a sentence."""
        steps = [step for step in self.steps() if step != failed_step]
        if steps:
            return f"Checkpoint step-{max(steps):06d} is intact; --resume continues from it."
        return "There is no checkpoint yet; --resume starts anew."

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending, verified or not."""
        if not self.folder.is_dir():
            return []
        return sorted(int(m[1]) for p in self.folder.iterdir() if (m := _NAME.match(p.name)))

    def _prune(self, keep: set[int | None]) -> None:
        kept = {*self.steps()[-self.keep_last :], *keep}
        for step in self.steps():
            if step not in kept:
                self._remove(self.folder / f"step-{step:06d}")

    def _remove(self, path: Path) -> None:
        """Rename first, so that a kill in between leaves no checkpoint with half its files."""
        doomed = path.with_name(f".removing-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _clear_leftovers(self) -> None:
        if self.folder.is_dir():
            for pattern in (".writing-*", ".removing-*"):
                for path in self.folder.glob(pattern):
                    shutil.rmtree(path, ignore_errors=True)


def _seal(folder: Path, step: int) -> None:
    """Flush every file, then write the manifest."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        fsync_file(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": checksum(path)}
    write_atomically(folder / MANIFEST, json_text({"format": FORMAT, "step": step, "files": files}, indent=1))


def verify(path: Path) -> str | None:
    """What is wrong with the checkpoint at ``path``; None when every file has the size and checksum of the manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}, this version reads {FORMAT}"
        for name, entry in manifest["files"].items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
            if checksum(file) != entry["sha256"]:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None if STATE in manifest["files"] else f"{STATE} is missing"
