"""Tests marked ``gpu`` run where torch sees a CUDA GPU and are deselected elsewhere; the rest runs anywhere.

In a rehearsal of bench/gpu_check.sh they run on the CPU, so that a mistake in the tests themselves shows early; of a
test with parameters the first ones only.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
IS_REHEARSAL = os.environ.get("GPU_CHECK_REHEARSAL") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and not IS_REHEARSAL:
        return
    mine = [i for i in items if i.get_closest_marker("gpu") is not None and i.path.parent == FOLDER]
    first = {i.function: i for i in reversed(mine)} if IS_REHEARSAL else {}
    left_out = [i for i in mine if i is not first.get(i.function)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if IS_REHEARSAL else "cuda")
