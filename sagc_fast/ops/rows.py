"""Rows by number, taken and added so that sums have one order on every device, forward and backward.

On the CPU torch adds in order in ``index_add``, which is also the backward of ``index_select``, while the backward of
indexing adds as its threads come along. On a GPU it is the other way about: ``index_add`` adds by atomics, and
``index_put`` sorts first (torch.use_deterministic_algorithms lists which is which).
"""

from __future__ import annotations

import torch


def take_rows(x: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
    """``x[index_N]``; its gradient adds what rows that were taken several times get in a fixed order."""
    return x.index_select(0, index_N) if x.device.type == "cpu" else x[index_N]


def add_rows(x: torch.Tensor, index_N: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Row r of the result is the sum of the rows n of ``x`` with ``index_N[n] == r``, added in a fixed order, zero for
    none. ``index_N`` is int64; the result has ``num_rows`` rows and the dtype of ``x``; differentiable."""
    zeros = x.new_zeros(num_rows, *x.shape[1:])
    if x.device.type == "cpu":
        return zeros.index_add(0, index_N, x)
    return zeros.index_put((index_N,), x, accumulate=True)
