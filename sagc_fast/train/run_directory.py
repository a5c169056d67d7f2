"""The folder of a run: made once, locked while in use, described by its own files, continued only as what it was.

config.yaml  the complete configuration      versions.json  packages, machine, every start of the run
log.txt      everything that was said        the rest: metrics.py, checkpoint.py
"""

from __future__ import annotations

import datetime
import fcntl
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import sagc_fast
from sagc_fast.config import TrainConfig, changed_fields
from sagc_fast.config_parsing import leaves, read_yaml
from sagc_fast.errors import CheckpointError, ConfigError
from sagc_fast.train.files import json_text, write_atomically, writing

logger = logging.getLogger(__name__)

FREE_TO_CHANGE = ("steps", "run_dir", "checkpoint.", "metrics.", "reward.workers")
"""Fields (or sections) that a resumed run may change, because no step depends on them."""
NOTED = ("threads",)
"""Fields that a resumed run may change, with a note, as it may change machines: gradients have been the same to the bit
with one thread and with two, but no library of matrix products promises it."""
MADE_AT_START = ("config.yaml", "versions.json", "log.txt", ".lock", "tensorboard")
END = "...\n"
"""YAML's own mark of a document's end. Every field has a default or a line, so a file cut at the end of a line reads as
a configuration too: another one."""
PACKAGES = ("torch", "transformers", "numpy", "numba", "safetensors")


class RunDirectory:
    """An open run directory. ``close`` gives the lock back.

    Args:
        config: of this start; written to config.yaml.
        resume: continue what is there; an empty or missing folder starts anew.
        force: resume although fields outside FREE_TO_CHANGE differ.
        num_processes: that train together; noted in versions.json.

    Raises CheckpointError when the folder holds a run (and ``resume`` is not set), is in use or cannot be written;
    ConfigError when fields differ.
    """

    def __init__(self, config: TrainConfig, resume: bool = False, force: bool = False, num_processes: int = 1) -> None:
        self.path = Path(config.run_dir)
        self._num_processes = num_processes
        self._lock = None
        self._log: logging.Handler | None = None
        self.is_to_be_resumed(self.path, resume)
        with writing(f"The run directory {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        try:
            is_resumed = _has_begun(self.path) and (self.path / "config.yaml").is_file()
            notes = self._accept(config, force) if is_resumed else []
            with writing(f"The run directory {self.path}"):
                write_atomically(self.path / "config.yaml", config.to_yaml() + END)
                self._log = _log_file(self.path / "log.txt")
                self._write_versions(config)
        except BaseException:
            self.close()
            raise
        for note in notes:
            logger.warning(note)

    @staticmethod
    def is_to_be_resumed(path: str | Path, resume: bool) -> bool:
        """True when ``path`` holds a run and ``resume`` is set. Raises CheckpointError when it holds anything and
        ``resume`` is not set, and when it is a file. What a start that failed has left behind is nothing."""
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise CheckpointError(
                f"The run directory {path} is a file and not a directory; choose another with --run-dir."
            )
        if not _has_begun(path):
            return False
        if not resume:
            raise CheckpointError(
                f"The run directory {path} exists; continue it with --resume, or choose another with --run-dir."
            )
        return (path / "config.yaml").is_file()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _accept(self, config: TrainConfig, force: bool) -> list[str]:
        """Compare with the stored configuration; what to tell the user about it."""
        stored = read_stored(self.path / "config.yaml")
        changed = {k: v for k, v in changed_fields(stored, config).items() if not k.startswith(FREE_TO_CHANGE)}
        if not changed:
            return []
        listed = ", ".join(f"{name} ({old!r} -> {new!r})" for name, (old, new) in changed.items())
        if set(changed) <= set(NOTED):
            return [f"resuming with {listed}: bits may differ from an uninterrupted run"]
        if not force:
            raise ConfigError(
                f"The configuration differs from that of {self.path} in {listed}; resume with the old values, "
                "start a new run, or pass --force."
            )
        return [f"resuming with a changed configuration: {listed}"]

    def _take_lock(self) -> None:
        self._lock = open(self.path / ".lock", "a")  # noqa: SIM115 (held for the run)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise CheckpointError(
                f"Another process is training in {self.path}; wait for it or choose another with --run-dir."
            ) from None

    def _write_versions(self, config: TrainConfig) -> None:
        path = self.path / "versions.json"
        now = describe_environment(config, self._num_processes)
        starts = []
        before = _read_versions(path)
        if before is not None:
            starts = before.pop("starts")
            differ = sorted(k for k in now if before.get(k) != now[k])
            if differ:
                logger.warning(
                    "this run was started elsewhere (%s differ): bits may differ from an uninterrupted run",
                    ", ".join(differ),
                )
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        starts.append({"time": started, "command": shlex.join(sys.argv)})
        write_atomically(path, json_text({**now, "starts": starts}, indent=1))

    def close(self) -> None:
        if self._log is not None:
            logging.getLogger("sagc_fast").removeHandler(self._log)
            self._log.close()
            self._log = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _has_begun(path: Path) -> bool:
    """Whether a folder holds more than a start that failed leaves behind: a record, a checkpoint, anything not ours."""
    if not path.is_dir():
        return False
    if not (path / "config.yaml").is_file():
        return any(path.iterdir())
    others = (entry for entry in path.iterdir() if entry.name not in MADE_AT_START)
    return any(entry.is_dir() or entry.stat().st_size > 0 for entry in others)


def read_stored(path: Path) -> TrainConfig:
    """The config.yaml of a run directory. Raises ConfigError naming the file, whatever is wrong with it."""
    try:
        config = TrainConfig.from_yaml(path)
        _check_whole(path, config)
        return config
    except ConfigError as error:
        raise ConfigError(
            f"{path} is damaged ({str(error).rstrip('.')}); put the configuration back that the run was started with, "
            "or start a new run."
        ) from None


def _check_whole(path: Path, config: TrainConfig) -> None:
    """Raises ConfigError for a file without its last line that lacks all options from some place on. (Options that are
    missing in the middle, or from a file with its last line, are those of another version.)"""
    if path.read_text(encoding="utf-8").endswith(END):
        return
    stored = {name for name, _ in leaves(read_yaml(path))}
    names = [name for name, _ in leaves(config.to_dict())]
    missing = [name for name in names if name not in stored]
    if missing and missing == names[names.index(missing[0]) :]:
        raise ConfigError(f"it ends early: {missing[0]} and what follows are missing")


def _read_versions(path: Path) -> dict[str, Any] | None:
    """What an earlier start noted; None when it noted nothing, or nothing legible. Nothing in a run depends on it."""
    if not path.is_file():
        return None
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(before["starts"], list):
            return before
    except (ValueError, KeyError, TypeError):
        pass
    logger.warning("%s is not legible and is written anew; whether packages have changed cannot be said", path)
    return None


def describe_environment(config: TrainConfig, num_processes: int = 1) -> dict[str, Any]:
    """What the bits of a run depend on beside its configuration: packages, interpreter, machine, commit, processes."""
    return {
        "sagc_fast": sagc_fast.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "seed": config.seed,
        "processes": num_processes,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the source tree that is running; None for an installed package."""
    folder = Path(sagc_fast.__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


class _QuietFileHandler(logging.FileHandler):
    """A log that cannot be written (full disk) must not stop or clutter the run; the checkpoint will say it."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        pass


def _log_file(path: Path) -> logging.Handler:
    handler = _QuietFileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.INFO)
    root = logging.getLogger("sagc_fast")
    root.addHandler(handler)
    if root.getEffectiveLevel() > logging.INFO:
        root.setLevel(logging.INFO)
    return handler
