"""From what callers hold (lists of lists, arrays, tensors) to one flat vector of lengths and the group boundaries."""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import accumulate, chain
from typing import Any

import numpy as np

try:
    from sagc_fast.controller._fill import fill
except ImportError:  # built without a C compiler or Python's headers

    def fill(groups: Any, values: np.ndarray, group_size: int) -> bool:
        """Stands in for csrc/controller/fill.c and leaves the work to NumPy."""
        return False


_WANTED = "observe() wants one sequence of completion lengths per group, such as [[12, 30], [8, 9]]; got"
_NO_GROUPS = (str, bytes, bytearray, Mapping, Set)
"""What has a length and can be iterated over, yet holds no lengths in an order."""
NO_OFFSETS = np.zeros(1, np.int64)


def flatten(lengths: Any) -> tuple[np.ndarray, int, np.ndarray]:
    """(values float64 [N], group_size, offsets int64): groups are cut every ``group_size`` values, or at offsets if 0.

    Raises ValueError when ``lengths`` is not one sequence of numbers per group.
    """
    if type(lengths) is np.ndarray and lengths.ndim == 2:
        if lengths.dtype.kind not in "biuf":
            raise ValueError(f"{_WANTED} an array of {lengths.dtype}.")
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
            values = _read_slowly(lengths, values.size)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{_WANTED} {_short(lengths)}.") from error
    if not sizes:
        return values, 0, NO_OFFSETS
    if sizes.count(sizes[0]) == len(sizes):
        return values, max(1, sizes[0]), NO_OFFSETS
    return values, 0, np.array([0, *accumulate(sizes)], dtype=np.int64)


def _read_slowly(lengths: Any, size: int) -> np.ndarray:
    """Whatever is no list of lists of plain numbers. Raises TypeError, ValueError or OverflowError otherwise."""
    items = list(chain.from_iterable(lengths))
    if any(isinstance(group, _NO_GROUPS) for group in (lengths, *lengths)) or any(isinstance(x, str) for x in items):
        raise TypeError("text, mappings and sets are no sequences of numbers")
    return np.fromiter(items, np.float64, size)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
