"""CPU seconds by phase. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def timed(call: Callable[..., Any], seconds: dict[str, float], phase: str) -> Callable[..., Any]:
    """``call``, which adds the CPU seconds that it takes to ``seconds[phase]``."""

    def measured(*args: Any, **options: Any) -> Any:
        started = time.process_time()
        try:
            return call(*args, **options)
        finally:
            seconds[phase] = seconds.get(phase, 0.0) + time.process_time() - started

    return measured
