"""The files a run writes: strict JSON lines, cut back to a checkpoint's sizes."""

from __future__ import annotations

import errno
import json
import os

import pytest

from sagc_fast.errors import CheckpointError
from sagc_fast.train.checkpoint import CheckpointStore
from sagc_fast.train.metrics import FILES, MetricsWriter
from sagc_fast.train.state import TrainState


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_strict_json(tmp_path):
    with MetricsWriter(tmp_path, {}) as writer:
        writer.write("metrics.jsonl", {"loss": float("nan"), "arms": {"4": [float("inf"), 1.0]}, "text": "é\n"})
    assert lines(tmp_path / "metrics.jsonl") == [{"loss": None, "arms": {"4": [None, 1.0]}, "text": "é\n"}]
    assert all((tmp_path / name).exists() for name in FILES)


def test_a_resumed_run_cuts_off_what_it_will_do_again(tmp_path):
    with MetricsWriter(tmp_path, {}) as writer:
        writer.write("metrics.jsonl", {"step": 1})
        offsets = writer.sync()
        writer.write("metrics.jsonl", {"step": 2})
        writer.write("lengths.jsonl", {"step": 2})
    with open(tmp_path / "metrics.jsonl", "a") as torn:
        torn.write('{"step": 3, "lo')
    with MetricsWriter(tmp_path, offsets) as writer:
        writer.write("metrics.jsonl", {"step": 2, "again": True})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2, "again": True}]
    assert lines(tmp_path / "lengths.jsonl") == []


def test_crlf_line_ends_lose_no_line(tmp_path, caplog):
    """The checkpoint's size counts LF; a copy with CRLF is longer, and cutting it there took the last whole line."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path, {}) as writer:
        for step in (1, 2):
            writer.write("metrics.jsonl", {"step": step, "text": "a\r\nb"})
        offsets = writer.sync()
        writer.write("metrics.jsonl", {"step": 3})
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with MetricsWriter(tmp_path, offsets) as writer:
        writer.write("metrics.jsonl", {"step": 3, "again": True})
    assert b"\r" not in path.read_bytes()
    assert lines(path)[:2] == [{"step": step, "text": "a\r\nb"} for step in (1, 2)]
    assert lines(path)[2:] == [{"step": 3, "again": True}]
    assert "CRLF" in caplog.text


def test_a_file_shorter_than_the_checkpoint_knows_is_said(tmp_path, caplog):
    with MetricsWriter(tmp_path, {"metrics.jsonl": 100}):
        pass
    assert "some lines are missing" in caplog.text


def test_what_an_older_checkpoint_has_not_seen_is_left_out_of_a_file_that_had_lost_lines(tmp_path, caplog):
    """Sizes alone kept later steps: a file that lost lines and grew again is as long at a later step."""
    path = tmp_path / "metrics.jsonl"
    state = TrainState(step=3, evaluated_step=2)
    with MetricsWriter(tmp_path, {}) as writer:
        for step in (1, 2, 3):
            writer.write("metrics.jsonl", {"step": step})
        state.files = writer.sync()
    path.write_text('{"step": 1}\n')
    with MetricsWriter(tmp_path, {"metrics.jsonl": 1000}) as writer:
        writer.write("metrics.jsonl", {"event": "eval", "step": 3})
        writer.write("metrics.jsonl", {"step": 4})
    with MetricsWriter(tmp_path, {"metrics.jsonl": 1000}, is_done=state.is_done) as writer:
        writer.write("metrics.jsonl", {"step": 4, "again": True})
    assert lines(path) == [{"step": 1}, {"step": 4, "again": True}]
    assert "2 lines of steps that are done again were left out" in caplog.text


def test_a_torn_last_line_is_cut_off_before_the_next_one(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    with MetricsWriter(tmp_path, {"metrics.jsonl": 1000}) as writer:
        writer.write("metrics.jsonl", {"step": 9})
        assert writer.sync()["metrics.jsonl"] == path.stat().st_size
    assert lines(path) == [{"step": 1}, {"step": 9}]
    assert "cut back to its last whole one" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(FILES)


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"\x00\xff garbage", []),
        (b'{"step": 1}\n\x00\x00\n{"step": 3}\n', [{"step": 1}, {"step": 3}]),
        (b"[1]\n", []),
    ],
)
def test_a_damaged_file_is_kept_aside_and_its_legible_lines_go_on(tmp_path, caplog, content, kept):
    path = tmp_path / "lengths.jsonl"
    path.write_bytes(content)
    (tmp_path / "damaged-1-lengths.jsonl").write_bytes(b"earlier")
    with MetricsWriter(tmp_path, {"lengths.jsonl": 1000}) as writer:
        writer.write("lengths.jsonl", {"step": 9})
    assert lines(path) == [*kept, {"step": 9}]
    assert (tmp_path / "damaged-1-lengths.jsonl").read_bytes() == b"earlier"
    assert (tmp_path / "damaged-2-lengths.jsonl").read_bytes() == content
    assert "damaged-2-lengths.jsonl" in caplog.text


@pytest.mark.parametrize(("code", "reason"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only")])
def test_a_disk_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, code, reason):
    def fail(*args):
        raise OSError(code, os.strerror(code))

    with MetricsWriter(tmp_path, {}) as writer:
        monkeypatch.setattr(writer, "_files", {"metrics.jsonl": FailingFile(fail)})
        with pytest.raises(CheckpointError, match=reason):
            writer.write("metrics.jsonl", {"step": 1})
    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(CheckpointError, match=reason):
        MetricsWriter(tmp_path, {})


def test_what_remains_is_said_as_it_is(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path / "checkpoints", 2)

    def fail(*args):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    with MetricsWriter(tmp_path, {}, what_remains=store.what_remains) as writer:
        monkeypatch.setattr(writer, "_files", {"metrics.jsonl": FailingFile(fail)})
        with pytest.raises(
            CheckpointError, match=r"raise it \(ulimit -f\)\. There is no checkpoint yet; --resume starts"
        ):
            writer.write("metrics.jsonl", {"step": 1})
        (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
        with pytest.raises(CheckpointError, match="step-000004 is intact; --resume continues from it"):
            writer.write("metrics.jsonl", {"step": 1})


class FailingFile:
    name = "metrics.jsonl"

    def __init__(self, fail):
        self.write = self.flush = self.close = fail
