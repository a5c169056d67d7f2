"""Straggler-aware group sizing for synchronous on-policy RL, with its own rollout engine and trainer.

The public names below are loaded on first use: ``import sagc_fast`` alone imports neither torch nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Completion": "sagc_fast.types",
    "FixedG": "sagc_fast.controller",
    "Group": "sagc_fast.types",
    "RolloutEngine": "sagc_fast.rollout.engine",
    "RolloutStats": "sagc_fast.types",
    "SAGC": "sagc_fast.controller",
    "SAGCConfig": "sagc_fast.controller",
    "SamplingParams": "sagc_fast.types",
    "TrainConfig": "sagc_fast.config",
    "Trainer": "sagc_fast.train.trainer",
}

__all__ = [*_PUBLIC, "__version__"]

if TYPE_CHECKING:
    from sagc_fast.config import TrainConfig
    from sagc_fast.controller import SAGC, FixedG, SAGCConfig
    from sagc_fast.rollout.engine import RolloutEngine
    from sagc_fast.train.trainer import Trainer
    from sagc_fast.types import Completion, Group, RolloutStats, SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sagc_fast' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
