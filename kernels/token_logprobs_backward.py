"""Backward of token_logprobs: a chunk of logits becomes its gradient in place.

With p the probabilities, d logprob / dz = onehot - p and d entropy / dz = -p (log p + entropy). Memory bound: V logits
per row are read and written once. Shape suffixes: n rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def token_logprobs_backward_kernel(
    logits_ptr, targets_ptr, lse_ptr, entropy_ptr, grad_logprob_ptr, grad_entropy_ptr, temperature, stride, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = offs < vocab_size
    ptrs = logits_ptr + row * stride + offs
    logp = tl.load(ptrs, mask=is_in, other=float("-inf")).to(tl.float32) / temperature - tl.load(lse_ptr + row)
    p = tl.exp(logp)
    grad_logprob = tl.load(grad_logprob_ptr + row)
    grad_entropy = tl.load(grad_entropy_ptr + row)
    is_target = offs == tl.load(targets_ptr + row)
    surprise = tl.where(p > 0.0, logp + tl.load(entropy_ptr + row), 0.0)
    grad = tl.where(is_target, grad_logprob, 0.0) - p * (grad_logprob + grad_entropy * surprise)
    tl.store(ptrs, (grad / temperature).to(logits_ptr.dtype.element_ty), mask=is_in)


def token_logprobs_backward(
    logits_nV: torch.Tensor,
    targets_n: torch.Tensor,
    temperature: float,
    lse_n: torch.Tensor,
    entropy_n: torch.Tensor,
    grad_logprob_n: torch.Tensor,
    grad_entropy_n: torch.Tensor,
) -> None:
    """Replace the logits by their gradient, in their dtype; the other arguments as token_logprobs filled them."""
    num_rows, vocab_size = logits_nV.shape
    if num_rows:
        token_logprobs_backward_kernel[(num_rows, triton.cdiv(vocab_size, 4096))](
            logits_nV, targets_n, lse_n, entropy_n, grad_logprob_n, grad_entropy_n, temperature, logits_nV.stride(0),
            vocab_size, BLOCK=4096, num_warps=8,
        )  # fmt: skip
