"""The run directory: taken once, described by its own files, resumed only as what it was."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sagc_fast.config import TrainConfig
from sagc_fast.errors import CheckpointError, ConfigError
from sagc_fast.train.run_directory import RunDirectory, read_stored


def opened(config: TrainConfig, **kwargs) -> None:
    """Open, leave a record as a run does, close."""
    with RunDirectory(config, **kwargs) as directory:
        (directory.path / "metrics.jsonl").write_text("{}\n")


def test_it_describes_itself(tiny):
    config = tiny()
    with RunDirectory(config) as directory:
        assert TrainConfig.from_yaml(directory.path / "config.yaml") == config
        versions = json.loads((directory.path / "versions.json").read_text())
    assert versions["torch"].startswith("2.")
    assert versions["seed"] == config.seed
    assert len(versions["starts"]) == 1
    opened(config, resume=True)
    assert len(json.loads((directory.path / "versions.json").read_text())["starts"]) == 2


def test_a_directory_that_exists_names_both_remedies(tiny):
    config = tiny()
    opened(config)
    with pytest.raises(CheckpointError, match=r"exists; continue it with --resume, or choose another with --run-dir"):
        opened(config)


def test_an_empty_directory_may_be_used_and_a_foreign_one_not(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    opened(tiny())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match="exists"):
        opened(tiny(run_dir=str(tmp_path / "other")))


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_in_its_place_is_said(tiny, resume):
    config = tiny()
    Path(config.run_dir).write_text("")
    with pytest.raises(CheckpointError, match="is a file and not a directory; choose another with --run-dir"):
        RunDirectory(config, resume=resume)
    with pytest.raises(CheckpointError, match="a part of its path is a file"):
        RunDirectory(config.with_overrides([f"run_dir={config.run_dir}/below"]), resume=resume)


@pytest.mark.parametrize("text", ["", "model:\n  path: x\ntask:\n  na", "steps: [", "model: {path: x}\ntask: {name: }"])
def test_a_damaged_configuration_is_named(tiny, text):
    config = tiny()
    opened(config)
    (Path(config.run_dir) / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run/config.yaml is damaged \(.*\); put the configuration back"):
        RunDirectory(config, resume=True)


def test_a_configuration_cut_at_the_end_of_a_line_is_not_another_configuration(tiny):
    """It reads, with defaults where lines are gone; the last line says that it is whole."""
    config = tiny()
    opened(config)
    path = Path(config.run_dir) / "config.yaml"
    lines = path.read_text().splitlines(keepends=True)
    for count in range(1, len(lines) - 1):
        path.write_text("".join(lines[:count]))
        with pytest.raises(ConfigError, match=r"config.yaml is damaged"):
            read_stored(path)
    path.write_text("".join(lines[:-2]))
    with pytest.raises(ConfigError, match=r"it ends early: (\S+) and what follows are missing\); put"):
        read_stored(path)
    path.write_text("".join(lines[:-1]))  # the mark alone is gone
    assert read_stored(path) == config
    path.write_text("".join(lines[:-2] + lines[-1:]))  # another version's, without the last option
    read_stored(path)
    older = [line for line in lines[:-1] if not line.lstrip().startswith("graphs:")]
    path.write_text("".join(older))  # a version's that knew neither the mark nor an option in the middle
    assert len(older) == len(lines) - 2
    assert read_stored(path) == config


def test_resuming_nothing_starts_anew(tiny):
    opened(tiny(), resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_start_that_failed_leaves_nothing_in_the_way(tiny, resume):
    """Its remedy is another configuration, in the same place."""
    with RunDirectory(tiny()) as directory:
        (directory.path / "metrics.jsonl").touch()
        (directory.path / "tensorboard").mkdir()
    opened(tiny(seed=9), resume=resume)
    assert TrainConfig.from_yaml(directory.path / "config.yaml").seed == 9
    (directory.path / "metrics.jsonl").unlink()
    (directory.path / "checkpoints" / "step-000001").mkdir(parents=True)
    with pytest.raises((CheckpointError, ConfigError), match=r"exists|differs"):
        opened(tiny(seed=8), resume=resume)


def test_another_number_of_threads_is_said_and_not_refused(tiny, caplog):
    opened(tiny())
    opened(tiny(threads=2), resume=True)
    assert "resuming with threads (1 -> 2)" in caplog.text
    with pytest.raises(ConfigError, match=r"seed \(3 -> 9\), threads"):
        opened(tiny(threads=4, seed=9), resume=True)


def test_changed_fields_are_named_and_refused_unless_forced(tiny):
    opened(tiny())
    changed = tiny(rollout={"temperature": 0.5}, seed=9)
    with pytest.raises(ConfigError, match=r"rollout.temperature \(1.0 -> 0.5\), seed \(3 -> 9\).*--force"):
        opened(changed, resume=True)
    opened(changed, resume=True, force=True)
    opened(changed, resume=True)


def test_steps_and_bookkeeping_may_change_freely(tiny):
    opened(tiny())
    opened(tiny(steps=99, checkpoint={"every": 7}, metrics={"timeline_every": 1}, reward={"workers": 2}), resume=True)


def test_two_processes_cannot_share_it(tiny):
    config = tiny()
    with RunDirectory(config) as directory:
        (directory.path / "taken.yaml").write_text(config.to_yaml())
        code = (
            "import sys\nfrom sagc_fast.config import TrainConfig\n"
            "from sagc_fast.train.run_directory import RunDirectory\n"
            "RunDirectory(TrainConfig.from_yaml(sys.argv[1]), resume=True)"
        )
        command = [sys.executable, "-c", code, str(directory.path / "taken.yaml")]
        result = subprocess.run(command, capture_output=True, text=True)
    assert "Another process is training in" in result.stderr


@pytest.mark.parametrize(("code", "reason"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "not writable")])
def test_a_place_that_cannot_be_written(tiny, monkeypatch, code, reason):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match=reason):
        opened(tiny())


def test_another_environment_is_said(tiny, caplog):
    config = tiny()
    with RunDirectory(config) as directory:
        pass
    path = directory.path / "versions.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0"}))
    opened(config, resume=True)
    assert "torch differ" in caplog.text


def test_the_log_holds_what_was_said(tiny):
    import logging

    with RunDirectory(tiny()) as directory:
        logging.getLogger("sagc_fast.train.somewhere").warning("watch %s", "out")
    logging.getLogger("sagc_fast").warning("afterwards")
    assert "watch out" in (directory.path / "log.txt").read_text()
    assert "afterwards" not in (directory.path / "log.txt").read_text()


@pytest.mark.parametrize("content", ["garbage", "[]", "{}"])
def test_illegible_versions_do_not_stand_in_the_way(tiny, caplog, content):
    config = tiny()
    with RunDirectory(config) as directory:
        pass
    path = directory.path / "versions.json"
    path.write_text(content)
    opened(config, resume=True)
    assert "not legible" in caplog.text
    assert len(json.loads(path.read_text())["starts"]) == 1
