"""Log-prob of a chosen token and entropy of every row of a chunk of logits, in one pass.

The logits come chunk by chunk from a dense product of hidden states and lm head; they are read once here and never held
whole. The softmax is online: with s the sum of exp(z - m) and t that of exp(z - m) (z - m), the entropy is
log s - t / s. Memory bound: V logits per row. Shape suffixes: n rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def token_logprobs_kernel(
    logits_ptr, targets_ptr, logprob_ptr, entropy_ptr, lse_ptr, temperature, stride, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([], float("-inf"), tl.float32)
    s = tl.zeros([], tl.float32)
    t = tl.zeros([], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + row * stride + offs, mask=offs < vocab_size, other=float("-inf")).to(tl.float32)
        z = z / temperature
        new_top = tl.maximum(top, tl.max(z, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        z = z - base
        weight = tl.exp(z)
        moved = tl.where(top == float("-inf"), 0.0, top - base)
        shrink = tl.where(top == float("-inf"), 0.0, tl.exp(moved))
        t = shrink * (t + moved * s) + tl.sum(tl.where(weight > 0.0, weight * z, 0.0), 0)
        s = shrink * s + tl.sum(weight, 0)
        top = new_top
    lse = top + tl.log(s)
    target = tl.load(targets_ptr + row)
    chosen = tl.load(logits_ptr + row * stride + target).to(tl.float32) / temperature
    tl.store(logprob_ptr + row, chosen - lse)
    tl.store(entropy_ptr + row, tl.log(s) - t / s)
    tl.store(lse_ptr + row, lse)


def token_logprobs(
    logits_nV: torch.Tensor,
    targets_n: torch.Tensor,
    temperature: float,
    logprob_n: torch.Tensor,
    entropy_n: torch.Tensor,
    lse_n: torch.Tensor,
) -> None:
    """Fill the fp32 log-prob, entropy and log-sum-exp (nats) of ``softmax(logits / temperature)``.

    Args:
        logits_nV: any float dtype, the last axis contiguous.
        targets_n: int64 token of each row.
    """
    if len(logits_nV):
        token_logprobs_kernel[(len(logits_nV),)](
            logits_nV, targets_n, logprob_n, entropy_n, lse_n, temperature, logits_nV.stride(0), logits_nV.shape[1],
            BLOCK=4096, num_warps=8,
        )  # fmt: skip
