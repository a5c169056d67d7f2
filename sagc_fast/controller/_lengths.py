"""From what callers hold (lists of lists, arrays, tensors) to one flat vector of lengths and the group boundaries."""

from __future__ import annotations

from itertools import accumulate, chain
from typing import Any

import numpy as np

try:
    from sagc_fast.controller._fill import fill
except ImportError:  # built without a C compiler or Python's headers

    def fill(groups: Any, values: np.ndarray, group_size: int) -> bool:
        """Stands in for csrc/controller/fill.c and leaves the work to NumPy."""
        return False


NO_OFFSETS = np.zeros(1, np.int64)


def flatten(lengths: Any) -> tuple[np.ndarray, int, np.ndarray]:
    """(values float64 [N], group_size, offsets int64): groups are cut every ``group_size`` values, or at offsets if 0.

    Raises ValueError when ``lengths`` is not one sequence of numbers per group.
    """
    if type(lengths) is np.ndarray and lengths.ndim == 2:
        values = np.ascontiguousarray(lengths, dtype=np.float64).reshape(-1)
        return values, max(1, lengths.shape[1]), NO_OFFSETS
    try:
        if type(lengths) is list and lengths:  # nearly every call: lists of one size
            group_size = len(lengths[0])
            values = np.empty(group_size * len(lengths))
            if group_size and fill(lengths, values, group_size):
                return values, group_size, NO_OFFSETS
        sizes = list(map(len, lengths))
        values = np.empty(sum(sizes))
        if not fill(lengths, values, -1):
            values = np.fromiter(chain.from_iterable(lengths), np.float64, values.size)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "observe() wants one sequence of completion lengths per group, such as [[12, 30], [8, 9]]; "
            f"got {_short(lengths)}."
        ) from error
    if not sizes:
        return values, 0, NO_OFFSETS
    if sizes.count(sizes[0]) == len(sizes):
        return values, max(1, sizes[0]), NO_OFFSETS
    return values, 0, np.array([0, *accumulate(sizes)], dtype=np.int64)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
