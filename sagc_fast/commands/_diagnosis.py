"""The facts and checks behind ``sagc-fast doctor``; nothing here changes the machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import sagc_fast
from sagc_fast.bench.machine import cpu_flags, cpu_name, memory_bytes, num_cores, version_of
from sagc_fast.errors import BackendError, SagcError

Status = Literal["ok", "warning", "failure"]
Rows = list[tuple[str, str]]

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 13)
"""The torch releases that the project is tested with."""
CORE = ("torch", "numpy", "numba", "transformers", "safetensors", "pyyaml", "rich")
OPTIONAL = {
    "triton": "gpu",
    "flash-attn": "flash",
    "reasoning-gym": "tasks",
    "math-verify": "tasks",
    "pyarrow": "tasks",
    "datasets": "tasks",
    "gguf": "gguf",
    "tensorboard": "tensorboard",
    "matplotlib": "plot",
}
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
OPERATIONS = (
    "linear", "rms_norm", "add_rms_norm", "silu_mul", "rope_and_cache", "paged_attention", "varlen_attention",
    "token_logprobs", "sample_tokens",
)  # fmt: skip
PLANNED_LENGTH = 1024
"""Tokens of a sequence, prompt and completion, that the KV plan counts beside the model's whole context."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "SAGC_BACKEND", "SAGC_CPU_LEVEL")


@dataclass(frozen=True)
class Check:
    status: Status
    sentence: str


@dataclass
class Diagnosis:
    """Named rows by section, and the verdicts."""

    sections: dict[str, Rows] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        return any(check.status == "failure" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "sections": {title: dict(rows) for title, rows in self.sections.items()},
            "checks": [asdict(check) for check in self.checks],
            "ok": not self.has_failed,
        }


def diagnose(model: Path | None = None, kv_budget_gb: float = 2.0) -> Diagnosis:
    """Look at software, machine and operators, then run the checks; ``model`` adds a KV plan for that folder."""
    found = Diagnosis()
    found.sections["Software"] = software()
    found.sections["Machine"] = machine()
    found.sections["Operators on the CPU"] = operators("cpu")
    if has_gpu():
        found.sections["Operators on the GPU"] = operators("cuda")
    if model is not None:
        found.sections[f"KV cache for {model}"] = kv_plan(model, kv_budget_gb)
    checks: tuple[Callable[[], Check], ...] = (
        check_torch, check_single_torch, check_native, check_bf16, check_threads, check_memory, check_numba,
        check_kernels_name, check_generation,
    )  # fmt: skip
    found.checks += [_verdict(check) for check in checks]
    return found


def _verdict(check: Callable[[], Check]) -> Check:
    """What a check says; an error that a user can mend (a forced backend that is missing) is its failure."""
    try:
        return check()
    except SagcError as error:
        return Check("failure", str(error))


def software() -> Rows:
    rows = [("Python", platform.python_version()), ("sagc_fast", f"{sagc_fast.__version__} in {_package_folder()}")]
    rows += [(name, version_of(name) or "NOT INSTALLED") for name in CORE]
    for name, extra in OPTIONAL.items():
        rows.append((name, version_of(name) or f"not installed (pip install 'sagc_fast[{extra}]')"))
    return rows


def machine() -> Rows:
    import torch

    from sagc_fast.rollout.decode_graphs import describe_use

    flags = cpu_flags()
    total, available = memory_bytes()
    rows = [
        ("processor", cpu_name()),
        (
            "instruction sets",
            ", ".join(flag for flag in CPU_FLAGS if flag in flags) or "none of " + ", ".join(CPU_FLAGS),
        ),
        ("cores for this process", str(num_cores())),
        ("threads that torch uses", str(torch.get_num_threads())),
        ("memory", f"{total / 1e9:.1f} GB, {available / 1e9:.1f} GB of it available"),
        ("C++ compiler", find_compiler() or "none found"),
    ]
    rows += [(name, os.environ[name]) for name in THREAD_VARIABLES if name in os.environ]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows.append(("GPUs", ", ".join(gpus) or "none that this torch can use"))
    return [*rows, ("CUDA graphs in rollouts", describe_use())]


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def operators(device: str) -> Rows:
    """Which backend each operation takes for fp32 and bf16, and why."""
    import torch

    from sagc_fast.ops.backend import describe, native_module, resolve

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # check_native says it with its remedy
        try:
            for name in OPERATIONS:
                for dtype in (torch.float32, torch.bfloat16):
                    resolve(name, device, dtype)
        except BackendError:
            return [("all", "none: the backend that is asked for is missing, see the checks")]
    because = {"automatic": "the fastest that is there"}
    rows = [
        (what, f"{backend} ({because.get(reason, reason)})")
        for what, backend, reason in describe()
        if f"[{device}, " in what
    ]
    native = native_module() if device == "cpu" else None
    return rows if native is None else [("native instruction set", native.cpu_level()), *rows]


def kv_plan(model: Path, budget_gb: float) -> Rows:
    """How far a KV budget goes with a model, in tokens and in sequences."""
    from sagc_fast.model.loader import load_config

    config = load_config(model)
    context = config.max_position_embeddings
    lengths = sorted({min(PLANNED_LENGTH, context), context})
    rows = []
    for dtype, size in (("fp32", 4), ("bf16", 2)):
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size
        tokens = int(budget_gb * 1e9 // per_token)
        sequences = ", ".join(f"{tokens // length:,} of {length:,}" for length in lengths)
        plan = f"{tokens:,} tokens ({per_token:,} bytes each); sequences at once: {sequences}"
        rows.append((f"{budget_gb:g} GB in {dtype}", plan))
    return [*rows, ("context of the model", f"{context:,} tokens")]


def check_torch() -> Check:
    version = version_of("torch") or "0.0"
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if OLDEST_TORCH <= release <= NEWEST_TORCH:
        return Check("ok", f"torch {version} is one of the releases this project is tested with.")
    tested = " to ".join(".".join(map(str, ends)) for ends in (OLDEST_TORCH, NEWEST_TORCH))
    return Check("warning", f"torch {version} is outside {tested}, the releases this project is tested with.")


def check_single_torch() -> Check:
    copies = [
        distribution.locate_file("")
        for distribution in importlib.metadata.distributions()
        if (distribution.metadata["Name"] or "").lower() == "torch"
    ]
    folders = sorted({str(copy) for copy in copies})
    if len(folders) < 2:
        return Check("ok", "One torch is installed.")
    return Check("warning", f"Several torch installations are in reach ({', '.join(folders)}); remove all but one.")


def find_compiler() -> str | None:
    """The C++ compiler that an installation would take."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def check_native() -> Check:
    from sagc_fast.ops.native_interface import REMEDY, StaleLibraryError

    try:
        from sagc_fast.ops import native
    except StaleLibraryError as error:
        return Check("failure", f"{error}, so plain torch is used, which is several times slower; {REMEDY}.")
    except ImportError:
        return Check(
            "warning",
            "The native CPU operators are not built, so plain torch is used, which is several times slower; "
            + (
                "torch was probably not there yet when this package was installed: run pip install again."
                if find_compiler()
                else "install a C++ compiler and run pip install again."
            ),
        )
    except OSError as error:
        reason = str(error).splitlines()[0]
        return Check(
            "failure", f"The native CPU operators are built but do not load ({reason}); run pip install again."
        )
    return Check("ok", f"The native CPU operators load and run on {native.cpu_level()}.")


def check_bf16() -> Check:
    """Which units bf16 runs on decides whether ``model.dtype: bf16`` is faster than fp32 on this processor."""
    flags = cpu_flags()
    if "amx_bf16" in flags:
        return Check("ok", "This processor has AMX, the fastest units there are for bf16 on a CPU.")
    if "avx512_bf16" in flags:
        return Check("ok", "This processor has no AMX; bf16 runs on avx512_bf16, still faster than fp32.")
    return Check("warning", "This processor has no bf16 units (AMX, avx512_bf16); keep model.dtype fp32, it is faster.")


def check_threads() -> Check:
    import torch

    threads, cores = torch.get_num_threads(), num_cores()
    if threads > cores:
        return Check("warning", f"torch uses {threads} threads on {cores} cores; set OMP_NUM_THREADS={cores}.")
    others = os.getloadavg()[0]
    if others > 0.75 * cores and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        return Check(
            "warning",
            f"Other processes keep this machine busy (load {others:.1f} on {cores} cores); set OMP_WAIT_POLICY=PASSIVE,"
            " or waiting threads will spin against them.",
        )
    return Check("ok", f"torch uses {threads} of {cores} cores.")


def check_memory() -> Check:
    _, available = memory_bytes()
    if available < 4e9:
        return Check("warning", f"Only {available / 1e9:.1f} GB of memory is available; choose a KV budget below that.")
    return Check("ok", f"{available / 1e9:.1f} GB of memory is available.")


def check_numba() -> Check:
    try:
        import numba
    except ImportError as error:
        return Check("warning", f"numba cannot be imported ({error}), so the controller runs as plain Python.")
    return Check("ok", f"numba {numba.__version__} compiles the controller.")


def check_kernels_name() -> Check:
    """A folder of ours that passes for Hugging Face's package ``kernels`` would break transformers."""
    spec = importlib.util.find_spec("kernels")
    ours = importlib.util.find_spec("sagc_fast.kernels")
    if spec and ours and spec.origin == ours.origin and not _is_below(Path(spec.origin), Path.cwd()):
        return Check("failure", f"{spec.origin} passes for the package kernels of Hugging Face; reinstall sagc_fast.")
    return Check("ok", "The Triton kernels are reachable as sagc_fast.kernels only.")


def check_generation() -> Check:
    """The self-test. A tiny random model must give the same bits for a completion alone and in a batch, the project's
    promise, and plain torch must agree with the operators that are used."""
    from sagc_fast.ops.backend import use_backend

    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    together = _completions(prompts, 4, [0, 1, 2])[4:6]
    alone = _completions(prompts[1:2], 2, [1])
    with use_backend("torch"):
        plain = _completions(prompts[1:2], 2, [1])
    if alone != together:
        return Check("failure", "A completion differs between alone and in a batch; please report this output.")
    for (tokens, logprobs), (plain_tokens, plain_logprobs) in zip(alone, plain, strict=True):
        if tokens != plain_tokens or max(abs(a - b) for a, b in zip(logprobs, plain_logprobs, strict=True)) > 1e-4:
            return Check(
                "failure", "The operators in use and plain torch disagree; set SAGC_BACKEND=torch, and report."
            )
    return Check(
        "ok", "A completion has the same bits alone and in a batch, and plain torch agrees (tiny random model)."
    )


def _completions(prompts: list[list[int]], size: int, ids: list[int]) -> list[tuple[list[int], list[float]]]:
    """(tokens, log-probabilities) of ``size`` completions of every prompt by a model of random weights."""
    from sagc_fast import RolloutEngine, SamplingParams
    from sagc_fast.model.config import ModelConfig
    from sagc_fast.model.loader import random_model

    config = ModelConfig(
        family="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=16, seed=1, ignore_eos=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        engine = RolloutEngine(random_model(config, seed=0), kv_budget_gb=0.01)
        groups = engine.generate(prompts, group_size=size, params=params, prompt_ids=ids)
    return [(list(c.token_ids), list(c.logprobs)) for group in groups for c in group.completions]


def _package_folder() -> str:
    return str(Path(sys.modules["sagc_fast"].__file__).parent)


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
