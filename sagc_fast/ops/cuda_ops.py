"""The operators of ``sagc_fast._cuda`` (csrc/cuda) under the names and signatures of :mod:`sagc_fast.ops`.

Importing this module loads the library; ImportError says that it is not built, OSError that it does not load. They have
not run on a GPU yet, so nothing chooses them by itself: the Triton kernels of the same names serve until a measurement
says otherwise (docs/kernels.md); ``ops.use_backend("cuda")`` asks for them. Nothing here waits for the device. Each
operator has a fake registration.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch

from sagc_fast.ops.decode_rows import DecodeRows

LIBRARY = Path(__file__).parents[1] / "_cuda.so"
OPS = frozenset({"sample_keyed_tokens", "place_rows", "advance_rows"})
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_VOCAB = 1 << 20

if not LIBRARY.exists():
    raise ImportError(f"sagc_fast._cuda is not built ({LIBRARY} does not exist)")
torch.ops.load_library(str(LIBRARY))
_ops = torch.ops.sagc_fast


def is_usable() -> bool:
    """Whether a GPU is there that the library was compiled for: compute capability 8.0 or later."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def available_ops() -> set[str]:
    return set(OPS) if is_usable() else set()


def supports(op: str, device_type: str, dtype: torch.dtype) -> bool:
    """Whether ``op`` serves this device and dtype (of the logits)."""
    return op in available_ops() and device_type == "cuda" and dtype in DTYPES


def sample_keyed_tokens(
    logits_RV: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    temperature_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without filters. A row whose logits are not finite gets token 0 and log-prob NaN. Exponentials are fp32, so a
    number within 1e-6 of a boundary may fall to the neighbouring token of the reference."""
    if logits_RV.stride(-1) != 1 and logits_RV.shape[-1] > 1:
        logits_RV = logits_RV.contiguous()
    keys = tuple(key.contiguous() for key in keys)
    return _ops.sample_keyed_tokens(logits_RV, *keys, temperature_R.float().contiguous())


def place_rows(rows: DecodeRows, block_size: int, scratch_slot: int) -> None:
    _ops.place_rows(
        rows.position_R, rows.is_live_R, rows.is_kept_R, rows.shared_blocks_R, rows.block_tables_RB, rows.context_R,
        rows.slot_R, block_size, scratch_slot,
    )  # fmt: skip


def advance_rows(rows: DecodeRows, token_R: torch.Tensor, logprob_R: torch.Tensor) -> None:
    _ops.advance_rows(
        token_R, logprob_R, rows.token_R, rows.position_R, rows.index_R, rows.max_output_R, rows.is_live_R,
        rows.end_set_R, rows.step_R, rows.end_ids_SI, rows.drawn_KR, rows.logprobs_KR,
    )  # fmt: skip


@torch.library.register_fake("sagc_fast::sample_keyed_tokens")
def _(logits: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake("sagc_fast::place_rows")
@torch.library.register_fake("sagc_fast::advance_rows")
def _(*arguments: torch.Tensor | int) -> None:
    return None
