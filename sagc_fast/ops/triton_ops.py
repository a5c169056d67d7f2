"""The Triton kernels (kernels/) under the names and signatures of :mod:`sagc_fast.ops`.

Importing this module imports Triton; ImportError says that it is not installed. The plain-torch functions of the same
names document shapes and results; here stands only what differs. ``rms_norm``, ``add_rms_norm``, ``silu_mul``,
``rotary_split``, ``varlen_attention`` and ``token_logprobs`` are differentiable. Nothing here waits for the device
except :func:`sample_tokens`, and then only outside a CUDA graph capture.

Shape suffixes: T tokens, S sequences, E model width, F half of a fused gate/up width, H query heads, K kv heads, D head
width, N tokens with a target, n tokens of a chunk, R rows, V vocabulary.
"""

# ruff: noqa: N815 (shape suffixes in field names)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sagc_fast.kernels import rms_norm as rms_norm_kernels
from sagc_fast.kernels import rotary as rotary_kernels
from sagc_fast.kernels import silu_mul as silu_mul_kernels
from sagc_fast.kernels import token_logprobs as logprob_kernels
from sagc_fast.kernels._launch import INTERPRETED, num_processors
from sagc_fast.kernels.advance_rows import advance_rows as advance_rows_kernel
from sagc_fast.kernels.decode_plan import decode_plan
from sagc_fast.kernels.group_decode import group_decode, num_walkers, siblings_per_tile
from sagc_fast.kernels.merge_splits import merge_splits
from sagc_fast.kernels.newest import Newest
from sagc_fast.kernels.paged_decode import paged_decode
from sagc_fast.kernels.paged_prefill import paged_prefill
from sagc_fast.kernels.place_rows import place_rows as place_rows_kernel
from sagc_fast.kernels.rms_norm_backward import rms_norm_backward
from sagc_fast.kernels.rope_cache import rope_cache
from sagc_fast.kernels.rotary import rotary_merge
from sagc_fast.kernels.sample_blocks import sample_blocks
from sagc_fast.kernels.sample_filtered import sample_filtered
from sagc_fast.kernels.sample_pick import sample_pick
from sagc_fast.kernels.silu_mul_backward import silu_mul_backward
from sagc_fast.kernels.token_logprobs_backward import token_logprobs_backward
from sagc_fast.ops.decode_rows import DecodeRows
from sagc_fast.ops.layouts import PagedLayout
from sagc_fast.ops.sampling import not_finite
from sagc_fast.ops.triton_varlen import varlen_attention

__all__ = ["varlen_attention"]

OPS = frozenset(
    {"rms_norm", "add_rms_norm", "silu_mul", "rope_and_cache", "paged_attention", "varlen_attention", "token_logprobs",
     "sample_tokens", "sample_keyed_tokens", "policy_loss", "rotary_split", "place_rows",
     "advance_rows"}
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK_BYTES = 512 * 2**20
"""Memory of one chunk of logits in the hidden states' dtype: with 152k tokens about 1,700 rows, enough to keep the
dense products at full rate."""
CHUNK_ROWS = 128
"""Chunks are whole numbers of these where they hold so many: whole tiles of the products, and every chunk's part of a
vector is aligned like the vector, so that no kernel is compiled for another alignment."""
KEYS_PER_SPLIT = 256
"""A decode split is not made shorter than this: its output costs as much traffic as D keys do."""
MAX_SPLITS = 16
PROGRAMS_PER_PROCESSOR = 4


def is_usable() -> bool:
    """Whether kernels can run in this process: on a GPU of compute capability 8.0 or later, or in the interpreter."""
    return INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0))


def available_ops() -> set[str]:
    return set(OPS) if is_usable() else set()


def supports(op: str, device_type: str, dtype: torch.dtype) -> bool:
    """Whether ``op`` serves this device and dtype."""
    return op in available_ops() and device_type == ("cpu" if INTERPRETED else "cuda") and dtype in DTYPES


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Any leading axes; differentiable."""
    return _RMSNorm.apply(x_TE.reshape(-1, x_TE.shape[-1]), weight_E, eps).view(x_TE.shape)


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _AddRMSNorm.apply(x_TE, residual_TE, weight_E, eps)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Kernels read rows: the last axis has to be contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        x_TE = _rows(x_TE)
        out_TE, _, rstd_T = rms_norm_kernels.rms_norm(x_TE, weight_E, eps)
        ctx.save_for_backward(x_TE, weight_E, rstd_T)
        return out_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *rms_norm_backward(*ctx.saved_tensors, _rows(grad_TE)), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out_TE, sum_TE, rstd_T = rms_norm_kernels.rms_norm(_rows(x_TE), weight_E, eps, _rows(residual_TE))
        ctx.save_for_backward(sum_TE, weight_E, rstd_T)
        return out_TE, sum_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: torch.Tensor, grad_sum_TE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x_TE, grad_E = rms_norm_backward(*ctx.saved_tensors, _rows(grad_TE), _rows(grad_sum_TE))
        return grad_x_TE, grad_x_TE, grad_E, None


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Differentiable."""
    return _SiluMul.apply(gate_up_T2F)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        gate_up_T2F = _rows(gate_up_T2F)
        ctx.save_for_backward(gate_up_T2F)
        return silu_mul_kernels.silu_mul(gate_up_T2F)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: torch.Tensor) -> torch.Tensor:
        return silu_mul_backward(*ctx.saved_tensors, _rows(grad_TF))


def rotary_split(
    qkv_TX: torch.Tensor, cos_TD2: torch.Tensor, sin_TD2: torch.Tensor, num_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiable in the projection."""
    return _RotarySplit.apply(qkv_TX, cos_TD2, sin_TD2, num_heads, num_kv_heads)


class _RotarySplit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TX: torch.Tensor,
        cos_TD2: torch.Tensor,
        sin_TD2: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cos_TD2, sin_TD2 = cos_TD2.contiguous(), sin_TD2.contiguous()
        ctx.save_for_backward(cos_TD2, sin_TD2)
        return rotary_kernels.rotary_split(_rows(qkv_TX), cos_TD2, sin_TD2, num_heads, num_kv_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return rotary_merge(*(_rows(grad) for grad in grads), *ctx.saved_tensors), None, None, None, None


def rope_and_cache(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cos_PD2: torch.Tensor,
    sin_PD2: torch.Tensor,
    positions_T: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    return rope_cache(q_THD, k_TKD, v_TKD, cos_PD2, sin_PD2, positions_T, k_cache, v_cache, slots_T)


@dataclass(frozen=True, eq=False)
class _DecodePlan:
    """Who shares what; the same for every layer of a step."""

    shared_lens_S: torch.Tensor
    """int32, leading positions that siblings read together; 0 for a sequence that brings several tokens."""
    run_starts_S: torch.Tensor
    """int32, the first of the siblings side by side that a sequence belongs to."""
    leaders_S1: torch.Tensor
    """int32, the number of sequences that lead a tile of siblings, then these."""


def paged_attention(
    q_THD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: PagedLayout, scale: float
) -> torch.Tensor:
    """Sequences with one token go through the decode kernels, the others through the prefill kernel. What siblings
    share is read once for all of them when they stand side by side."""
    num_sequences = len(layout.context_lens_S)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    cu, context, tables = layout.cu_query_S1, layout.context_lens_S, layout.block_tables_SB
    if layout.max_query_len > 1:
        paged_prefill(
            q_THD, k_cache, v_cache, out_THD, cu, context, tables, layout.max_query_len, scale, min_queries=2,
            first_sequence=layout.first_chunk,
        )  # fmt: skip
    if num_sequences and (num_sequences > 1 or layout.max_query_len <= 1):
        _decode_attention(q_THD, k_cache, v_cache, out_THD, layout, scale)
    return out_THD


def rope_and_attend(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cos_PD2: torch.Tensor,
    sin_PD2: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: PagedLayout,
    scale: float,
) -> torch.Tensor:
    """Where no sequence brings more than one token: the decode kernels rotate and write keys and values themselves."""
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if len(q_THD):
        newest = Newest(k_TKD, v_TKD, cos_PD2, sin_PD2, layout.slots_T)
        _decode_attention(q_THD, k_cache, v_cache, out_THD, layout, scale, newest)
    return out_THD


def _decode_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_THD: torch.Tensor,
    layout: PagedLayout,
    scale: float,
    newest: Newest | None = None,
) -> None:
    """Fill the rows of the sequences that bring one token."""
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, num_sequences = k_cache.shape[1], len(layout.context_lens_S)
    cu, context, tables = layout.cu_query_S1, layout.context_lens_S, layout.block_tables_SB
    group = num_heads // num_kv_heads
    plan = _decode_plan(layout, k_cache.shape[2], siblings_per_tile(group))
    num_shared = _num_splits(num_walkers(num_sequences, group) * num_kv_heads, layout, q_THD.device)
    num_private = _num_splits(num_sequences * num_kv_heads, layout, q_THD.device)
    is_merged = num_private == 1  # then the private part's programs are the last to know of their rows
    shape = (num_sequences, num_heads, num_shared + (0 if is_merged else num_private))
    lse_SHP = torch.empty(shape, dtype=torch.float32, device=q_THD.device)
    part_SHPD = torch.empty(*shape, head_dim, dtype=torch.float32, device=q_THD.device)
    shared, parts = plan.shared_lens_S, (part_SHPD, lse_SHP)
    siblings = (cu, context, shared, plan.run_starts_S, plan.leaders_S1, tables)
    group_decode(q_THD, k_cache, v_cache, *parts, *siblings, num_shared, scale, newest)
    paged_decode(
        q_THD, k_cache, v_cache, *parts, cu, context, shared, tables, num_shared, num_private, scale,
        out_THD if is_merged else None, newest,
    )  # fmt: skip
    if not is_merged:
        merge_splits(*parts, out_THD, cu, shared, num_shared)


def _num_splits(num_programs: int, layout: PagedLayout, device: torch.device) -> int:
    """As many as fill the device, none of them too short."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * num_processors(device) // num_programs)
    return max(1, min(wanted, MAX_SPLITS, -(-layout.max_context_len // KEYS_PER_SPLIT)))


def _decode_plan(layout: PagedLayout, block_size: int, tile: int) -> _DecodePlan:
    plan = layout.__dict__.get("_decode_plan")
    if plan is None:
        columns = layout.cu_query_S1, layout.share_group_S, layout.shared_blocks_S
        plan = layout.__dict__["_decode_plan"] = _DecodePlan(*decode_plan(*columns, block_size, tile))
    return plan


def sample_tokens(
    logits_RV: torch.Tensor,
    uniform_R: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor | None = None,
    top_p_R: torch.Tensor | None = None,
    min_p_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponentials are fp32, so a u within 1e-6 of a boundary may fall to the neighbouring token of the reference."""
    tokens_R, logprobs_R = _sample(
        logits_RV, temperature_R.float(), (top_k_R, top_p_R, min_p_R), uniform_R.double(), None
    )
    is_capturing = logits_RV.is_cuda and torch.cuda.is_current_stream_capturing()
    if not is_capturing and (num_bad := int(torch.isnan(logprobs_R).sum())):
        raise RuntimeError(not_finite(num_bad, len(logits_RV)))
    return tokens_R, logprobs_R


def sample_keyed_tokens(
    logits_RV: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor | None = None,
    top_p_R: torch.Tensor | None = None,
    min_p_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _sample(logits_RV, temperature_R.float(), (top_k_R, top_p_R, min_p_R), None, keys)


def place_rows(rows: DecodeRows, block_size: int, scratch_slot: int) -> None:
    place_rows_kernel(
        rows.position_R, rows.is_live_R, rows.is_kept_R, rows.shared_blocks_R, rows.block_tables_RB, rows.context_R,
        rows.slot_R, block_size, scratch_slot,
    )  # fmt: skip


def advance_rows(rows: DecodeRows, token_R: torch.Tensor, logprob_R: torch.Tensor) -> None:
    advance_rows_kernel(
        token_R, logprob_R, rows.token_R, rows.position_R, rows.index_R, rows.max_output_R, rows.is_live_R,
        rows.end_set_R, rows.step_R, rows.end_ids_SI, rows.drawn_KR, rows.logprobs_KR,
    )  # fmt: skip


def _sample(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    filters: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    uniform_R: torch.Tensor | None,
    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_RV = _rows(logits_RV)
    if all(x is None for x in filters):
        return sample_pick(logits_RV, temperature_R, sample_blocks(logits_RV, temperature_R), uniform_R, keys)
    off = (torch.zeros_like(temperature_R, dtype=torch.int64), torch.ones_like(temperature_R))
    top_k_R, top_p_R, min_p_R = (
        default if x is None else x.to(default.dtype)
        for x, default in zip(filters, (*off, torch.zeros_like(temperature_R)), strict=True)
    )
    return sample_filtered(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, uniform_R, keys)


def token_logprobs(
    hidden_NE: torch.Tensor,
    lm_head_VE: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits are kept in the dtype of the product; what is computed from them is fp32."""
    chunk = chunk_rows(hidden_NE, lm_head_VE) if chunk is None else chunk
    return _TokenLogprobs.apply(hidden_NE, lm_head_VE, targets_N, float(temperature), int(chunk))


def chunk_rows(hidden_NE: torch.Tensor, lm_head_VE: torch.Tensor) -> int:
    """Rows whose logits fit CHUNK_BYTES."""
    rows = max(1, CHUNK_BYTES // (hidden_NE.element_size() * lm_head_VE.shape[0]))
    return rows if rows < CHUNK_ROWS else rows // CHUNK_ROWS * CHUNK_ROWS


class _TokenLogprobs(torch.autograd.Function):
    """Keeps two numbers per token; the backward pass computes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        lm_head_VE: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprob_N, entropy_N, lse_N = (
            torch.empty(len(targets_N), dtype=torch.float32, device=hidden_NE.device) for _ in "pel"
        )
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            logits_nV = hidden_NE[part] @ lm_head_VE.t()
            logprob_kernels.token_logprobs(
                logits_nV, targets_N[part], temperature, logprob_N[part], entropy_N[part], lse_N[part]
            )
        ctx.save_for_backward(hidden_NE, lm_head_VE, targets_N, lse_N, entropy_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprob_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_N: torch.Tensor, grad_entropy_N: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_NE, lm_head_VE, targets_N, lse_N, entropy_N = ctx.saved_tensors
        grads = HeadGradients(hidden_NE, lm_head_VE, *ctx.needs_input_grad[:2])
        grad_logprob_N, grad_entropy_N = grad_logprob_N.contiguous(), grad_entropy_N.contiguous()
        for start in range(0, len(targets_N), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits_nV = hidden_NE[part] @ lm_head_VE.t()
            token_logprobs_backward(
                logits_nV, targets_N[part], ctx.temperature, lse_N[part], entropy_N[part], grad_logprob_N[part],
                grad_entropy_N[part],
            )  # fmt: skip
            grads.add(part, logits_nV)
        return *grads.result(), None, None, None


class HeadGradients:
    """Gradients of hidden states and lm head from those of the logits, chunk by chunk; the head's in fp32."""

    def __init__(self, hidden_NE: torch.Tensor, lm_head_VE: torch.Tensor, needs_hidden: bool, needs_head: bool) -> None:
        self._hidden_NE, self._lm_head_VE = hidden_NE, lm_head_VE
        self._grad_hidden_NE = torch.empty_like(hidden_NE) if needs_hidden else None
        self._needs_head = needs_head
        self._grad_head_VE: torch.Tensor | None = None

    def add(self, part: slice, grad_logits_nV: torch.Tensor) -> None:
        """The rows ``part`` of the batch."""
        if self._grad_hidden_NE is not None:
            torch.mm(grad_logits_nV, self._lm_head_VE, out=self._grad_hidden_NE[part])
        if self._needs_head:
            factors = grad_logits_nV.t(), self._hidden_NE[part]
            if grad_logits_nV.is_cuda and grad_logits_nV.dtype != torch.float32:
                product_VE = torch.mm(*factors, out_dtype=torch.float32)
            else:
                product_VE = torch.mm(*(x.float() for x in factors))
            # As large as the head in fp32, so a pass over it costs as much as a sixth of the product: no zeros first.
            self._grad_head_VE = product_VE if self._grad_head_VE is None else self._grad_head_VE.add_(product_VE)

    def result(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self._needs_head:
            return self._grad_hidden_NE, None
        if self._grad_head_VE is None:  # no tokens
            return self._grad_hidden_NE, torch.zeros_like(self._lm_head_VE)
        return self._grad_hidden_NE, self._grad_head_VE.to(self._lm_head_VE.dtype)
