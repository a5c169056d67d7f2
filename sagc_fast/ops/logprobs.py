"""Log-probability and entropy of chosen tokens straight from hidden states, never holding the whole logits.

Shape suffixes: N tokens, n tokens of a chunk, E model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK_BYTES = 64 * 2**20
"""Memory of one chunk of fp32 logits when the caller names no chunk; backward holds about three of them."""


def token_logprobs(
    hidden_NE: torch.Tensor,
    lm_head_VE: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob [N], entropy [N]) of ``softmax(hidden @ lm_head.T / temperature)`` at int64 ``targets_N``, nats, fp32.

    Differentiable in hidden and lm_head. Logits exist for ``chunk`` tokens at a time, in forward and again in backward
    (the forward keeps two numbers per token); ``chunk=None`` takes as many as fit CHUNK_BYTES. fp64 in gives fp64 out.
    """
    if chunk is None:
        chunk = max(1, CHUNK_BYTES // (4 * lm_head_VE.shape[0]))
    return _TokenLogprobs.apply(hidden_NE, lm_head_VE, targets_N, float(temperature), int(chunk))


def _logits(hidden_nE: torch.Tensor, lm_head_VE: torch.Tensor, temperature: float) -> torch.Tensor:
    logits_nV = hidden_nE @ lm_head_VE.t()
    if logits_nV.dtype in (torch.bfloat16, torch.float16):
        logits_nV = logits_nV.float()
    return logits_nV if temperature == 1.0 else logits_nV.div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        lm_head_VE: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden_NE.dtype, torch.float32)
        logprob_N, entropy_N, log_total_N = (
            torch.empty(len(targets_N), dtype=dtype, device=hidden_NE.device) for _ in "lps"
        )
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            logits_nV = _logits(hidden_NE[part], lm_head_VE, temperature)
            log_total_n1 = logits_nV.logsumexp(-1, keepdim=True)
            logprob_N[part] = (logits_nV.gather(1, targets_N[part].unsqueeze(1)) - log_total_n1).squeeze(1)
            log_total_N[part] = log_total_n1.squeeze(1)
            logits_nV.sub_(log_total_n1)
            entropy_N[part] = -torch.linalg.vecdot(logits_nV.exp(), logits_nV)
        ctx.save_for_backward(hidden_NE, lm_head_VE, targets_N, log_total_N, entropy_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprob_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_logprob_N: torch.Tensor, grad_entropy_N: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """With p the probabilities: d logprob / dz = onehot - p; d entropy / dz = -p * (log p + entropy)."""
        hidden_NE, lm_head_VE, targets_N, log_total_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden_NE = torch.empty_like(hidden_NE) if needs_hidden else None
        grad_head_VE = (
            torch.zeros(lm_head_VE.shape, dtype=log_total_N.dtype, device=lm_head_VE.device) if needs_head else None
        )
        for start in range(0, len(targets_N), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logp_nV = _logits(hidden_NE[part], lm_head_VE, ctx.temperature).sub_(log_total_N[part].unsqueeze(1))
            grad_nV = logp_nV.exp()
            grad_nV *= (
                logp_nV.add_(entropy_N[part].unsqueeze(1))
                .mul_(-grad_entropy_N[part].unsqueeze(1))
                .sub_(grad_logprob_N[part].unsqueeze(1))
            )
            grad_nV.scatter_add_(1, targets_N[part].unsqueeze(1), grad_logprob_N[part].unsqueeze(1))
            grad_nV.div_(ctx.temperature)
            if needs_hidden:
                grad_hidden_NE[part] = grad_nV.to(lm_head_VE.dtype) @ lm_head_VE
            if needs_head:
                grad_head_VE.addmm_(grad_nV.t(), hidden_NE[part].to(grad_nV.dtype))
        return grad_hidden_NE, None if grad_head_VE is None else grad_head_VE.to(lm_head_VE.dtype), None, None, None
