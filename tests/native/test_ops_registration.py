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
    spans, groups = torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 2])
    lens, starts, zeros = torch.tensor([9, 16], **int32), torch.tensor([0, 1, 3], **int32), torch.zeros(2, **int32)
    return {
        "linear": (torch.randn(rows, 24), torch.randn(10, 24), torch.randn(10)),
        "rms_norm": (torch.randn(rows, 24), torch.randn(24), 1e-5),
        "add_rms_norm": (torch.randn(rows, 24), torch.randn(rows, 24), torch.randn(24), 1e-5),
        "silu_mul": (torch.randn(rows, 24),),
        "rope_and_cache": (q, kv, kv, angles.cos(), angles.sin(), positions, cache, cache.clone(), positions),
        "paged_attention": (q, cache, cache, starts, lens, tables, none, zeros, 0.2),
        "rms_norm_backward": (*torch.randn(2, rows, 24), torch.randn(24), 1e-5, torch.randn(rows, 24)),
        "silu_mul_backward": (torch.randn(rows, 12), torch.randn(rows, 24)),
        "rotary_split": (torch.randn(rows, 8 * head_dim), angles[:rows].cos(), angles[:rows].sin(), heads, kv_heads),
        "rotary_merge": (q, kv, kv, angles[:rows].cos(), angles[:rows].sin()),
        "varlen_attention": (q, kv, kv.clone(), spans, groups, 0.2),
        "varlen_attention_backward": (q, q, kv, kv, q, torch.ones(rows, heads), spans, groups, 0.2),
        "logits_stats": (torch.randn(rows, 50), positions, 0.7),
        "logits_grad_": (torch.randn(rows, 50), positions, *torch.ones(4, rows).unbind(), 0.7, 0),
        "sample_tokens": (torch.randn(rows, 50), torch.rand(rows, dtype=torch.float64), torch.ones(rows)),
    }


DIFFERENTIABLE = ("rms_norm", "add_rms_norm", "silu_mul", "rotary_split", "varlen_attention")


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_registered_with_the_operator(name: str) -> None:
    """Also under torch.compile, which asks the registration rather than running Python."""
    inputs = [
        x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in operands()[name]
    ]
    if name == "rotary_split":
        inputs[1], inputs[2] = inputs[1].detach(), inputs[2].detach()
    tests = ("test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(OPS, name).default, tuple(inputs), test_utils=tests)


@pytest.mark.parametrize("name", sorted(operands()))
def test_schema_and_fake_registration_tell_the_truth(native: ModuleType, name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, operands()[name], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["linear", "rms_norm", "add_rms_norm", "silu_mul", "logits_stats", "sample_tokens"])
def test_fake_registration_tells_the_truth_of_bf16(native: ModuleType, name: str) -> None:
    is_logits = name in ("logits_stats", "sample_tokens")  # whose other operands stay as they are
    inputs = [
        x.bfloat16() if isinstance(x, torch.Tensor) and (place == 0 or not is_logits) else x
        for place, x in enumerate(operands()[name])
    ]
    torch.library.opcheck(getattr(OPS, name).default, tuple(inputs), test_utils=("test_schema", "test_faketensor"))


def test_every_operation_offered_is_registered(native: ModuleType) -> None:
    elsewhere = {
        "decoder",
        "token_logprobs",
    }  # functions of its own (tests/model/test_decoder.py); logits_stats, logits_grad_
    assert native.available_ops() - elsewhere <= set(operands())


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
