"""SAGC: the group size of every optimizer step, chosen from the lengths of the steps before.

    controller = SAGC(SAGCConfig(candidates=(4, 8, 16), tau=2.0, delta=0.25), seed=0)
    group_size = controller.decide()                 # the same answer until the next observe
    controller.observe(lengths)                      # one sequence of completion lengths per group

Paper: "Faster Synchronous On-Policy RL via Straggler-Aware Group Sizing" (arXiv:2606.02218). Departures, each an
option: a larger dual step (``SAGCConfig.eta``) and a fallback for a delta out of reach (``.fallback``).
The arithmetic is in ``_twin.py`` (to read) and ``_jit.py`` (to run).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from sagc_fast.controller import _layout as at
from sagc_fast.controller._beta import beta_quantile
from sagc_fast.controller._lengths import flatten
from sagc_fast.controller._twin import TwinCore
from sagc_fast.controller.config import ControllerWarning, DeltaOutOfReachWarning, SAGCConfig
from sagc_fast.controller.hold import advantage_scale, num_prompts
from sagc_fast.errors import ConfigError

STATE_VERSION = 1

WARN_AFTER = 20
"""Consecutive steps in the fallback before the user is told that delta is out of reach (ours)."""

BACKENDS = ("auto", "numba", "python")


class SAGC:
    """Straggler-aware group sizing: a price on stragglers (dual ascent) and Thompson sampling over the candidates.

    Deterministic in (config, seed, observations). ``backend``: "auto" compiles with numba at the first observation and
    falls back to plain Python, saying so once, when numba cannot be imported; "numba" insists; "python" never compiles.
    Raises ConfigError for an unknown backend or a seed outside [0, 2**64).
    """

    name = "sagc"

    def __init__(self, config: SAGCConfig | None = None, seed: int = 0, backend: str = "auto") -> None:
        if backend not in BACKENDS:
            raise ConfigError(f"The controller's backend is {backend!r}; it must be one of {BACKENDS}.")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise ConfigError(f"The controller's seed is {seed!r}; it must be an integer in [0, 2**64).")
        self.config = config if config is not None else SAGCConfig()
        self._seed = seed
        self._wanted_backend = backend
        self._core: Any = TwinCore(self.config, seed)
        self._is_compiled = backend == "python"  # until the first observation the twin holds the state
        self._group_size = self.config.candidates[self.config.start_arm]
        self._choices = tuple(size for size in self.config.candidates for _ in range(2))
        self._num_fallback_steps = 0
        self._has_warned = False
        self._clipped_ratio: float | None = None

    def decide(self) -> int:
        """Group size of the next step. No side effect: the same answer until the next ``observe``."""
        return self._group_size

    def observe(
        self,
        lengths: Sequence[Sequence[float]],
        *,
        num_clipped: int | None = None,
        problem_ids: Sequence[Any] | None = None,
        seconds: float | None = None,
        num_steps: int | None = None,
    ) -> None:
        """Learn from one step: ``lengths`` holds one sequence of completion lengths (tokens) per group.

        Groups may differ in size; an array [groups, G] is the fastest form. ``num_clipped`` is the number of
        completions cut at their cap, for the gauges, where ``max_length`` does not say it. ``problem_ids`` (one per
        group), ``seconds`` (of the step) and ``num_steps`` (decode steps of its rollout) are what the prompt-aware and
        the cost-aware controller learn from; this one uses lengths alone. No groups at all: posteriors decay, lambda
        stays. Raises ValueError for a length that is negative, infinite or not a number; nothing is learnt then.
        """
        if not self._is_compiled:
            self._compile()
        values, group_size, offsets = flatten(lengths)
        outcome = self._core.observe(values, group_size, offsets)
        if outcome < 0:
            raise ValueError("observe() got a completion length that is negative, infinite or not a number.")
        self._clipped_ratio = None if num_clipped is None else num_clipped / max(1, len(values))
        self._settle(outcome)

    def observe_counts(self, num_stragglers: int, num_groups: int) -> None:
        """Learn from one step of which only the outcome is known: ``num_stragglers`` of ``num_groups`` straggled.

        For an event measured elsewhere. Raises ValueError unless 0 <= num_stragglers <= num_groups, and under
        signal="batch", whose event is not a group's.
        """
        if self.config.signal == "batch":
            raise ValueError("observe_counts() counts groups; signal='batch' needs the lengths, so call observe().")
        if not 0 <= num_stragglers <= num_groups:
            raise ValueError(f"observe_counts() got {num_stragglers} stragglers of {num_groups} groups.")
        if not self._is_compiled:
            self._compile()
        self._settle(self._core.observe_counts(int(num_stragglers), int(num_groups)))

    @property
    def price(self) -> float:
        """lambda, the price of a straggler in units of log2 G."""
        return self._core.export_state()["lambda"]

    def posteriors(self) -> dict[int, tuple[float, float]]:
        """(alpha, beta) of every candidate's Beta posterior."""
        state = self._core.export_state()
        return dict(zip(self.config.candidates, zip(state["alpha"], state["beta"], strict=True), strict=True))

    def num_prompts(self, budget: float, mean_length: float | None = None) -> int:
        """Prompts of the next step under ``config.hold``; ``budget`` per step in the unit held (see ``hold.py``).

        ``mean_length`` (tokens) defaults to the observed mean and is needed before the first observation under
        hold="tokens" only.
        """
        observed = self._core.export_state()["mean_length"]
        return num_prompts(self.config.hold, budget, self.decide(), mean_length or observed or None)

    def advantage_scale(self) -> float:
        """Factor on the advantages of the next step's groups under ``config.adv_scale``: 1, or G / (G - 1)."""
        return advantage_scale(self.config.adv_scale, self.decide())

    def gauges(self) -> dict[str, Any]:
        """What to log after an observation: plain numbers, JSON-able. ``arms`` maps str(G) to posterior and pulls."""
        state = self._core.export_state()
        return {
            "controller": self.name,
            "backend": self._core.backend,
            "step": state["step"],
            "group_size": self._group_size,
            "lambda": state["lambda"],
            "delta": self.config.delta,
            "tau": self.config.tau,
            "arms": {
                str(size): posterior_summary(alpha, beta) | {"pulls": int(pulls)}
                for (size, (alpha, beta)), pulls in zip(self.posteriors().items(), state["pulls"], strict=True)
            },
            "num_groups": state["num_groups"],
            "num_straggler_groups": state["num_straggler_groups"],
            "straggler_rate": state["straggler_rate"],
            "straggler_rate_ema": state["straggler_rate_ema"],
            "straggler_ratio_mean": state["straggler_ratio_mean"],
            "straggler_ratio_max": state["straggler_ratio_max"],
            "clipped_ratio": state["clipped_ratio"] if self._clipped_ratio is None else self._clipped_ratio,
            "dwell": state["held"],
            "is_fallback": bool(state["is_fallback"]),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next decisions depend on; survives JSON bit for bit."""
        return {
            "version": STATE_VERSION,
            "candidates": list(self.config.candidates),
            "seed": self._seed,
            "num_fallback_steps": self._num_fallback_steps,
            "has_warned": self._has_warned,
            "observed_clipped_ratio": self._clipped_ratio,
            **self._core.export_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, random numbers included; the seed is the saved one.

        Raises ConfigError when the state is of another version, of other candidates, or incomplete.
        """
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"The controller state has version {state.get('version')!r}; this one reads {STATE_VERSION}."
            )
        if list(state.get("candidates", ())) != list(self.config.candidates):
            raise ConfigError(
                f"The controller state was saved with candidates {state.get('candidates')}, "
                f"but the configuration has {list(self.config.candidates)}; use the same list to continue."
            )
        missing = [name for name in (*at.SCALARS, *at.ARRAYS, "seed") if name not in state]
        if missing:
            raise ConfigError(f"The controller state lacks {', '.join(missing)}; it is not a state_dict of SAGC.")
        self._seed = state["seed"]
        self._num_fallback_steps = state.get("num_fallback_steps", 0)
        self._has_warned = state.get("has_warned", False)
        self._clipped_ratio = state.get("observed_clipped_ratio")
        self._core.set_seed(self._seed)
        self._core.import_state({name: state[name] for name in (*at.SCALARS, *at.ARRAYS)})
        self._group_size = self.config.candidates[int(state["arm"])]

    def _settle(self, outcome: int) -> None:
        """Take over the core's choice; tell the user once when delta has been out of reach for a while."""
        self._group_size = self._choices[outcome]
        if outcome & 1:
            self._num_fallback_steps += 1
            if self._num_fallback_steps >= WARN_AFTER and not self._has_warned:
                self._warn_out_of_reach()
        else:
            self._num_fallback_steps = 0

    def _warn_out_of_reach(self) -> None:
        smallest = self.config.candidates[0]
        posterior = self.gauges()["arms"][str(smallest)]
        if posterior["mean"] <= self.config.delta:
            return  # held at the bound of lambda while delta can be met: no fault of the user's
        self._has_warned = True
        found = (posterior["mean"], posterior["low"], posterior["high"])
        warnings.warn(DeltaOutOfReachWarning(self.config.delta, smallest, *found), stacklevel=4)

    def _compile(self) -> None:
        """Move the state from the twin into the compiled core, once, if numba is to be had."""
        self._is_compiled = True
        core_class = _compiled_core(self._wanted_backend == "numba")
        if core_class is not None:
            state = self._core.export_state()
            self._core = core_class(self.config, self._seed)
            self._core.import_state(state)


def posterior_summary(alpha: float, beta: float) -> dict[str, float]:
    """Mean and equal-tailed 90% interval of Beta(alpha, beta)."""
    return {
        "mean": alpha / (alpha + beta),
        "low": beta_quantile(0.05, alpha, beta),
        "high": beta_quantile(0.95, alpha, beta),
    }


_has_told_fallback = False


def _compiled_core(is_required: bool) -> Any:
    """The compiled core's class, or None, said once per process, when numba cannot be imported."""
    global _has_told_fallback
    try:
        from sagc_fast.controller._jit import JitCore
    except ImportError as error:
        if is_required:
            raise ConfigError(
                f"The controller's backend 'numba' cannot be imported ({error}); install numba."
            ) from error
        if not _has_told_fallback:
            _has_told_fallback = True
            warnings.warn(
                f"numba cannot be imported ({error}); the controller runs in plain Python: the same decisions, about a "
                "tenth of a millisecond per step.",
                ControllerWarning,
                stacklevel=4,
            )
        return None
    return JitCore
