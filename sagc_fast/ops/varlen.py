"""Training attention over a packed batch of groups: each prompt stands once and its completions share it, exactly.

Shape suffixes: T packed tokens, H query heads, K kv heads, D head width, P prompt tokens, G completions of a group,
L tokens of the longest completion.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from sagc_fast.ops.layouts import PackedLayout, Span


def varlen_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layout: PackedLayout, scale: float
) -> torch.Tensor:
    """Attention of a packed batch, [T, H, D]: a prompt is causal in itself, a completion token sees its group's whole
    prompt and its own completion up to itself. Differentiable; equals the unshared computation. Rows outside every span
    come back as zeros."""
    rows, parts = [], []
    for prompt, completions in zip(layout.prompt_spans, layout.completion_spans, strict=True):
        for span in (prompt, *completions):
            rows.append(torch.arange(span[0], span[0] + span[1], device=q_THD.device))
        own = _cut((q_THD, k_TKD, v_TKD), prompt)
        parts.append(_sdpa(*(x.unsqueeze(0) for x in own), None, scale)[0])
        if completions:
            parts += _attend_completions(own[1:], [_cut((q_THD, k_TKD, v_TKD), span) for span in completions], scale)
    out_THD = torch.zeros_like(q_THD)
    return out_THD.index_copy(0, torch.cat(rows), torch.cat(parts)) if rows else out_THD


def _attend_completions(
    prompt_kv: tuple[torch.Tensor, ...], completions: list[tuple[torch.Tensor, ...]], scale: float
) -> list[torch.Tensor]:
    """The completions of one group, padded to the longest, against [prompt; own keys]."""
    q_GLHD, k_GLKD, v_GLKD = (pad_sequence(list(parts), batch_first=True) for parts in zip(*completions, strict=True))
    num, longest = q_GLHD.shape[:2]
    k, v = (
        torch.cat((shared.unsqueeze(0).expand(num, -1, -1, -1), private), dim=1)
        for shared, private in zip(prompt_kv, (k_GLKD, v_GLKD), strict=True)
    )
    num_prompt = k.shape[1] - longest
    mask = torch.ones(longest, k.shape[1], dtype=torch.bool, device=k.device).tril(num_prompt)
    out_GLHD = _sdpa(q_GLHD, k, v, mask, scale)
    return [out_GLHD[g, : len(q)] for g, (q, _, _) in enumerate(completions)]


def _cut(tensors: tuple[torch.Tensor, ...], span: Span) -> tuple[torch.Tensor, ...]:
    return tuple(x.narrow(0, *span) for x in tensors)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """[B, L, H, D] queries, [B, S, K, D] keys and values; causal when there is no mask."""
    out = functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)
