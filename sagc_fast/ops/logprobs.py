"""Log-probability and entropy of chosen tokens straight from hidden states, never holding the whole logits.

Forward takes some tokens against the whole vocabulary at a time. Backward, which knows each row's log-sum-exp, takes
all tokens against some of the vocabulary: a block of the head's gradient is then one product, written where it belongs,
and only the much smaller gradient of the hidden states is a running sum (fp32).

Shape suffixes: N tokens, n tokens of a chunk, E model width, V vocabulary, v columns of a block.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from sagc_fast.ops import products

CHUNK_BYTES = 16 * 2**20
"""Memory of one chunk of logits when the caller names no chunk. On the CPU the native operators work on the chunk in
place; plain torch holds about three fp32 copies of it."""


class LogitRows(Protocol):
    """What the head needs done with rows of logits in memory: native operators, or :class:`TorchRows`."""

    def logits_stats(
        self, logits_nV: torch.Tensor, targets_n: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def logits_grad_(
        self,
        logits_nv: torch.Tensor,
        targets_n: torch.Tensor,
        lse_n: torch.Tensor,
        entropy_n: torch.Tensor,
        grad_logprob_n: torch.Tensor,
        grad_entropy_n: torch.Tensor,
        temperature: float,
        first_column: int,
    ) -> None: ...


class TorchRows:
    """The row-wise half of the head in plain torch, on any device and dtype."""

    @staticmethod
    def logits_stats(
        logits_nV: torch.Tensor, targets_n: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(log-prob of the target, log-sum-exp, entropy) of each row of logits / temperature, fp32 (fp64 for fp64)."""
        logits_nV = _scaled(logits_nV, temperature)
        lse_n1 = logits_nV.logsumexp(-1, keepdim=True)
        logprob_n = (logits_nV.gather(1, targets_n.unsqueeze(1)) - lse_n1).squeeze(1)
        logp_nV = logits_nV - lse_n1
        return logprob_n, lse_n1.squeeze(1), -torch.linalg.vecdot(logp_nV.exp(), logp_nV)

    @staticmethod
    def logits_grad_(
        logits_nv: torch.Tensor,
        targets_n: torch.Tensor,
        lse_n: torch.Tensor,
        entropy_n: torch.Tensor,
        grad_logprob_n: torch.Tensor,
        grad_entropy_n: torch.Tensor,
        temperature: float,
        first_column: int,
    ) -> None:
        """Logits of the columns from ``first_column`` on -> their gradient, in place. With p the probabilities:
        d logprob / dz = onehot - p; d entropy / dz = -p * (log p + entropy)."""
        logp_nv = _scaled(logits_nv, temperature) - lse_n.unsqueeze(1)
        weight_nv = (logp_nv + entropy_n.unsqueeze(1)) * grad_entropy_n.unsqueeze(1) + grad_logprob_n.unsqueeze(1)
        grad_nv = logp_nv.exp_().mul_(weight_nv).neg_()
        column_n = targets_n - first_column
        is_here_n = (column_n >= 0) & (column_n < logits_nv.shape[1])
        column_n1 = column_n.where(is_here_n, 0).unsqueeze(1)
        grad_nv.scatter_add_(1, column_n1, (grad_logprob_n * is_here_n).unsqueeze(1))
        logits_nv.copy_(grad_nv.div_(temperature))


def _scaled(logits_nV: torch.Tensor, temperature: float) -> torch.Tensor:
    logits_nV = logits_nV.float() if logits_nV.dtype in (torch.bfloat16, torch.float16) else logits_nV
    return logits_nV if temperature == 1.0 else logits_nV / temperature


def token_logprobs(
    hidden_NE: torch.Tensor,
    lm_head_VE: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    rows: LogitRows = TorchRows,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob [N], entropy [N]) of ``softmax(hidden @ lm_head.T / temperature)`` at int64 ``targets_N``, nats, fp32.

    Differentiable in hidden and lm_head, once. Logits, in the dtype of hidden, exist for ``chunk`` tokens at a time (in
    backward: for all tokens and as many columns as make the same number); ``chunk=None`` takes as many as fit
    CHUNK_BYTES. The forward keeps two numbers per token. fp64 in gives fp64 out.
    """
    if chunk is None:
        width = 8 if products.is_widened(hidden_NE) else hidden_NE.element_size()  # with its wide copies
        chunk = max(1, CHUNK_BYTES // (width * lm_head_VE.shape[0]))
    return _TokenLogprobs.apply(hidden_NE, lm_head_VE, targets_N, float(temperature), int(chunk), rows)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        lm_head_VE: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
        chunk: int,
        rows: LogitRows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden_NE.dtype, torch.float32)
        stats_3N = torch.empty(3, len(targets_N), dtype=dtype, device=hidden_NE.device)
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            logits_nV = products.linear(hidden_NE[part], lm_head_VE)
            for out_N, value_n in zip(
                stats_3N, rows.logits_stats(logits_nV, targets_N[part], temperature), strict=True
            ):
                out_N[part] = value_n
        logprob_N, lse_N, entropy_N = stats_3N
        ctx.save_for_backward(hidden_NE, lm_head_VE, targets_N, lse_N, entropy_N)
        ctx.temperature, ctx.chunk, ctx.rows = temperature, chunk, rows
        return logprob_N.clone(), entropy_N.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_N: torch.Tensor, grad_entropy_N: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_NE, lm_head_VE, targets_N, lse_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        num_tokens, vocab_size = len(targets_N), lm_head_VE.shape[0]
        columns = min(vocab_size, max(1, ctx.chunk * vocab_size // max(1, num_tokens)))
        grad_hidden_NE = (
            torch.zeros(hidden_NE.shape, dtype=lse_N.dtype, device=hidden_NE.device) if needs_hidden else None
        )
        grad_head_VE = torch.empty_like(lm_head_VE) if needs_head else None
        grads_N = grad_logprob_N.contiguous(), grad_entropy_N.contiguous()
        for start in range(0, vocab_size, columns):
            block_vE = lm_head_VE[start : start + columns]
            grad_Nv = products.linear(hidden_NE, block_vE)
            ctx.rows.logits_grad_(grad_Nv, targets_N, lse_N, entropy_N, *grads_N, ctx.temperature, start)
            if needs_head:
                products.mm(grad_Nv.t(), hidden_NE, out=grad_head_VE[start : start + columns])
            if needs_hidden:
                products.add_product_(grad_hidden_NE, grad_Nv, block_vE)
        grad_hidden_NE = None if grad_hidden_NE is None else grad_hidden_NE.to(hidden_NE.dtype)
        return grad_hidden_NE, grad_head_VE, None, None, None, None
