"""What users get from a wheel and from an editable install, on a machine without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROBE = """
import importlib.util, json, sys
import sagc_fast, sagc_fast.kernels
print(json.dumps({
    "package": sagc_fast.__file__,
    "kernels": sagc_fast.kernels.__file__,
    "top_level_kernels": importlib.util.find_spec("kernels") is not None,
    "version": sagc_fast.__version__,
}))
"""


def _ask(python: Path, program: str, cwd: Path, *options: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "SAGC_BACKEND"}}
    done = subprocess.run([python, *options, "-c", program], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_kernels_inside_the_package_and_the_data_files(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"sagc_fast"}
    assert "sagc_fast/kernels/__init__.py" in names
    assert "sagc_fast/report/assets/report.css" in names
    assert any(name.startswith("sagc_fast/tasks/data/") and name.endswith(".safetensors") for name in names)
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


def test_installed_wheel_works_and_brings_no_package_called_kernels(installed, tmp_path):
    found = json.loads(_ask(installed, PROBE, tmp_path))
    site = str(installed.parents[1])
    assert found["package"].startswith(site)
    assert found["kernels"].startswith(site)
    assert not found["top_level_kernels"]


def test_without_a_compiler_the_operators_run_on_torch_after_one_warning(installed, tmp_path):
    program = """
import json, warnings
import torch
from sagc_fast import ops
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    y = ops.rms_norm(torch.ones(2, 8), torch.full((8,), 2.0), 0.0)
    ops.silu_mul(torch.ones(2, 8))
print(json.dumps({"y": y.tolist(), "warnings": [str(w.message) for w in caught], "ops": ops.describe()}))
"""
    found = json.loads(_ask(installed, program, tmp_path))
    assert found["y"] == [[2.0] * 8] * 2
    assert len(found["warnings"]) == 1
    assert "plain-torch operators" in found["warnings"][0]
    assert {backend for _, backend, _ in found["ops"]} == {"torch"}


def test_console_script_lists_the_commands(installed, tmp_path):
    script = installed.parent / "sagc-fast"
    shown = subprocess.run([script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for command in ("train", "report", "doctor"):
        assert command in shown.stdout


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_editable_install_finds_the_kernels_from_anywhere(editable, tmp_path, place):
    python, source = editable
    found = json.loads(_ask(python, PROBE, source if place == "inside" else tmp_path))
    assert Path(found["package"]) == source / "sagc_fast" / "__init__.py"
    assert Path(found["kernels"]) == source / "kernels" / "__init__.py"
    if place == "outside":
        assert not found["top_level_kernels"]


def test_programs_started_in_the_checkout_see_no_package_called_kernels(editable):
    """Scripts, pytest among them, do not have the working folder on their path, unlike ``python -c``."""
    python, source = editable
    assert not json.loads(_ask(python, PROBE, source, "-P"))["top_level_kernels"]


def test_kernels_folder_never_passes_for_the_package_of_that_name(editable):
    """``python -m`` in the checkout does see the folder as ``kernels``; transformers asks for its version and, as it
    has none, leaves it alone."""
    python, source = editable
    program = "import kernels, importlib.metadata as m; print(hasattr(kernels, '__version__'), kernels.__file__)"
    assert _ask(python, program, source).split() == ["False", str(source / "kernels" / "__init__.py")]


def test_every_public_name_is_listed_without_being_loaded():
    program = "import sagc_fast, sys; print(sorted(dir(sagc_fast))); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "RolloutEngine" in done.stdout
