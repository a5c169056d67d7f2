"""Kernel tests need Triton, which `make setup` installs where it has a wheel; without it they are left out, aloud."""

from __future__ import annotations

import importlib.util

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["*"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of what each kernel takes, or why there is none."""
    if not HAS_TRITON:
        terminalreporter.write_line(
            "tests/kernels left out: triton is not installed (make setup installs it where it has a wheel)."
        )
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "triton_table":
                terminalreporter.write_sep("-", "kernels compiled ahead of time")
                terminalreporter.write_line(text)
