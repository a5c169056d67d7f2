"""Rows taken and added by number: the sums of plain torch on the CPU, and the other way about on another device."""

from __future__ import annotations

import torch

from sagc_fast.ops.rows import add_rows, take_rows


class Elsewhere(torch.Tensor):
    """Numbers of the CPU that say they are on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def test_both_ways_give_the_same_sums_and_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 4, (30,), generator=generator)
    x, rows = torch.randn(30, 3, generator=generator).double(), torch.randn(5, 3, generator=generator).double()
    weights = torch.randn(30, 3, generator=generator).double()
    wanted = torch.stack([x[index == r].sum(0) for r in range(5)])
    found = []
    for kind in (torch.Tensor, Elsewhere):
        source = rows.clone().requires_grad_()
        taken = take_rows(source.as_subclass(kind), index)
        (taken.as_subclass(torch.Tensor) * weights).sum().backward()
        torch.testing.assert_close(add_rows(x.as_subclass(kind), index, 5).as_subclass(torch.Tensor), wanted)
        found.append(source.grad)
    torch.testing.assert_close(*found)
