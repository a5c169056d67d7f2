"""The operators of the update against float64 autograd: attention over packed groups, backward of the row-wise ones,
the head's rows."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sagc_fast.ops import logprobs, reference, varlen
from sagc_fast.ops.layouts import PackedLayout

OPS = torch.ops.sagc_fast
SCALE = 0.3
per_level = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
lengths = st.one_of(st.integers(0, 3), st.integers(4, 70))
groups_of_lengths = st.lists(st.tuples(lengths, st.lists(lengths, max_size=6)), min_size=1, max_size=4)


def packed(groups: list[tuple[int, list[int]]], gap: int = 0) -> tuple[int, PackedLayout]:
    """The groups one behind the other with ``gap`` unused rows between spans."""
    spans, at = [], 0
    for prompt, completions in groups:
        group = []
        for length in (prompt, *completions):
            group.append((at, length))
            at += length + gap
        spans.append(group)
    return at, PackedLayout(torch.zeros(at), tuple(g[0] for g in spans), tuple(tuple(g[1:]) for g in spans))


def compare(actual, expected, tolerance: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance * scale)


def check_attention(native: ModuleType, groups, shape, dtype: torch.dtype, gap: int, tolerance: float) -> None:
    heads, kv_heads, head_dim = shape
    tokens, layout = packed(groups, gap)
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    inputs = [x.detach().requires_grad_() for x in fused.split((heads, kv_heads, kv_heads), dim=1)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    weights = torch.randn(tokens, heads, head_dim).to(dtype)
    out = native.varlen_attention(*inputs, layout, SCALE)
    expected = varlen.masked_attention(*wide, layout, SCALE)
    grads = torch.autograd.grad(out, inputs, weights)
    compare((out, *grads), (expected, *torch.autograd.grad(expected, wide, weights.double())), tolerance)


@per_level
@given(groups_of_lengths, st.sampled_from([(4, 2, 16), (3, 1, 20), (2, 2, 5), (6, 1, 48)]), st.integers(0, 2))
def test_attention_and_its_gradients(native: ModuleType, groups, shape, gap: int) -> None:
    check_attention(native, groups, shape, torch.float32, gap, 2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    "groups", [[(300, [90, 1]), (1, [1])], [(1050, [700, 400, 0, 3])], [(0, [5, 300]), (20, [])]], ids=str
)
def test_attention_over_several_key_steps_and_parts(native: ModuleType, groups, dtype, tolerance: float) -> None:
    """Prompts and completions longer than a step of keys, and groups that are divided, whose shares are added up."""
    check_attention(native, groups, (2, 1, 20), dtype, 0, tolerance)


def test_attention_repeats_to_the_bit_with_any_number_of_threads(native: ModuleType) -> None:
    tokens, layout = packed([(700, [900, 300, 400]), (30, [20] * 8)])
    inputs = [torch.randn(tokens, h, 16, requires_grad=True) for h in (4, 2, 2)]
    weights = torch.randn(tokens, 4, 16)

    def run() -> tuple[torch.Tensor, ...]:
        out = native.varlen_attention(*inputs, layout, SCALE)
        return (out, *torch.autograd.grad(out, inputs, weights))

    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        results.append(run())
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_groups_gradients_do_not_depend_on_the_other_groups(native: ModuleType) -> None:
    alone, both = [(50, [30, 70, 9])], [(90, [20, 40]), (50, [30, 70, 9])]
    results = []
    for groups in (alone, both):
        torch.manual_seed(3)
        tokens, layout = packed(groups)
        inputs = [torch.randn(159, h, 16).requires_grad_() for h in (4, 2, 2)]
        padded = [torch.cat((torch.ones(tokens - 159, *x.shape[1:]), x)) for x in inputs]
        out = native.varlen_attention(*padded, layout, SCALE)[-159:]
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_extreme_scores_stay_finite(native: ModuleType) -> None:
    tokens, layout = packed([(3, [9, 2, 1])])
    inputs = [(torch.randn(tokens, h, 8) * 60).requires_grad_() for h in (4, 2, 2)]
    native.varlen_attention(*inputs, layout, 1.0).sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in inputs)


@pytest.mark.parametrize(
    ("spans", "groups", "says"),
    [
        ([[0, 4], [3, 2]], [0, 2], "row 3 is in two spans"),
        ([[0, 9]], [0, 1], "outside the 6 rows"),
        ([[0, 3], [3, 3]], [0, 0, 2], "group 0 has no prompt span"),
        ([[0, 3]], [0, 2], "end with the spans"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(spans, groups, says: str) -> None:
    x = torch.randn(6, 2, 8)
    with pytest.raises(RuntimeError, match=says):
        OPS.varlen_attention(x, x, x, torch.tensor(spans), torch.tensor(groups), 1.0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(1, 1), (5, 19), (70, 24), (200, 33)])
def test_gradients_of_norms_and_gates(native: ModuleType, shape, dtype, tolerance: float) -> None:
    rows, width = shape
    x, residual, grad_sum = (torch.randn(shape).to(dtype) for _ in range(3))
    weight, gate_up = (torch.rand(width) + 0.5).to(dtype), torch.randn(rows, 2 * width).to(dtype)

    def run(module, convert):
        inputs = [convert(t).requires_grad_() for t in (x, residual, weight, gate_up)]
        normed = module.rms_norm(inputs[0], inputs[2], 1e-5)
        added, total = module.add_rms_norm(inputs[0], inputs[1], inputs[2], 1e-5)
        gated = module.silu_mul(inputs[3])
        loss = sum((y * convert(g)).sum() for y, g in ((normed, x), (added, residual), (total, grad_sum), (gated, x)))
        return normed, added, total, gated, *torch.autograd.grad(loss, inputs)

    compare(run(native, torch.clone), run(reference, torch.Tensor.double), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 6), (1, 1, 34)])
def test_rotary_split_and_its_gradient(native: ModuleType, heads, kv_heads, head_dim, dtype, tolerance: float) -> None:
    qkv = torch.randn(9, (heads + 2 * kv_heads) * head_dim).to(dtype).requires_grad_()
    wide, angles = qkv.detach().double().requires_grad_(), torch.randn(9, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    actual = native.rotary_split(qkv, cos, sin, heads, kv_heads)
    expected = reference.rotary_split(wide, cos.double(), sin.double(), heads, kv_heads)
    weights = [torch.randn(x.shape) for x in actual]
    grad = torch.autograd.grad(actual, qkv, [w.to(dtype) for w in weights])
    wanted = torch.autograd.grad(expected, wide, [w.double() for w in weights])
    compare((*actual, *grad), (*expected, *wanted), tolerance)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("vocab", [1, 7, 16, 1000, 5003])
def test_rows_of_logits(native: ModuleType, vocab: int, dtype, tolerance: float, temperature: float) -> None:
    logits, targets = (torch.randn(6, vocab) * 4).to(dtype), torch.randint(vocab, (6,))
    expected = logprobs.TorchRows.logits_stats(logits.double(), targets, temperature)
    stats = native.logits_stats(logits, targets, temperature)
    compare(stats, expected, 2e-6)
    grads, cut = torch.randn(2, 6).unbind(), vocab // 3
    wide = logits.double()
    logprobs.TorchRows.logits_grad_(wide, targets, *expected[1:], *(g.double() for g in grads), temperature, 0)
    for block, first in ((logits[:, :cut].clone(), 0), (logits[:, cut:].clone(), cut)):
        if block.shape[1]:
            native.logits_grad_(block, targets, *stats[1:], *grads, temperature, first)
            compare([block], [wide[:, first : first + block.shape[1]]], tolerance)


def test_a_target_outside_the_vocabulary_is_refused(native: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="target 9 of token 1 is outside the vocabulary of 9"):
        native.logits_stats(torch.randn(2, 9), torch.tensor([3, 9]), 1.0)
