"""The one place that chooses between the native operators and plain torch.

Order: :func:`set_backend` / :func:`use_backend`, then the environment variable ``SAGC_BACKEND``, then automatic: native
where ``sagc_fast._C`` is built and serves the operation on that device and dtype, else torch with one warning.
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

log = logging.getLogger(__name__)

Backend = Literal["native", "torch"]
BACKENDS: tuple[Backend, ...] = ("native", "torch")
ENVIRONMENT_VARIABLE = "SAGC_BACKEND"

_forced: Backend | None = None
_choices: dict[tuple[str, str, torch.dtype], tuple[Backend, str]] = {}
_has_warned = False


@functools.cache
def native_module() -> ModuleType | None:
    """The module of native operators, or None when ``sagc_fast._C`` is not built or does not load."""
    try:
        from sagc_fast.ops import native
    except (ImportError, OSError) as error:
        log.debug("no native operators: %s", error)
        return None
    return native if native.available_ops() else None


def set_backend(name: Backend | None) -> None:
    """Use ``"native"`` or ``"torch"`` for every operation from now on; ``None`` returns to the environment variable and
    the automatic choice. Raises BackendError for an unknown name, or when native operators are asked for but not built.
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
    native = native_module()
    if native is None:
        _warn_once()
        return "torch", "sagc_fast._C is not built"
    if op not in native.available_ops():
        return "torch", "the native library has no such operation"
    if not native.supports(op, device_type, dtype):
        return "torch", f"no native {op} for {device_type} {dtype}"
    return "native", f"asked for by {source}" if asked else "automatic"


def _checked(name: str, source: str) -> Backend:
    if name not in BACKENDS:
        raise BackendError(f"Backend {name!r} ({source}) is unknown; use one of {', '.join(BACKENDS)}.")
    if name == "native" and native_module() is None:
        raise BackendError(
            f"Backend 'native' ({source}) is not there: sagc_fast._C is not built; reinstall with a C++ compiler on "
            "the machine, or use 'torch'."
        )
    return name


def _warn_once() -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            "sagc_fast runs on its plain-torch operators, which are several times slower: sagc_fast._C is not built; "
            f"reinstall with a C++ compiler on the machine, or set {ENVIRONMENT_VARIABLE}=torch to silence this.",
            RuntimeWarning,
            stacklevel=4,
        )
