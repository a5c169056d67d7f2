"""Log-probs and entropy from hidden states: values, gradients, and no tensor of all logits."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sagc_fast.ops.logprobs import token_logprobs


def _inputs(num: int, width: int, vocab: int, dtype: torch.dtype, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num, width, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_()
    return hidden, head, torch.randint(vocab, (num,), generator=generator)


def _by_definition(hidden, head, targets, temperature):
    logp = (hidden.double() @ head.double().t() / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 4, 7, 100, None])
def test_values_and_gradients_are_those_of_log_softmax(temperature: float, chunk: int | None) -> None:
    hidden, head, targets = _inputs(15, 12, 33, torch.float64)
    weights = torch.randn(2, 15, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outputs = token_logprobs(hidden, head, targets, temperature, chunk)
    expected = _by_definition(hidden, head, targets, temperature)
    torch.testing.assert_close(outputs, expected)
    for which in ((1, 1), (1, 0), (0, 1)):
        losses = [sum(f * (w * o).sum() for f, w, o in zip(which, weights, pair)) for pair in (outputs, expected)]  # noqa: B905
        grads = [torch.autograd.grad(loss, (hidden, head), retain_graph=True) for loss in losses]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_model_dtypes_give_fp32_results_and_gradients_in_their_own(dtype: torch.dtype, tolerance: float) -> None:
    hidden, head, targets = _inputs(40, 16, 90, dtype)
    outputs = token_logprobs(hidden, head, targets, 0.9, 16)
    assert [o.dtype for o in outputs] == [torch.float32] * 2
    expected = _by_definition(hidden, head, targets, 0.9)
    grads = torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), (hidden, head))
    expected_grads = torch.autograd.grad(expected[0].sum() + expected[1].sum(), (hidden, head))
    assert [g.dtype for g in grads] == [dtype] * 2
    for actual, wanted in zip((*outputs, *grads), (*expected, *expected_grads), strict=True):
        scale = float(wanted.detach().abs().max())
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=0, atol=tolerance * scale)


def test_no_tensor_of_all_logits_is_ever_made() -> None:
    num, vocab, chunk = 64, 500, 8
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    hidden, head, targets = _inputs(num, 4, vocab, torch.float32)
    with Watch():
        logprob, entropy = token_logprobs(hidden, head, targets, chunk=chunk)
        (logprob.sum() + entropy.sum()).backward()
    assert max(sizes) == chunk * vocab


def test_default_chunk_keeps_its_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    from sagc_fast.ops import logprobs

    hidden, head, targets = _inputs(10, 4, 25, torch.float32)
    expected = token_logprobs(hidden, head, targets)
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 3 * 4 * 25)
    seen = []
    original = logprobs._logits
    monkeypatch.setattr(logprobs, "_logits", lambda h, *rest: seen.append(len(h)) or original(h, *rest))
    torch.testing.assert_close(token_logprobs(hidden, head, targets), expected)
    assert seen == [3, 3, 3, 1]


def test_frozen_head_or_hidden_and_no_tokens() -> None:
    hidden, head, targets = _inputs(6, 4, 9, torch.float32)
    token_logprobs(hidden, head.detach(), targets)[0].sum().backward()
    token_logprobs(hidden.detach(), head, targets)[0].sum().backward()
    empty = token_logprobs(hidden[:0], head, targets[:0])
    assert [len(x) for x in empty] == [0, 0]
    with torch.no_grad():
        assert not token_logprobs(hidden, head, targets)[0].requires_grad


def test_certain_and_impossible_tokens_stay_finite() -> None:
    hidden = torch.tensor([[1000.0], [1000.0]], requires_grad=True)
    head = torch.tensor([[1.0], [0.0]], requires_grad=True)
    logprob, entropy = token_logprobs(hidden, head, torch.tensor([0, 1]))
    assert logprob.tolist() == [0.0, -1000.0]
    assert entropy.tolist() == [0.0, 0.0]
    (logprob.sum() + entropy.sum()).backward()
    assert bool(hidden.grad.isfinite().all())
    assert bool(head.grad.isfinite().all())
