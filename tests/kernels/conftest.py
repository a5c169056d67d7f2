"""Kernel tests need Triton, which `make setup` installs where it has a wheel; without it they are left out, aloud."""

from __future__ import annotations

import importlib.util

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["*"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not HAS_TRITON:
        terminalreporter.write_line(
            "tests/kernels left out: triton is not installed (make setup installs it where it has a wheel)."
        )
