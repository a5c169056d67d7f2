"""FixedG: the same group size at every step, as vanilla GRPO and DAPO, with the controller's interface and gauges."""

from __future__ import annotations

import math
import warnings
from numbers import Integral
from typing import Any

from sagc_fast.controller.config import ControllerWarning, SAGCConfig
from sagc_fast.controller.sagc import SAGC
from sagc_fast.errors import ConfigError


class FixedG(SAGC):
    """A constant group size. It measures what SAGC measures (rates, ratios, clipped ratio) with the same code: it is
    SAGC with one candidate. ``options`` are SAGCConfig's (tau, max_length, hold, ...). Raises ConfigError.
    """

    name = "fixed"
    price = math.nan  # nothing is priced

    def __init__(self, group_size: int, **options: Any) -> None:
        if isinstance(group_size, bool) or not isinstance(group_size, Integral) or group_size < 2:
            raise ConfigError(f"FixedG's group size is {group_size!r}; it must be an integer >= 2.")
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ControllerWarning
            )  # that G=2 cannot straggle is a finding here, not a fault
            config = SAGCConfig(candidates=(int(group_size),), fallback=False, **options)
        super().__init__(config)

    def gauges(self) -> dict[str, Any]:
        """SAGC's gauges without the price and the posteriors, which steer nothing here."""
        return {
            name: value for name, value in super().gauges().items() if name not in ("lambda", "arms", "is_fallback")
        }
