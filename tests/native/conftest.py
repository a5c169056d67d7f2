"""Tests of the native operators against float64 references, at every instruction set that this CPU has.

Without the library only test_without_library.py is collected; it fails where a compiler could have built one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

try:
    from sagc_fast.ops import native as _native
except (ImportError, OSError):
    _native = None

LEVELS = _native.cpu_levels() if _native else ()
collect_ignore_glob = [] if _native else ["test_ops_*.py"]


@pytest.fixture(params=LEVELS)
def native(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module of native operators, set to one instruction set after the other."""
    module = importlib.import_module("sagc_fast.ops.native")
    before = module.cpu_level()
    module.set_cpu_level(request.param)
    yield module
    module.set_cpu_level(before)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two intra-op threads, whatever the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
