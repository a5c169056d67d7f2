"""SAGC for a million simulated steps per second or two: events instead of lengths.

A group's straggler event is all that the controller learns from, so a simulation needs only its probability per arm,
tabulated once from the length process (``simulate.straggler_probabilities``). The decisions are those of the compiled
core itself, not of a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sagc_fast.controller import _layout as at
from sagc_fast.controller.config import SAGCConfig
from sagc_fast.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EventRun:
    """One simulated run, arrays of length T."""

    arms: np.ndarray
    """Index of the candidate played, int8."""
    num_stragglers: np.ndarray
    """Straggling groups, int32."""
    prices: np.ndarray
    """lambda that priced the step's choice, float64."""
    probabilities: np.ndarray
    """True straggler probability of the arm played, float64."""


def simulate_events(
    config: SAGCConfig, probabilities: np.ndarray, steps: int = 1_000_000, num_groups: int = 16, seed: int = 0
) -> EventRun:
    """Run the controller for ``steps`` steps of ``num_groups`` groups whose events are independent.

    ``probabilities`` [moments, arms]: each row holds for an equal share of the run, so an abrupt change is two rows.
    Raises ConfigError for another shape, values outside [0, 1], a signal other than "group", or without numba.
    """
    table = np.ascontiguousarray(np.atleast_2d(probabilities), dtype=np.float64)
    if table.ndim != 2 or table.shape[1] != len(config.candidates) or not ((table >= 0) & (table <= 1)).all():
        raise ConfigError(
            f"simulate_events got probabilities of shape {np.shape(probabilities)}; it wants one row of "
            f"{len(config.candidates)} values in [0, 1] per moment, one for each candidate."
        )
    if config.signal != "group":
        raise ConfigError(f"simulate_events knows signal='group' only, not {config.signal!r}; use run_policy.")
    try:
        from sagc_fast.controller import _jit
    except ImportError as error:
        raise ConfigError(
            f"simulate_events needs numba, which cannot be imported ({error}); use run_policy."
        ) from error
    state, params = _jit.pack_state(config), _jit.pack_params(config)
    params[at.P_KEY_LOW], params[at.P_KEY_HIGH] = seed & 0xFFFFFFFF, seed >> 32
    run = EventRun(np.empty(steps, np.int8), np.empty(steps, np.int32), np.empty(steps), np.empty(steps))
    _jit.event_loop(
        state, params, table, num_groups, seed & 0xFFFFFFFF, run.arms, run.num_stragglers, run.prices, run.probabilities
    )
    return run
