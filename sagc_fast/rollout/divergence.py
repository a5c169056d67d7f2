"""Turns the operators' check of the logits into a sentence that says where the numbers went wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sagc_fast.errors import DivergenceError

MARK = "Logits are not finite"
"""How every backend's operator begins its message."""


@contextmanager
def divergence_named(model: Any) -> Iterator[None]:
    """Within: logits of ``model`` that are NaN or infinite end in a DivergenceError."""
    try:
        yield
    except RuntimeError as error:
        if MARK not in str(error):
            raise
        raise DivergenceError(f"The policy's logits are not finite: {_cause(model)}") from None


def _cause(model: Any) -> str:
    weights = dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else {}
    largest = {name: float(weight.detach().abs().max()) for name, weight in weights.items()}  # a NaN is the largest
    broken = [name for name, value in largest.items() if not math.isfinite(value)]
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        where = f"its weight {broken[0]}{more} holds NaN or infinity"
        return f"{where}; take an earlier checkpoint or another copy of the model."
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.") if weights else "this dtype"
    return (
        f"its products overflow in {dtype} (largest weight {max(largest.values(), default=0.0):.3g}); take an earlier "
        f"checkpoint{', or dtype bf16' if dtype == 'float16' else ''}."
    )
