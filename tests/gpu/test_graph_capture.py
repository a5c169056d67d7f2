"""Every Triton launch of the package can be captured into a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_every_launcher_can_be_captured(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    pytest.importorskip("triton")
    from sagc_fast.kernels.aot import Shape, launch_all
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    launches: list[Callable[[], object]] = []
    plain = {kind: kind.run for kind in (Autotuner, JITFunction)}
    depth = 0

    def noting(kind: type) -> Callable:
        def run(self, *args, **options):
            nonlocal depth
            if depth == 0:  # a tuned kernel launches plain ones, several while it is being tuned
                launches.append(lambda: plain[kind](self, *args, **options))
            depth += 1
            try:
                return plain[kind](self, *args, **options)
            finally:
                depth -= 1

        return run

    for kind in plain:
        kind.run = noting(kind)
    try:
        launch_all(Shape(4, 2, 32, 64, 96, 300), torch.bfloat16, device)
    finally:
        for kind, run in plain.items():
            kind.run = run
    torch.cuda.synchronize()
    assert len(launches) >= 20
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
