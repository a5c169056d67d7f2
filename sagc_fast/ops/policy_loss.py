"""The policy loss per token by one Triton kernel, alone or in one sweep with the language-model head.

:mod:`sagc_fast.algo.loss` holds the formula and the plain-torch version, and turns its configuration into
:class:`TokenLoss`. Only losses whose ratio and importance weight are per token go this way.

Shape suffixes: N completion tokens, C completions, E model width, V vocabulary.
"""

# ruff: noqa: N815 (shape suffixes in field names)

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sagc_fast.ops.backend import resolve

FIGURES = ("clip_low", "clip_high", "dual_clip", "ratio", "approx_kl", "ref_kl", "is_weight", "is_limited")
"""Rows of the figures that the kernel writes per token."""


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """Everything but the log-probs of the policy and its entropies."""

    old_logp_N: torch.Tensor
    advantages_C: torch.Tensor
    completion_index_N: torch.Tensor
    factors_C: torch.Tensor
    """fp32: what a token of each completion is multiplied by, the normaliser included."""
    mask_N: torch.Tensor | None
    ref_logp_N: torch.Tensor | None
    rollout_logp_N: torch.Tensor | None
    is_cispo: bool
    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_beta: float
    """0: the reference is reported only."""
    kl_estimator: int
    """1, 2, 3 for k1, k2, k3; 0 without a reference."""
    entropy_coef: float
    rollout_is: int
    """0 none, 1 truncate, 2 mask."""
    is_cap: float
    is_floor: float

    def evaluate(self, part: slice, logp_n: torch.Tensor, entropy_n: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """(loss, its derivative by log-prob and by entropy, figures) of the tokens ``part``."""
        from sagc_fast.kernels.policy_loss import policy_loss

        def cut(x_N: torch.Tensor | None) -> torch.Tensor | None:
            return None if x_N is None else x_N[part].contiguous()

        options = {field.name: getattr(self, field.name) for field in fields(self)[7:]}
        return policy_loss(
            logp_n, cut(self.old_logp_N), self.advantages_C, cut(self.completion_index_N), self.factors_C,
            cut(self.mask_N), entropy_n, cut(self.ref_logp_N), cut(self.rollout_logp_N), **options,
        )  # fmt: skip


def is_fused(x: torch.Tensor) -> bool:
    """Whether :func:`token_policy_loss` and :func:`linear_policy_loss` serve this device and dtype."""
    return resolve("policy_loss", x.device.type, x.dtype) == "triton"


def token_policy_loss(
    logp_N: torch.Tensor, entropy_N: torch.Tensor | None, loss: TokenLoss
) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 sum of the tokens' losses, differentiable in log-prob and entropy; figures [len(FIGURES), N])."""
    return _TokenPolicyLoss.apply(logp_N, entropy_N, loss)


class _TokenPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logp_N: torch.Tensor, entropy_N: torch.Tensor | None, loss: TokenLoss
    ) -> tuple[torch.Tensor, torch.Tensor]:
        entropy = None if entropy_N is None else entropy_N.float().contiguous()
        loss_N, *grads, figures = loss.evaluate(slice(None), logp_N.float().contiguous(), entropy)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(figures)
        ctx.has_entropy = entropy_N is not None
        return loss_N.double().sum().float(), figures

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_logp_N, grad_entropy_N = ctx.saved_tensors
        return grad * grad_logp_N, grad * grad_entropy_N if ctx.has_entropy else None, None


def linear_policy_loss(
    hidden_NE: torch.Tensor,
    lm_head_VE: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float,
    loss: TokenLoss,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sum of the tokens' losses, log-probs [N], entropies [N], figures); the sum is differentiable in hidden and head.

    The loss of a token is known as soon as its log-prob is, so the gradients are formed while a chunk's logits are
    there: three dense products instead of the four of log-probs and loss one after the other.
    """
    from sagc_fast.ops.triton_ops import chunk_rows

    chunk = chunk_rows(hidden_NE, lm_head_VE) if chunk is None else chunk
    return _LinearPolicyLoss.apply(hidden_NE, lm_head_VE, targets_N, float(temperature), loss, chunk)


class _LinearPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        lm_head_VE: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
        loss: TokenLoss,
        chunk: int,
    ) -> tuple[torch.Tensor, ...]:
        from sagc_fast.kernels.token_logprobs import token_logprobs
        from sagc_fast.kernels.token_logprobs_backward import token_logprobs_backward
        from sagc_fast.ops.triton_ops import HeadGradients

        # Four tensors, not rows of one: rows are aligned as their length has it, and kernels are compiled by alignment.
        logp_N, entropy_N, lse_N, loss_N = (torch.empty(len(targets_N), device=hidden_NE.device) for _ in "pels")
        figures = torch.empty(len(FIGURES), len(targets_N), device=hidden_NE.device)
        gradients = HeadGradients(hidden_NE, lm_head_VE, *ctx.needs_input_grad[:2])
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            logits_nV = hidden_NE[part] @ lm_head_VE.t()
            row = (logits_nV, targets_N[part], temperature)
            token_logprobs(*row, logp_N[part], entropy_N[part], lse_N[part])
            loss_N[part], *grads, figures[:, part] = loss.evaluate(part, logp_N[part], entropy_N[part])
            if any(ctx.needs_input_grad[:2]):
                token_logprobs_backward(*row, lse_N[part], entropy_N[part], *grads)
                gradients.add(part, logits_nV)
        ctx.save_for_backward(*gradients.result())
        ctx.mark_non_differentiable(logp_N, entropy_N, figures)
        return loss_N.double().sum().float(), logp_N, entropy_N, figures

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(None if x is None else x.mul_(grad) for x in ctx.saved_tensors), None, None, None, None
