"""Training attention through flash-attn's variable-length function: a stand-in of its signature, since the package
needs a GPU to be built. What must be right is which queries see which keys, and the gradients of the copied prompts."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch

from sagc_fast import ops
from sagc_fast.errors import BackendError
from sagc_fast.ops import backend, varlen
from sagc_fast.ops.layouts import PackedLayout

SCALE = 0.4


def _varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """flash-attn 2.7: the causal mask is aligned to the end of the keys."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert causal
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) == max_seqlen_k
    parts, group = [], q.shape[1] // k.shape[1]
    for queries, keys in zip(cu_seqlens_q.unfold(0, 2, 1).tolist(), cu_seqlens_k.unfold(0, 2, 1).tolist(), strict=True):
        own_q, own_k, own_v = q[slice(*queries)], k[slice(*keys)], v[slice(*keys)]
        own_k, own_v = own_k.repeat_interleave(group, 1), own_v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", own_q, own_k) * softmax_scale
        is_hidden = torch.ones(len(own_q), len(own_k), dtype=torch.bool).triu(len(own_k) - len(own_q) + 1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(is_hidden, float("-inf")).softmax(-1), own_v))
    return torch.cat(parts)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    package = types.ModuleType("flash_attn")
    package.flash_attn_varlen_func = _varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.delitem(sys.modules, "sagc_fast.ops.flash", raising=False)
    backend.flash_module.cache_clear()
    backend._choices.clear()
    yield backend.flash_module()
    backend.flash_module.cache_clear()
    backend._choices.clear()
    sys.modules.pop("sagc_fast.ops.flash", None)
    ops.__dict__.pop("flash", None)


LAYOUTS = {
    "in_order": ([(0, 5)], [[(5, 3), (8, 1), (9, 7)]]),
    "two_groups": ([(0, 4), (10, 1)], [[(4, 6)], [(11, 2), (13, 3)]]),
    "gaps_and_empty_spans": ([(2, 3), (9, 0)], [[(5, 0), (6, 2)], [(10, 4)]]),
    "prompt_alone": ([(0, 6)], [[]]),
    "out_of_order": ([(6, 4)], [[(0, 2), (3, 3)]]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_masked_attention(name: str, flash: types.ModuleType) -> None:
    prompts, completions = LAYOUTS[name]
    layout = PackedLayout(torch.zeros(16, dtype=torch.int64), tuple(prompts), tuple(map(tuple, completions)))
    generator = torch.Generator().manual_seed(1)
    exact = [torch.randn(16, heads, 8, generator=generator).double().requires_grad_() for heads in (4, 2, 2)]
    grad = torch.randn(16, 4, 8, generator=generator).double()
    wanted = varlen.masked_attention(*exact, layout, SCALE)
    wanted.backward(grad)
    mine = [x.detach().clone().requires_grad_() for x in exact]
    found = flash.varlen_attention(*mine, layout, SCALE)
    found.backward(grad)
    torch.testing.assert_close(found, wanted)
    for value, expected in zip(mine, exact, strict=True):  # the copies' gradients are added in fp32
        torch.testing.assert_close(value.grad, expected.grad, rtol=1e-5, atol=1e-5)


def test_chosen_for_half_precision_on_cuda_and_for_its_operation_alone(flash: types.ModuleType, monkeypatch) -> None:
    monkeypatch.delenv(backend.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(backend, "_choices", {})
    monkeypatch.setattr(backend, "triton_module", lambda: None)
    monkeypatch.setattr(backend, "_has_warned", True)
    assert backend.resolve("varlen_attention", "cuda", torch.bfloat16) == "flash"
    assert backend.resolve("varlen_attention", "cuda", torch.float32) == "torch"
    assert backend.resolve("rms_norm", "cuda", torch.bfloat16) == "torch"
    with ops.use_backend("flash"):
        assert backend.resolve("varlen_attention", "cuda", torch.float16) == "flash"
        assert backend.resolve("varlen_attention", "cpu", torch.bfloat16) == "torch"
        if backend.native_module() is not None:
            assert backend.resolve("rms_norm", "cpu", torch.bfloat16) == "native"


def test_asking_for_it_where_it_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "flash_module", lambda: None)
    with pytest.raises(BackendError, match=r"'flash' \(set_backend\) is not there: flash-attn is not installed"):
        ops.set_backend("flash")
