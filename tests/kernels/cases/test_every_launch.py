"""What ``sagc-fast doctor --warm`` and the ahead-of-time table launch is valid: every kernel runs on it."""

from __future__ import annotations

import torch
from sagc_fast.kernels.launch_all import Shape, launch_all


def test_every_kernel_runs_once(device: torch.device) -> None:
    launch_all(Shape(2, 1, 32, 64, 96, 300), torch.bfloat16, device)
