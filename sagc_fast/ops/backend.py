"""The one place that chooses between the backends of an operation.

Order: :func:`set_backend` / :func:`use_backend`, then the environment variable ``SAGC_BACKEND``, then automatic by
device: on the CPU ``native`` (``sagc_fast._C``), on CUDA ``flash`` (the flash-attn package, training attention alone)
and ``triton``, each where it is there and serves the operation for that dtype; else plain ``torch``, with one warning
where something that would be faster is missing. ``cuda`` (``sagc_fast._cuda``, parts of the decode step) comes
before Triton for the operations in MEASURED_FASTER alone, and when it is asked for.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Literal

import torch

from sagc_fast.errors import BackendError
from sagc_fast.ops import native_interface

log = logging.getLogger(__name__)

Backend = Literal["native", "triton", "flash", "cuda", "torch"]
BACKENDS: tuple[Backend, ...] = ("native", "triton", "flash", "cuda", "torch")
PARTIAL: tuple[Backend, ...] = ("flash", "cuda")
"""Backends of few operations; asking for one leaves all others automatic."""
ENVIRONMENT_VARIABLE = "SAGC_BACKEND"

_forced: Backend | None = None
_choices: dict[tuple[str, str, torch.dtype], tuple[Backend, str]] = {}
_has_warned = False
AUTOMATIC: dict[str, tuple[Backend, ...]] = {"cpu": ("native",), "cuda": ("flash", "triton")}
"""What is tried on a device when nobody asked for a backend, in this order."""
MEASURED_FASTER: frozenset[str] = frozenset()
"""Operations whose CUDA C++ twin was faster than Triton's on a GPU, by the rows "CUDA C++ against Triton" of
bench/gpu_check.sh. None has been measured yet."""


@functools.cache
def native_module() -> ModuleType | None:
    """The module of native operators, or None when ``sagc_fast._C`` is not built, does not load or is a stale one."""
    try:
        from sagc_fast.ops import native
    except native_interface.StaleLibraryError as error:
        MISSING["native"], REMEDY["native"] = str(error), native_interface.REMEDY
        return None
    except OSError as error:
        MISSING["native"] = f"sagc_fast._C does not load ({str(error).splitlines()[0]})"
        REMEDY["native"] = native_interface.REMEDY
        return None
    except ImportError as error:
        log.debug("no native operators: %s", error)
        return None
    return native if native.available_ops() else None


@functools.cache
def triton_module() -> ModuleType | None:
    """The module of Triton kernels, or None when Triton is not installed or has neither a GPU nor its interpreter."""
    try:
        from sagc_fast.ops import triton_ops
    except ImportError as error:
        log.debug("no Triton kernels: %s", error)
        return None
    return triton_ops if triton_ops.available_ops() else None


@functools.cache
def flash_module() -> ModuleType | None:
    """The module around the flash-attn package, or None when that is not installed or does not load."""
    try:
        from sagc_fast.ops import flash
    except (ImportError, OSError) as error:
        log.debug("no flash-attn: %s", error)
        return None
    return flash


@functools.cache
def cuda_module() -> ModuleType | None:
    """The module of CUDA C++ operators, or None when ``sagc_fast._cuda`` is not built, does not load or has no GPU."""
    try:
        from sagc_fast.ops import cuda_ops
    except (ImportError, OSError) as error:
        log.debug("no CUDA operators: %s", error)
        return None
    return cuda_ops if cuda_ops.available_ops() else None


def _module(name: Backend) -> ModuleType | None:
    modules = {"native": native_module, "triton": triton_module, "flash": flash_module, "cuda": cuda_module}
    return modules[name]()


def set_backend(name: Backend | None) -> None:
    """Use one backend for every operation that it has from now on; ``None`` returns to the environment variable and the
    automatic choice. Raises BackendError for an unknown name, or for a backend that is not there.
    """
    global _forced
    _forced = None if name is None else _checked(name, "set_backend")
    _choices.clear()


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """:func:`set_backend` for the length of a ``with`` block."""
    before = _forced
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def resolve(op: str, device_type: str, dtype: torch.dtype) -> Backend:
    """Backend of operation ``op`` on a device type and dtype; decided once, then a dictionary look-up."""
    choice = _choices.get((op, device_type, dtype))
    if choice is None:
        choice = _choices[op, device_type, dtype] = _choose(op, device_type, dtype)
        log.debug("%s on %s %s: %s (%s)", op, device_type, dtype, *choice)
    return choice[0]


def describe() -> list[tuple[str, Backend, str]]:
    """(operation with device and dtype, backend, reason) of every choice made so far."""
    return [
        (f"{op} [{device_type}, {str(dtype).removeprefix('torch.')}]", *choice)
        for (op, device_type, dtype), choice in sorted(_choices.items(), key=lambda item: str(item[0]))
    ]


def _choose(op: str, device_type: str, dtype: torch.dtype) -> tuple[Backend, str]:
    asked, source = _forced, "set_backend"
    if asked is None and os.environ.get(ENVIRONMENT_VARIABLE):
        source = f"environment variable {ENVIRONMENT_VARIABLE}"
        asked = _checked(os.environ[ENVIRONMENT_VARIABLE], source)
    if asked == "torch":
        return "torch", f"asked for by {source}"
    is_automatic = asked is None or (asked in PARTIAL and op not in _module(asked).available_ops())
    reason = f"nothing faster for {device_type}"
    candidates: tuple[Backend, ...] = AUTOMATIC.get(device_type, ())
    if op in MEASURED_FASTER and device_type == "cuda":
        candidates = ("cuda", *candidates)
    for name in candidates if is_automatic else (asked,):
        module = _module(name)
        if module is None:
            if name not in PARTIAL:
                _warn_once(name)
                reason = MISSING[name]
        elif op not in module.available_ops():
            if name not in PARTIAL:
                reason = f"{name} has no such operation"
        elif not module.supports(op, device_type, dtype):
            reason = f"no {name} {op} for {device_type} {dtype}"
        else:
            return name, "automatic" if is_automatic else f"asked for by {source}"
    return "torch", reason


MISSING = {
    "native": "sagc_fast._C is not built",
    "triton": "Triton is not there, or no GPU of compute capability 8.0 or later for it",
    "flash": "flash-attn is not installed",
    "cuda": "sagc_fast._cuda is not built, or there is no GPU of compute capability 8.0 or later for it",
}
REMEDY = {
    "native": "run pip install again where torch is installed already and a C++ compiler is on the machine",
    "triton": "install triton 3.6 or later (its CPU interpreter runs where TRITON_INTERPRET=1 is set)",
    "flash": "pip install flash-attn, which needs a CUDA compiler",
    "cuda": "reinstall with nvcc and a CUDA build of torch on the machine",
}


def _checked(name: str, source: str) -> Backend:
    if name not in BACKENDS:
        raise BackendError(f"Backend {name!r} ({source}) is unknown; use one of {', '.join(BACKENDS)}.")
    if name != "torch" and _module(name) is None:
        raise BackendError(
            f"Backend {name!r} ({source}) is not there: {MISSING[name]}; {REMEDY[name]}, or use 'torch'."
        )
    return name


def _warn_once(name: Backend) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"sagc_fast runs on its plain-torch operators, which are several times slower: {MISSING[name]}; "
            f"{REMEDY[name]}, or set {ENVIRONMENT_VARIABLE}=torch to silence this.",
            RuntimeWarning,
            stacklevel=5,
        )
