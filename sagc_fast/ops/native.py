"""The operators of ``sagc_fast._C`` (csrc/cpu) under the names and signatures of :mod:`sagc_fast.ops`.

Importing this module loads the library; ImportError says that it is not built, StaleLibraryError (an ImportError) that
it was built from other sources (native_interface.py), OSError that it does not load. The same functions in plain torch,
beside this file, document shapes and results; here stands only what differs. Each operator has a fake registration, so
``torch.compile`` and ``torch.export`` see through it. Gradients, and the operators of training, are in
native_training.py.

Environment: ``SAGC_CPU_LEVEL`` = ``auto`` (default), ``scalar``, ``avx2``, ``avx512``, ``avx512_bf16``, ``amx``
narrows the instruction set.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from sagc_fast.errors import BackendError
from sagc_fast.ops.layouts import PagedLayout
from sagc_fast.ops.native_interface import check_interface

LIBRARY = Path(__file__).parents[1] / "_C.so"
ENVIRONMENT_VARIABLE = "SAGC_CPU_LEVEL"

OPS = frozenset(
    {
        "linear",
        "rms_norm",
        "add_rms_norm",
        "silu_mul",
        "rope_and_cache",
        "paged_attention",
        "sample_tokens",
        "decoder",
        "rotary_split",
        "varlen_attention",
        "token_logprobs",
    }
)

if not LIBRARY.exists():
    raise ImportError(f"sagc_fast._C is not built ({LIBRARY} does not exist)")
torch.ops.load_library(str(LIBRARY))
check_interface()
_ops = torch.ops.sagc_fast


def cpu_levels() -> tuple[str, ...]:
    """Instruction sets that both this library and this CPU have, slowest first."""
    return tuple(_ops.cpu_levels().split(","))


def cpu_level() -> str:
    """The instruction set in use."""
    return _ops.cpu_level()


def set_cpu_level(name: str) -> None:
    """Use the kernels of one of :func:`cpu_levels`, or the best for ``auto``. Raises BackendError for other names.

    ``amx_emulated`` runs the kernels of ``amx`` on a slow model of its instructions, for tests.
    """
    try:
        _ops.set_cpu_level(name)
    except RuntimeError as error:
        raise BackendError(
            f"CPU level {name!r} is not to be had on this machine; use one of auto, {', '.join(cpu_levels())}."
        ) from error


set_cpu_level(os.environ.get(ENVIRONMENT_VARIABLE) or "auto")


def available_ops() -> set[str]:
    """Names of the operations that the loaded library has."""
    return set(OPS)


def supports(op: str, device_type: str, dtype: torch.dtype) -> bool:
    """Whether ``op`` serves this device and dtype."""
    return op in OPS and device_type == "cpu" and dtype in (torch.float32, torch.bfloat16)


def supports_cache(dtype: torch.dtype) -> bool:
    """Whether ``rope_and_cache``, ``paged_attention`` and the decoder serve a KV cache of this dtype."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16)


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Accumulates in fp32 whatever the dtypes; x and the bias share one, the weight may have the other."""
    return _ops.linear(x_TK, weight_NK, bias_N)


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    return _ops.rms_norm(x_TE, weight_E, eps)


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _ops.add_rms_norm(x_TE, residual_TE, weight_E, eps)


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    return _ops.silu_mul(gate_up_T2F)


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
    """q, k and v may be slices of one fused projection: only the heads of a token have to lie side by side."""
    return _ops.rope_and_cache(q_THD, k_TKD, v_TKD, cos_PD2, sin_PD2, positions_T, k_cache, v_cache, slots_T)


def paged_attention(
    q_THD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: PagedLayout, scale: float
) -> torch.Tensor:
    """Reads the blocks that siblings share once for up to 64 of their rows; a row's bits do not depend on it."""
    return _ops.paged_attention(
        q_THD,
        k_cache,
        v_cache,
        layout.cu_query_S1,
        layout.context_lens_S,
        layout.block_tables_SB,
        layout.share_group_S,
        layout.shared_blocks_S,
        scale,
    )


def sample_tokens(
    logits_RV: torch.Tensor,
    uniform_R: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor | None = None,
    top_p_R: torch.Tensor | None = None,
    min_p_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without filters one pass of the native kernel; with them plain torch, since they need the row sorted."""
    if top_k_R is not None or top_p_R is not None or min_p_R is not None:
        from sagc_fast.ops import sampling

        return sampling.sample_tokens(logits_RV, uniform_R, temperature_R, top_k_R, top_p_R, min_p_R)
    if logits_RV.dtype != torch.bfloat16:
        logits_RV = logits_RV.float()
    return _ops.sample_tokens(logits_RV, uniform_R.double(), temperature_R.float())


# The functions of a decoder (decoder.py) pass a handle, which nothing can trace: they have no fake registrations.


def decoder_create(weights: list[torch.Tensor], caches: list[torch.Tensor], num_heads: int, rms_norm_eps: float) -> int:
    return _ops.decoder_create.default(weights, caches, num_heads, rms_norm_eps)


def decoder_free(handle: int) -> None:
    _ops.decoder_free.default(handle)


def decoder_forward(
    handle: int, token_ids_T: torch.Tensor, layout: PagedLayout, cos_PD2: torch.Tensor, sin_PD2: torch.Tensor
) -> torch.Tensor:
    return _ops.decoder_forward.default(
        handle,
        token_ids_T,
        cos_PD2,
        sin_PD2,
        layout.cu_query_S1,
        layout.context_lens_S,
        layout.block_tables_SB,
        layout.share_group_S,
        layout.shared_blocks_S,
        layout.logits_rows_R,
    )


def decoder_sample(
    handle: int, hidden_UE: torch.Tensor, index_R: torch.Tensor, uniform_R: torch.Tensor, temperature_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    return _ops.decoder_sample.default(handle, hidden_UE, index_R, uniform_R, temperature_R)


def decoder_bind(handle: int, rows: list[torch.Tensor], cos_PD2: torch.Tensor, sin_PD2: torch.Tensor) -> None:
    _ops.decoder_bind.default(handle, rows, cos_PD2, sin_PD2)


def decoder_steps(
    handle: int, slots_D: torch.Tensor, most_steps: int, stop_at_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _ops.decoder_steps.default(handle, slots_D, most_steps, stop_at_rows)


def keyed_uniforms(
    seed_R: torch.Tensor, prompt_id_R: torch.Tensor, sample_index_R: torch.Tensor, position_R: torch.Tensor
) -> torch.Tensor:
    return _ops.keyed_uniforms.default(seed_R, prompt_id_R, sample_index_R, position_R)


@torch.library.register_fake("sagc_fast::linear")
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.register_fake("sagc_fast::rms_norm")
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("sagc_fast::add_rms_norm")
def _(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.register_fake("sagc_fast::silu_mul")
def _(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.register_fake("sagc_fast::rope_and_cache")
def _(q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape)


@torch.library.register_fake("sagc_fast::paged_attention")
def _(q: torch.Tensor, *others: torch.Tensor | float) -> torch.Tensor:
    return q.new_empty(q.shape)


@torch.library.register_fake("sagc_fast::sample_tokens")
def _(logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)


from sagc_fast.ops.native_training import (  # noqa: E402 (registers gradients: the library must be loaded before)
    logits_grad_,
    logits_stats,
    rotary_split,
    varlen_attention,
)

__all__ = [
    "add_rms_norm",
    "linear",
    "logits_grad_",
    "logits_stats",
    "paged_attention",
    "rms_norm",
    "rope_and_cache",
    "rotary_split",
    "sample_tokens",
    "silu_mul",
    "varlen_attention",
]
