"""The documents: links lead somewhere, the navigation is complete, tutorials run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TUTORIALS = ROOT / "docs" / "tutorials"


def anchors(page: Path) -> set[str]:
    """Of every heading, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_navigation_names_every_page_once():
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]

    def files(node):
        if isinstance(node, str):
            return [node]
        return [file for child in (node.values() if isinstance(node, dict) else node) for file in files(child)]

    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md") if "runs" not in page.parts}
    assert sorted(files(navigation)) == sorted(pages)


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(title or "", code) of every fenced block of a language."""
    pattern = rf'^```{language}(?: title="([^"]*)")?\n(.*?)^```'
    return re.findall(pattern, page.read_text(encoding="utf-8"), re.S | re.M)


@pytest.mark.parametrize("name", ["engine", "own_trainer"])
def test_the_code_of_a_tutorial_runs(name, tmp_path):
    code = "\n".join(code for _, code in blocks(TUTORIALS / f"{name}.md", "python"))
    (tmp_path / "tutorial.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "tutorial.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_tutorial_on_ones_own_data_trains_and_samples(tmp_path):
    page = TUTORIALS / "your_data.md"
    for title, code in [*blocks(page, "python"), *blocks(page, "yaml")]:
        (tmp_path / title).write_text(code, encoding="utf-8")
    commands = re.findall(r"^    (python|sagc-fast) (.*?)(?:  #.*)?$", page.read_text(encoding="utf-8"), re.M)
    assert [words.split()[0] for _, words in commands] == ["make_data.py", "train", "report", "generate", "train"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for program, words in commands:
        arguments = [word.replace("step-000020", "step-000003") for word in shlex.split(words)]
        if arguments[0] == "train":  # the same runs, shorter
            steps = "steps=4" if "--resume" in arguments else "steps=3"
            arguments = [a for a in arguments if not a.startswith("steps=")]
            arguments += [steps] if "--resume" in arguments else [steps, "evaluation.num_problems=8"]
        module = [] if program == "python" else ["-m", "sagc_fast"]
        done = subprocess.run(
            [sys.executable, *module, *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (program, words, done.stdout[-1000:], done.stderr[-1000:])
    assert (tmp_path / "runs/sums/report.html").exists()
