"""What the documents and the commands' help promise exists: commands, options, make targets, files, the example."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from sagc_fast.cli import build_parser, find_commands

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = find_commands()


def _command_lines(text: str) -> list[str]:
    """Command lines of indented blocks, without what is said behind them and what a shell does with their output."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = re.findall(r"^ +(sagc-fast .*)$", joined, re.M)
    return [re.split(r"\s{2,}|\s#\s|\s[>|]\s|\s&&\s", line)[0].strip() for line in lines]


def _assert_parses(line: str) -> None:
    try:
        build_parser(COMMANDS).parse_args(shlex.split(line)[1:])
    except SystemExit as status:
        if status.code:
            pytest.fail(f"not a valid command line: {line}")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_command_lines_in_documents_are_valid(path):
    text = path.read_text(encoding="utf-8")
    for line in _command_lines(text):
        _assert_parses(line)
    assert set(re.findall(r"`sagc-fast ([a-z-]+)", text)) <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_and_they_are_valid(name):
    lines = _command_lines(COMMANDS[name].EPILOG)
    assert lines, f"sagc-fast {name} --help shows no example"
    for line in lines:
        _assert_parses(line)


def test_make_targets_in_documents_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for path in DOCUMENTS:
        named = set(re.findall(r"(?:^ +|`)make ([a-z]+)", path.read_text(encoding="utf-8"), re.M))
        assert named <= targets, f"{path.name} names {named - targets}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (path.parent / target).exists(), f"{path.name} links to {target}"


def test_files_named_in_documents_exist():
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"(?<![\w/])((?:sagc_fast|configs|tests|docs|csrc|kernels)/[\w./-]*\w\.\w+)", text):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_folders_in_the_tree_exist_and_none_is_left_out():
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## What is where")[1].split("## ")[0]
    inner = set(re.findall(r"(?:^ {6}|; )([a-z]+)/", tree, re.M))
    packages = {path.parent.name for path in (ROOT / "sagc_fast").glob("*/__init__.py")}
    assert packages == inner
    for name in re.findall(r"^ {4}([a-z_]+)/", tree, re.M):
        assert (ROOT / name).is_dir()


def test_the_library_example_runs(capsys):
    """As it stands, with the policy that is shipped in the package in place of the fetched model."""
    from sagc_fast.tasks.addition import policy_folder

    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[1]
    shipped = example.replace("models/SmolLM2-135M-Instruct", str(policy_folder()))
    assert shipped != example
    exec(compile(shipped, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 3
