"""Group sizes from completion lengths: needs neither torch nor a trainer, and numba only for speed.

from sagc_fast.controller import SAGC, SAGCConfig, FixedG
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "ControllerWarning": "config",
    "CostAwareConfig": "cost_aware",
    "CostAwareSAGC": "cost_aware",
    "FixedG": "baselines",
    "PromptAwareSAGC": "prompt_aware",
    "SAGC": "sagc",
    "SAGCConfig": "config",
    "advantage_scale": "hold",
    "num_prompts": "hold",
}

__all__ = [
    "SAGC",
    "ControllerWarning",
    "CostAwareConfig",
    "CostAwareSAGC",
    "FixedG",
    "PromptAwareSAGC",
    "SAGCConfig",
    "advantage_scale",
    "num_prompts",
]

if TYPE_CHECKING:
    from sagc_fast.controller.baselines import FixedG
    from sagc_fast.controller.config import ControllerWarning, SAGCConfig
    from sagc_fast.controller.cost_aware import CostAwareConfig, CostAwareSAGC
    from sagc_fast.controller.hold import advantage_scale, num_prompts
    from sagc_fast.controller.prompt_aware import PromptAwareSAGC
    from sagc_fast.controller.sagc import SAGC


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sagc_fast.controller' has no attribute {name!r}")
    value = getattr(import_module(f"sagc_fast.controller.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
