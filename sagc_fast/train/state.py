"""Where a run stands: all that a checkpoint must hold beside weights and optimizer moments, as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sagc_fast.errors import CheckpointError


@dataclass
class TrainState:
    """Changes with every step; the same numbers, the same weights and the same seed give the same next step."""

    step: int = 0
    """Steps done."""
    position: int = 0
    """Next index of the train split; also the noise key of its prompt."""
    num_updates: int = 0
    """Optimizer updates applied."""
    time_seconds: float = 0.0
    """Training time over all starts, evaluations excluded."""
    num_bad_in_row: int = 0
    """Steps in a row whose loss or gradient was not finite."""
    evaluated_step: int = -1
    """Step of the last held-out evaluation."""
    first_accuracy: float | None = None
    """Held-out accuracy before the first step."""
    last_accuracy: float | None = None
    best_step: int | None = None
    best_accuracy: float | None = None
    controller: dict[str, Any] = field(default_factory=dict)
    prompt_budget: dict[str, Any] = field(default_factory=dict)
    alarms: dict[str, Any] = field(default_factory=dict)
    prompt_history: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    """Sizes in bytes of the metrics files (see metrics.py)."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def is_done(self, record: Mapping[str, Any]) -> bool:
        """Whether a line of the run's files tells of a step, or of an evaluation, that is not to be done again."""
        reached = self.evaluated_step if record.get("event") == "eval" else self.step
        step = record.get("step")
        return not isinstance(step, int) or step <= reached

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """Raises CheckpointError for a state written by another version."""
        known = {f.name for f in fields(cls)}
        if set(values) != known:
            odd = ", ".join(sorted(set(values) ^ known))
            raise CheckpointError(
                f"The checkpoint's state was written by another version (fields {odd}); use that one."
            )
        return cls(**values)
