"""The tiny policy and its configurations as fixtures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sagc_fast.config import TrainConfig

sys.path.insert(0, str(Path(__file__).parent))  # scoring workers import train_scorers by name
from train_tiny import make_policy, tiny_values


@pytest.fixture(scope="session")
def policy(tmp_path_factory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def tiny(policy, tmp_path):
    """``tiny(section={...}, ...)``: a TrainConfig with those changes."""

    def make(**sections: Any) -> TrainConfig:
        run_dir = sections.pop("run_dir", tmp_path / "run")
        return TrainConfig.from_dict(tiny_values(policy, run_dir, **sections))

    return make
