"""The command line: discovery of commands, exit statuses and what reaches stderr."""

from __future__ import annotations

import errno
import subprocess
import sys
from types import SimpleNamespace

import pytest

import sagc_fast
from sagc_fast import cli
from sagc_fast.errors import ConfigError


def fake_command(action):
    return SimpleNamespace(HELP="does a thing", EPILOG="examples:\n  x", add_arguments=lambda p: None, run=action)


def run_fake(monkeypatch, action) -> int:
    monkeypatch.setattr(cli, "find_commands", lambda: {"fake": fake_command(action)})
    return cli.main(["fake"])


def test_help_lists_every_command_with_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for name, module in cli.find_commands().items():
        assert name in out
        assert "\n" not in module.HELP


@pytest.mark.parametrize("name", sorted(cli.find_commands()))
def test_every_command_has_help_with_examples(capsys, name):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert "sagc-fast" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert sagc_fast.__version__ in capsys.readouterr().out


def test_no_command_prints_help_and_fails(capsys):
    assert cli.main([]) == 2
    assert "commands" in capsys.readouterr().err


def test_our_errors_become_one_sentence_and_status_2(monkeypatch, capsys):
    def action(args):
        raise ConfigError("steps is 0; it must be at least 1.")

    assert run_fake(monkeypatch, action) == 2
    assert capsys.readouterr().err == "sagc-fast: steps is 0; it must be at least 1.\n"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 14.6 TiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 115200000000000 bytes."),
        RuntimeError("CUDA out of memory.\nTried to allocate 20 GiB"),
    ],
)
def test_missing_memory_is_one_sentence_too(monkeypatch, capsys, error):
    def action(args):
        raise error

    assert run_fake(monkeypatch, action) == 2
    said = capsys.readouterr().err
    assert f"({str(error).splitlines()[0]})" in said
    assert said.count("\n") == 1


def test_a_file_that_cannot_be_used_is_one_sentence(monkeypatch, capsys):
    def action(args):
        raise PermissionError(errno.EACCES, "Permission denied", "/data/closed/config.json")

    assert run_fake(monkeypatch, action) == 2
    assert capsys.readouterr().err == (
        "sagc-fast: /data/closed/config.json cannot be used: Permission denied; check the path, its permissions and "
        "the space that is left.\n"
    )

    def bug(args):
        raise OSError("without a file")

    with pytest.raises(OSError, match="without a file"):
        run_fake(monkeypatch, bug)


def test_another_error_of_torch_keeps_its_traceback(monkeypatch):
    def bug(args):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        run_fake(monkeypatch, bug)


def test_an_interrupt_is_130_and_a_bug_keeps_its_traceback(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    def bug(args):
        raise ZeroDivisionError

    assert run_fake(monkeypatch, interrupt) == 130
    with pytest.raises(ZeroDivisionError):
        run_fake(monkeypatch, bug)


def test_train_without_configuration_says_what_to_give(capsys):
    assert cli.main(["train"]) == 2
    assert "--config FILE" in capsys.readouterr().err
    assert cli.main(["train", "--resume", "--run-dir", "/nowhere"]) == 2
    assert "no run to resume" in capsys.readouterr().err


def test_train_reports_a_misspelt_override(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("model: {path: m}\ntask: {name: addition}\n")
    assert cli.main(["train", "--config", str(tmp_path / "run.yaml"), "rollout.temprature=1"]) == 2
    assert "did you mean rollout.temperature" in capsys.readouterr().err


def test_options_and_key_value_pairs_may_come_in_any_order(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("sagc_fast.commands.train.run", lambda args: seen.append(args))
    assert cli.main(["train", "--config", "a.yaml", "steps=3", "--run-dir", "there", "seed=4", "threads=1"]) == 0
    assert (seen[0].overrides, seen[0].run_dir) == (["steps=3", "seed=4", "threads=1"], "there")
    with pytest.raises(SystemExit):
        cli.main(["train", "steps=3", "--rundir", "there", "seed=4"])
    said = capsys.readouterr().err
    assert "usage: sagc-fast train" in said
    assert "unrecognized arguments: --rundir" in said


def test_train_lists_its_fields(capsys):
    assert cli.main(["train", "--fields"]) == 0
    out = capsys.readouterr().out
    assert "optimizer.learning_rate  (default: 1e-06)" in out
    assert "controller.hold" in out


def test_module_entry_point_and_closed_pipe():
    shown = subprocess.run([sys.executable, "-m", "sagc_fast", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("sagc-fast ")
    piped = f"{sys.executable} -m sagc_fast train --fields | head -1"
    result = subprocess.run(["bash", "-c", piped], capture_output=True, text=True)
    assert result.stderr == ""
