"""What the package says about itself, and that the pinned requirements cover it."""

from __future__ import annotations

import email
import re
import zipfile
from pathlib import Path

import sagc_fast

ROOT = Path(__file__).parents[2]


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def _name(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-").replace(".", "-")


def _pins() -> list[tuple[str, str]]:
    """(file, line) of every requirement that is pinned."""
    lines = []
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith(("#", "-r ")):
                lines.append((path.name, line))
    return lines


def test_wheel_names_version_licence_and_python(wheel):
    metadata = _metadata(wheel)
    assert metadata["Version"] == sagc_fast.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"gpu", "flash", "tasks", "gguf", "plot", "tensorboard", "dev", "all"} == set(
        metadata.get_all("Provides-Extra")
    )


def test_core_install_stays_light(wheel):
    core = {_name(r) for r in _metadata(wheel).get_all("Requires-Dist") if "extra ==" not in r}
    assert core == {"torch", "numpy", "safetensors", "transformers", "numba", "pyyaml", "rich"}


def test_every_requirement_is_pinned_to_one_version_and_torch_comes_first():
    pins = _pins()
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[\w.!+-]+", line) for _, line in pins), pins
    names = [_name(line) for _, line in pins]
    assert len(names) == len(set(names))
    assert next(line for file, line in pins if file == "core.txt").startswith("torch==")


def test_pinned_requirements_cover_the_package_and_its_extras(wheel):
    pinned = {_name(line) for _, line in _pins()}
    needed = {_name(r): r for r in _metadata(wheel).get_all("Requires-Dist")}
    elsewhere = {"flash-attn"}  # builds on CUDA machines only
    assert {name for name in needed if name not in pinned} == elsewhere
