"""A copy of the source tree to build from, so that nothing is written into the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "sagc_fast", "kernels", "csrc")
BUILT = shutil.ignore_patterns("__pycache__", "*.so", "*.o", "*.egg-info")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command to its end; its output when it succeeds, an AssertionError with all it said otherwise."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "SAGC_BACKEND"}}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def copy_sources(to: Path) -> Path:
    to.mkdir(parents=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=BUILT)
        else:
            shutil.copy2(source, to / name)
    return to


def make_environment(folder: Path) -> Path:
    """A fresh environment that sees the libraries of this one, but not the sagc_fast that is installed here as
    editable: its path file is read in a site folder only, never in a folder that another path file names."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python*/site-packages"))
    libraries = dict.fromkeys(sysconfig.get_path(key) for key in ("purelib", "platlib"))
    (site / "libraries.pth").write_text("\n".join(libraries) + "\n", encoding="utf-8")
    assert not (Path(sysconfig.get_path("purelib")) / "kernels").exists(), "these tests need an environment without it"
    return python


def pip(python: Path, *arguments: str | Path, cwd: Path, **environment: str) -> str:
    """This environment's pip, working on another environment, without a network."""
    options = ("--disable-pip-version-check", "--no-input", "--python", python)
    return run(sys.executable, "-m", "pip", *options, *arguments, cwd=cwd, **environment)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as a machine without a working C++ compiler builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_sources(folder / "source")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    compiler = {"CC": "false", "CXX": "false"}
    pip(Path(sys.executable), "wheel", *options, source, cwd=folder, **compiler)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("installed")
    python = make_environment(folder / "env")
    pip(python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return python


@pytest.fixture(scope="session")
def editable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(interpreter, source tree) of a fresh environment with an editable install."""
    folder = tmp_path_factory.mktemp("editable")
    source = copy_sources(folder / "source")
    python = make_environment(folder / "env")
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    pip(python, "install", *options, "--editable", source, cwd=folder, SAGC_BUILD_NATIVE="0")
    return python, source
