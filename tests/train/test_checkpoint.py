"""Checkpoints: all or nothing on the disk, verified when read, falling back when damaged."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from sagc_fast.errors import CheckpointError
from sagc_fast.train import files
from sagc_fast.train.checkpoint import CheckpointStore, verify


def write_tensors(folder: Path) -> None:
    save_file({"w": torch.arange(2000.0)}, folder / "model.safetensors")


def saved(tmp_path, *steps, keep_last=3, **kwargs) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last)
    for step in steps:
        store.save(step, write_tensors, {"step": step}, **kwargs)
    return store


def names(store: CheckpointStore) -> list[str]:
    return sorted(p.name for p in store.folder.iterdir())


def test_saved_and_found_again(tmp_path):
    store = saved(tmp_path, 5, 10)
    latest = store.latest()
    assert (latest.step, latest.state) == (10, {"step": 10})
    assert verify(latest.path) is None
    assert names(store) == ["step-000005", "step-000010"]
    assert saved(tmp_path / "none").latest() is None


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    store = saved(tmp_path, 1, 2, 3, 4, keep_last=2, best_step=1)
    assert store.steps() == [1, 3, 4]


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: (p / "model.safetensors").write_bytes(b""),
        lambda p: os.truncate(p / "model.safetensors", 100),
        lambda p: (p / "model.safetensors").write_bytes(b"x" * (p / "model.safetensors").stat().st_size),
        lambda p: (p / "model.safetensors").unlink(),
        lambda p: (p / "manifest.json").unlink(),
        lambda p: (p / "manifest.json").write_text('{"format": 1'),
        lambda p: (p / "manifest.json").write_text("[]"),
        lambda p: (p / "state.json").write_text("{}"),
    ],
)
def test_a_damaged_newest_checkpoint_falls_back_and_says_so(tmp_path, caplog, damage):
    store = saved(tmp_path, 5, 10)
    damage(store.folder / "step-000010")
    assert store.latest().step == 5
    assert "step-000010 is damaged" in caplog.text
    assert "damaged-step-000010" in names(store)
    store.save(10, write_tensors, {"step": 10})
    assert store.latest().step == 10


def test_only_damaged_checkpoints_are_an_error_and_not_a_fresh_start(tmp_path):
    store = saved(tmp_path, 5)
    (store.folder / "step-000005" / "state.json").write_text("")
    with pytest.raises(CheckpointError, match="is damaged"):
        store.latest()


def test_leftovers_of_a_kill_are_ignored_and_cleared(tmp_path):
    store = saved(tmp_path, 5)
    (store.folder / ".writing-step-000010").mkdir()
    (store.folder / ".removing-step-000001").mkdir()
    assert store.latest().step == 5
    assert names(store) == ["step-000005"]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = saved(tmp_path, 5)
    store.save(5, write_tensors, {"step": 5, "again": True})
    assert store.latest().state["again"]


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "not writable")]
)
@pytest.mark.parametrize("place", ["tensors", "state", "fsync", "rename"])
def test_a_failing_write_leaves_the_previous_checkpoint(tmp_path, monkeypatch, code, reason, place):
    store = saved(tmp_path, 5)

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    if place == "state":
        monkeypatch.setattr(Path, "write_text", fail)
    elif place != "tensors":
        monkeypatch.setattr(os, place, fail)
    with pytest.raises(CheckpointError, match=reason) as caught:
        store.save(10, fail if place == "tensors" else write_tensors, {"step": 10})
    monkeypatch.undo()
    assert "step-000005 is intact" in str(caught.value)
    assert names(store) == ["step-000005"]
    assert store.latest().step == 5


def test_a_first_checkpoint_that_fails_says_that_there_is_none(tmp_path):
    def fail(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    with pytest.raises(CheckpointError, match=r"the disk is full; .*There is no checkpoint yet; --resume starts anew"):
        store.save(2, fail, {})
    assert store.latest() is None


def test_a_really_full_disk(tmp_path):
    """The system's own refusal, raised inside the safetensors library: a limit on file size stands for the full disk
    (mounting a small one needs root), with the signal that would kill the process turned off."""
    store = saved(tmp_path, 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written: .*ulimit -f.*step-000005 is intact"):
            store.save(10, lambda f: save_file({"w": torch.zeros(150_000)}, f / "model.safetensors"), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert store.latest().step == 5
    assert names(store) == ["step-000005"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_the_safetensors_library_reports_the_system_error_as_text(code):
    with pytest.raises(CheckpointError, match=r"the disk is full|read-only"), files.writing("X"):
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})")


def test_a_failure_that_is_not_the_disk_passes_through(tmp_path):
    store = saved(tmp_path, 5)

    def interrupt(folder):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(10, interrupt, {})
    assert names(store) == ["step-000005"]


def test_atomic_text_leaves_old_or_new(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    files.write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old"


def test_state_is_strict_json(tmp_path):
    with pytest.raises(ValueError):
        saved(tmp_path).save(1, write_tensors, {"x": float("nan")})
    assert json.loads(files.json_text({"é": 1})) == {"é": 1}
