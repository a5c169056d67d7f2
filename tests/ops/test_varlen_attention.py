"""Training attention with the prompt stored once: equals attention over [prompt; completion] for every completion."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from sagc_fast.ops import varlen
from sagc_fast.ops.layouts import PackedLayout

SCALE = 0.35
groups_of_lengths = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), max_size=6)), min_size=1, max_size=5
)


def _layout(groups: list[tuple[int, list[int]]], gap: int = 0) -> tuple[int, PackedLayout]:
    """Packed one behind the other, ``gap`` unused rows between spans."""
    prompts, completions, positions, at = [], [], [], 0

    def place(length: int, first_position: int) -> tuple[int, int]:
        nonlocal at
        span = (at, length)
        positions.append(torch.arange(first_position, first_position + length + gap))
        at += length + gap
        return span

    for prompt, lengths in groups:
        prompts.append(place(prompt, 0))
        completions.append(tuple(place(length, prompt) for length in lengths))
    return at, PackedLayout(torch.cat(positions), tuple(prompts), tuple(completions))


def _qkv(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, h, head_dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def _unshared(q, k, v, layout: PackedLayout) -> torch.Tensor:
    """Every [prompt; completion] a sequence of its own, causal."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for prompt, completions in zip(layout.prompt_spans, layout.completion_spans, strict=True):
        for spans in ((prompt,), *((prompt, completion) for completion in completions)):
            rows = torch.cat([torch.arange(start, start + length) for start, length in spans])
            qs, ks, vs = q[rows], k[rows].repeat_interleave(group, 1), v[rows].repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", qs, ks) * SCALE
            scores = scores.masked_fill(torch.ones(len(rows), len(rows)).triu(1).bool(), float("-inf"))
            own = torch.einsum("hqk,khd->qhd", scores.softmax(-1), vs)[-spans[-1][1] :]
            out = out.index_copy(0, rows[-spans[-1][1] :], own)
    return out


@pytest.mark.parametrize("attention", [varlen.varlen_attention, varlen.masked_attention])
@settings(max_examples=25, deadline=None)
@given(groups_of_lengths, st.sampled_from([(4, 2, 8), (3, 1, 16), (2, 2, 4)]), st.integers(0, 2))
def test_output_and_gradients_equal_the_unshared_computation(attention, groups, shape, gap: int) -> None:
    tokens, layout = _layout(groups, gap)
    inputs = _qkv(tokens, *shape, torch.float64)
    weights = torch.randn(tokens, shape[0], shape[2], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out, expected = attention(*inputs, layout, SCALE), _unshared(*inputs, layout)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, weights), torch.autograd.grad(expected, inputs, weights)
    )


def test_completions_out_of_order_in_the_batch() -> None:
    """Nothing asks the packer for a certain order of rows."""
    layout = PackedLayout(torch.zeros(0), ((9, 4), (0, 2)), (((15, 3), (2, 5), (13, 2)), ((7, 2), (18, 1))))
    inputs = _qkv(19, 4, 2, 8, torch.float64)
    weights = torch.randn(19, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out, expected = varlen.varlen_attention(*inputs, layout, SCALE), _unshared(*inputs, layout)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, weights), torch.autograd.grad(expected, inputs, weights)
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_model_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    tokens, layout = _layout([(20, [30, 5, 70]), (3, []), (40, [1, 2])])
    inputs = _qkv(tokens, 4, 2, 16, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = varlen.varlen_attention(*inputs, layout, SCALE), _unshared(*wide, layout)
    assert out.dtype == dtype
    grads, wanted = torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), wide)
    for actual, reference in zip((out, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(actual.double(), reference, rtol=tolerance, atol=tolerance * 3)


def test_extreme_scores_leave_no_nan_through_padding() -> None:
    tokens, layout = _layout([(3, [9, 2, 1])])
    inputs = [(x * 60).detach().requires_grad_() for x in _qkv(tokens, 4, 2, 8, torch.float32)]
    out = varlen.varlen_attention(*inputs, layout, 1.0)
    out.sum().backward()
    assert bool(out.isfinite().all())
    assert all(bool(x.grad.isfinite().all()) for x in inputs)


def test_segments_of_like_length_share_a_batch() -> None:
    _, layout = _layout([(10, [100, 90, 95, 30, 28, 3, 1]), (10, [96])])
    batches = varlen._make_plan(layout).segment_batches
    lengths = [(~batch.is_padding_SL).sum(1).tolist() for batch in batches]
    assert lengths == [[100, 96, 95, 90], [30, 28], [10, 10, 3, 1]]


def test_same_bits_on_every_run(num_threads: int) -> None:
    """A resumed training run repeats the killed one bit for bit."""
    tokens, layout = _layout([(40, [50, 20, 30]), (60, [10, 80])])
    inputs = _qkv(tokens, 9, 3, 16, torch.float32)

    def run() -> tuple[torch.Tensor, ...]:
        out = varlen.varlen_attention(*inputs, layout, SCALE)
        return (out, *torch.autograd.grad(out.pow(2).sum(), inputs))

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_plain_causal_attention_is_a_group_without_completions() -> None:
    tokens, layout = _layout([(25, [])])
    q, k, v = _qkv(tokens, 4, 4, 8, torch.float64)
    expected = functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=SCALE
    )
    torch.testing.assert_close(varlen.varlen_attention(q, k, v, layout, SCALE), expected.transpose(0, 1))
