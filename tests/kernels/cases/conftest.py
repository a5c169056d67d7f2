"""Kernel tests run where kernels can: on a GPU, or in Triton's interpreter when TRITON_INTERPRET=1 was set in time.

Without either, this folder collects nothing; tests/kernels/test_under_the_interpreter.py runs it in its own processes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_INTERPRETED or torch.cuda.is_available() else ["test_*.py"]

sys.path.insert(0, str(Path(__file__).parents[1]))
if IS_INTERPRETED:
    from interpreter import repair

    repair()
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IS_INTERPRETED:
        for item in items:  # those of the whole session: only this folder's are meant
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)
