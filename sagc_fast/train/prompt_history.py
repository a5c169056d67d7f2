"""Which problems have lately taught nothing: those always solved or never, to be passed over for a while (ours).

Off by default, because it changes what is learnt: the prompts of a step are then no longer drawn as the data lie, but
away from problems that look solved or hopeless. What is solved is practised less and may be forgotten, and what is
hopeless gets fewer chances to become possible; so nobody is passed over more than ``skip_times`` times in a row. The
decision rests on earlier steps alone, never on completions of the step itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class PromptHistory:
    """Completions in a row with the same outcome, per problem.

    Args:
        skip_after: so many completions in a row, all right or all wrong, make a problem one to pass over; 0 is off.
            They count one by one, so group sizes may differ.
        skip_times: draws to pass over before the problem is tried again.
        state: from :meth:`state_dict`.
    """

    def __init__(self, skip_after: int, skip_times: int, state: Mapping[str, Any] | None = None) -> None:
        self._skip_after, self._skip_times = skip_after, skip_times
        # problem id -> [outcome of the last completions, how many of them in a row, draws still to pass over]
        self._runs: dict[int, list[int]] = {int(key): list(run) for key, run in (state or {}).items()}

    def passes_over(self, problem_id: int) -> bool:
        """Whether this draw of the problem is to be left out; counts it."""
        run = self._runs.get(problem_id)
        if run is None or run[2] == 0:
            return False
        run[2] -= 1
        return True

    def observe(self, problem_id: int, outcomes: Sequence[bool]) -> None:
        """Outcomes (never shaped rewards) of one group of the problem; empty ones say nothing."""
        if self._skip_after == 0 or not outcomes:
            return
        if len(set(map(bool, outcomes))) == 2:
            self._runs.pop(problem_id, None)
            return
        outcome = int(outcomes[0])
        run = self._runs.setdefault(problem_id, [outcome, 0, 0])
        if run[0] != outcome:
            run[:] = [outcome, 0, 0]
        run[1] += len(outcomes)
        run[2] = self._skip_times if run[1] >= self._skip_after else 0

    def state_dict(self) -> dict[str, list[int]]:
        """Plain values; one small record per problem whose last completions were all alike."""
        return {str(key): list(run) for key, run in self._runs.items()}
