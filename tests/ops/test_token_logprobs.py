"""Log-probs and entropy from hidden states: values, gradients, and no tensor of all logits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sagc_fast import ops
from sagc_fast.ops import logprobs
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


@pytest.mark.parametrize("operator", [token_logprobs, ops.token_logprobs])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_model_dtypes_give_fp32_results_and_gradients_in_their_own(operator, dtype, tolerance: float) -> None:
    hidden, head, targets = _inputs(40, 16, 90, dtype)
    outputs = operator(hidden, head, targets, 0.9, 16)
    assert [o.dtype for o in outputs] == [torch.float32] * 2
    expected = _by_definition(hidden, head, targets, 0.9)
    grads = torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), (hidden, head))
    expected_grads = torch.autograd.grad(expected[0].sum() + expected[1].sum(), (hidden, head))
    assert [g.dtype for g in grads] == [dtype] * 2
    for actual, wanted in zip((*outputs, *grads), (*expected, *expected_grads), strict=True):
        scale = float(wanted.detach().abs().max())
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("token_logprobs", [token_logprobs, ops.token_logprobs])
def test_no_tensor_of_all_logits_is_ever_made(token_logprobs) -> None:
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
    assert max(sizes) <= chunk * vocab


def test_default_chunk_keeps_its_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets = _inputs(10, 4, 25, torch.float32)
    expected = token_logprobs(hidden, head, targets)
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 3 * 4 * 25)
    shapes = []

    class Watch(logprobs.TorchRows):
        @staticmethod
        def logits_stats(logits, *rest):
            shapes.append(tuple(logits.shape))
            return logprobs.TorchRows.logits_stats(logits, *rest)

        @staticmethod
        def logits_grad_(logits, *rest):
            shapes.append(tuple(logits.shape))
            logprobs.TorchRows.logits_grad_(logits, *rest)

    actual = token_logprobs(hidden, head, targets, rows=Watch)
    torch.testing.assert_close(actual, expected)
    assert shapes == [(3, 25), (3, 25), (3, 25), (1, 25)]
    shapes.clear()
    actual[0].sum().backward()
    assert shapes == [(10, 7), (10, 7), (10, 7), (10, 4)]


def test_frozen_head_or_hidden_and_no_tokens() -> None:
    hidden, head, targets = _inputs(6, 4, 9, torch.float32)
    token_logprobs(hidden, head.detach(), targets)[0].sum().backward()
    token_logprobs(hidden.detach(), head, targets)[0].sum().backward()
    empty = token_logprobs(hidden[:0], head, targets[:0])
    assert [len(x) for x in empty] == [0, 0]
    with torch.no_grad():
        assert not token_logprobs(hidden, head, targets)[0].requires_grad


@pytest.mark.parametrize("token_logprobs", [token_logprobs, ops.token_logprobs])
def test_certain_and_impossible_tokens_stay_finite(token_logprobs) -> None:
    hidden = torch.tensor([[1000.0], [1000.0]], requires_grad=True)
    head = torch.tensor([[1.0], [0.0]], requires_grad=True)
    logprob, entropy = token_logprobs(hidden, head, torch.tensor([0, 1]))
    assert logprob.tolist() == [0.0, -1000.0]
    assert entropy.tolist() == [0.0, 0.0]
    (logprob.sum() + entropy.sum()).backward()
    assert bool(hidden.grad.isfinite().all())
    assert bool(head.grad.isfinite().all())


MEMORY_PROBE = """
import torch
from sagc_fast import ops
def peak_mib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024
torch.manual_seed(0)
def train(num, width, vocab):
    hidden = torch.randn(num, width).bfloat16().requires_grad_()
    head = torch.randn(vocab, width).bfloat16().requires_grad_()
    targets = torch.randint(vocab, (num,))
    open("/proc/self/clear_refs", "w").write("5")
    before = peak_mib()
    logprob, entropy = ops.token_logprobs(hidden, head, targets)
    (logprob.sum() + entropy.sum()).backward()
    return peak_mib() - before
train(256, 64, 2000)
print(train(NUM, WIDTH, VOCAB))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of resident memory is read from /proc")
def test_memory_of_the_head_is_its_gradient_and_some_chunks() -> None:
    """A tenth of 151,936 columns and of 16k tokens: in full, 5 GB of bf16 logits; the bound there is 1.5 GB."""
    num, width, vocab = 1638, 896, 15193
    probe = MEMORY_PROBE.replace("NUM", str(num)).replace("WIDTH", str(width)).replace("VOCAB", str(vocab))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, env=environment)
    gradients = (vocab + 3 * num) * width * 2  # of the head; of the hidden states, summed in fp32
    assert float(done.stdout) < (gradients + 4 * logprobs.CHUNK_BYTES) / 2**20 < 150
