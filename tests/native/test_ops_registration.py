"""Fake registrations, instruction-set levels and the environment switch of the native library."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from sagc_fast.errors import BackendError

OPS = torch.ops.sagc_fast


def operands() -> dict[str, tuple]:
    """One small call of every operator."""
    rows, heads, kv_heads, head_dim, blocks = 3, 4, 2, 16, 4
    q, kv = torch.randn(rows, heads, head_dim), torch.randn(rows, kv_heads, head_dim)
    cache = torch.randn(blocks, kv_heads, 8, head_dim)
    angles, positions = torch.randn(10, head_dim // 2), torch.arange(3)
    int32 = {"dtype": torch.int32}
    tables, none = torch.arange(4, **int32).view(2, 2), torch.tensor([-1, -1], **int32)
    lens, starts, zeros = torch.tensor([9, 16], **int32), torch.tensor([0, 1, 3], **int32), torch.zeros(2, **int32)
    return {
        "linear": (torch.randn(rows, 24), torch.randn(10, 24), torch.randn(10)),
        "rms_norm": (torch.randn(rows, 24), torch.randn(24), 1e-5),
        "add_rms_norm": (torch.randn(rows, 24), torch.randn(rows, 24), torch.randn(24), 1e-5),
        "silu_mul": (torch.randn(rows, 24),),
        "rope_and_cache": (q, kv, kv, angles.cos(), angles.sin(), positions, cache, cache.clone(), positions),
        "paged_attention": (q, cache, cache, starts, lens, tables, none, zeros, 0.2),
        "sample_tokens": (torch.randn(rows, 50), torch.rand(rows, dtype=torch.float64), torch.ones(rows)),
    }


@pytest.mark.parametrize("name", sorted(operands()))
def test_schema_and_fake_registration_tell_the_truth(native: ModuleType, name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, operands()[name], test_utils=("test_schema", "test_faketensor"))


def test_every_operation_offered_is_registered(native: ModuleType) -> None:
    assert native.available_ops() == {
        *operands(),
        "decoder",
    }  # the decoder has functions of its own: tests/model/test_decoder.py


def test_compile_and_export_see_through_an_operator(native: ModuleType) -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return OPS.silu_mul(OPS.linear(x, weight, None)) + 1

    x, weight = torch.randn(5, 24), torch.randn(12, 24)
    expected = Block()(x, weight)
    assert torch.equal(torch.compile(Block(), backend="aot_eager", fullgraph=True)(x, weight), expected)
    assert torch.equal(torch.export.export(Block(), (x, weight)).module()(x, weight), expected)


@pytest.mark.parametrize("name", sorted(operands()))
def test_levels_agree_to_rounding(native: ModuleType, name: str) -> None:
    case = operands()[name]
    results = []
    for level in ("scalar", native.cpu_level()):
        native.set_cpu_level(level)
        result = getattr(OPS, name)(*[x.clone() if isinstance(x, torch.Tensor) else x for x in case])
        results.append(result if isinstance(result, tuple) else (result,))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_levels_end_with_the_one_in_use(native: ModuleType) -> None:
    native.set_cpu_level("auto")
    assert native.cpu_levels()[0] == "scalar"
    assert native.cpu_level() == native.cpu_levels()[-1]
    with pytest.raises(BackendError, match="'mmx' is not to be had"):
        native.set_cpu_level("mmx")


@pytest.mark.parametrize(("level", "printed"), [("scalar", "scalar"), ("sse9", "CPU level 'sse9' is not to be had")])
def test_environment_switch_chooses_the_level(level: str, printed: str) -> None:
    code = "from sagc_fast.ops import native; print(native.cpu_level())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "SAGC_CPU_LEVEL": level}
    )
    assert printed in done.stdout + done.stderr
    assert (done.returncode == 0) == (level == "scalar")
