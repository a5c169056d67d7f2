"""Dependencies point one way, and what must be light is light (see "Rules" in CONTRIBUTING.md).

The tables below are the design. A failing edge is either a mistake in the new import or a change of design, which is
made here, in the open.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sagc_fast"

# Part of the package -> parts that it may import. `kernels` are the Triton kernels, which import nothing of ours.
ALLOWED = {
    "errors": set(),
    "profiling": set(),
    "types": {"errors"},
    "config_parsing": {"errors"},
    "config": {"errors", "types", "config_parsing", "algo", "controller"},
    "controller": {"errors"},
    "ops": {"errors", "kernels", "profiling"},
    "model": {"errors", "ops", "profiling"},
    "rollout": {"errors", "types", "ops", "model", "profiling"},
    "algo": {"errors", "types", "ops", "profiling"},
    "tasks": {"errors", "types"},
    "report": {"errors"},
    "train": {"errors", "types", "config", "config_parsing", "controller", "algo", "tasks", "ops", "model", "rollout"}
    | {"report", "profiling"},
    "eval": {"errors", "types", "tasks", "model", "rollout"},
    "integrations": {"errors", "types", "controller"},
    "bench": {"errors", "types", "config", "controller", "algo", "tasks", "ops", "model", "rollout", "train"},
}
# Programs: they may use every part, and no part may use them.
PROGRAMS = {"cli", "commands", "__main__", "tasks.addition_sft"}
# The only files that know backends, and the only ones that use transformers (for tokenizers and configurations).
ONLY_FROM = {
    "torch.ops": ("ops", "bench"),  # bench measures what else torch offers
    "triton": ("kernels",),
    "transformers": ("model", "tasks.addition_sft", "commands", "bench"),  # bench: as a peer
}
# Modules that import no torch, whatever order they are imported in.
TORCH_FREE = (
    "sagc_fast", "sagc_fast.errors", "sagc_fast.types", "sagc_fast.cli", "sagc_fast.config", "sagc_fast.report",
    "sagc_fast.rollout.sequence", "sagc_fast.rollout.block_manager", "sagc_fast.rollout.scheduler",
    "sagc_fast.rollout.plan", "sagc_fast.rollout.tables", "sagc_fast.rollout.noise", "sagc_fast.tasks",
    "sagc_fast.tasks.addition", "sagc_fast.tasks.dataset",
    "sagc_fast.tasks.reasoning_gym", "sagc_fast.tasks.scoring", "sagc_fast.controller", "sagc_fast.bench",
    "sagc_fast.bench.machine", "sagc_fast.bench.stats", "sagc_fast.bench.clock",
    "sagc_fast.profiling",
)  # fmt: skip


def _modules() -> dict[str, Path]:
    """Dotted name below the package ("rollout.engine") -> file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def _imports(path: Path) -> Iterator[str]:
    """Every module that a file may import, inside functions and under TYPE_CHECKING as well."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; name the package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _part(name: str) -> str:
    return name if name in PROGRAMS else name.split(".")[0]


def _target(imported: str) -> str | None:
    """The part of our package that an import reaches; None for other packages and for the bare package."""
    if not imported.startswith("sagc_fast."):
        return None
    name = imported.removeprefix("sagc_fast.")
    program = next((p for p in PROGRAMS if name == p or name.startswith(f"{p}.")), None)
    part = program or name.split(".")[0]
    is_ours = part in ALLOWED or part in PROGRAMS or part == "kernels"
    return part if is_ours else None


MODULES = _modules()


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_design(name):
    part = _part(name)
    if part in PROGRAMS or name == "__init__":
        return
    assert part in ALLOWED, f"sagc_fast/{part} has no place in the design yet: give it one in ALLOWED"
    reached = {target for target in map(_target, _imports(MODULES[name])) if target and target != part}
    assert reached <= ALLOWED[part], f"{name} must not import {sorted(reached - ALLOWED[part])}"


def test_the_design_has_no_cycle():
    done: set[str] = {"kernels"}
    while remaining := {part: needs - done for part, needs in ALLOWED.items() if part not in done}:
        ready = {part for part, needs in remaining.items() if not needs}
        assert ready, f"these parts need each other: {remaining}"
        done |= ready


@pytest.mark.parametrize("library", ONLY_FROM)
def test_backends_and_transformers_are_known_in_one_place(library):
    for name, path in MODULES.items():
        used = library in path.read_text(encoding="utf-8") if library == "torch.ops" else any(
            imported.split(".")[0] == library for imported in _imports(path)
        )  # fmt: skip
        assert not used or _part(name) in ONLY_FROM[library], f"{name} uses {library}"


def test_triton_kernels_import_nothing_of_ours():
    for path in (ROOT / "kernels").glob("*.py"):
        ours = [imported for imported in _imports(path) if imported.split(".")[0] in {"sagc_fast", "kernels"}]
        others = [imported for imported in ours if not imported.startswith("sagc_fast.kernels.")]
        assert not others, f"{path.name} imports {others}; kernels know each other alone"


def test_the_forward_pass_is_our_own():
    """transformers serves tokenizers and configurations; the model's own modules never import it."""
    for name in ("model.transformer", "model.rope", "model.config"):
        assert not [imported for imported in _imports(MODULES[name]) if imported.startswith("transformers")]


def _loaded_after(imports: tuple[str, ...], watched: tuple[str, ...]) -> dict[str, list[str]]:
    """Imports one module after the other in a fresh interpreter: module -> watched libraries loaded by then."""
    program = (
        "import importlib, json, sys\n"
        f"print(json.dumps({{name: [w for w in {watched!r} if importlib.import_module(name) and w in sys.modules]"
        f" for name in {imports!r}}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_torch_free_modules_load_no_torch():
    loaded = _loaded_after(TORCH_FREE, ("torch", "transformers"))
    assert not any(loaded.values()), next((name, libraries) for name, libraries in loaded.items() if libraries)


def test_importing_the_package_loads_no_heavy_library():
    heavy = ("torch", "numba", "numpy", "transformers", "triton", "yaml", "rich")
    assert _loaded_after(("sagc_fast", "sagc_fast.cli"), heavy) == {"sagc_fast": [], "sagc_fast.cli": []}
