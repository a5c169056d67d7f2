"""Where a part runs, how it times, and the models it measures: a GPU, or in a rehearsal the CPU with tiny shapes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from gpu.report import is_rehearsal, out_folder

REHEARSAL = is_rehearsal()
DEVICE = torch.device("cpu" if REHEARSAL else "cuda:0")
DTYPE = torch.float32 if REHEARSAL else torch.bfloat16
DTYPE_NAME = "fp32" if REHEARSAL else "bf16"
FLUSH_BYTES = 256 * 2**20
"""Written between two launches, so that nothing is read from the second-level cache (H200: 50 MB)."""

CONFIGS: dict[str, dict[str, Any]] = {
    "0.5B": {  # Qwen2.5-0.5B
        "family": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_layers": 24,
        "num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "has_qkv_bias": True, "eos_token_ids": (2,), "pad_token_id": 3,
    },
    "3B": {  # Llama-3.2-3B
        "family": "llama", "vocab_size": 128_256, "hidden_size": 3072, "intermediate_size": 8192, "num_layers": 28,
        "num_heads": 24, "num_kv_heads": 8, "head_dim": 128, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "eos_token_ids": (2,), "pad_token_id": 3,
    },
}  # fmt: skip
TINY = {"vocab_size": 4352, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 8, "max_position_embeddings": 512}  # fmt: skip


def config_of(name: str) -> Any:
    """The ModelConfig of a shape; in a rehearsal its tiny relative of the same family."""
    from sagc_fast.model.config import ModelConfig

    return ModelConfig(**CONFIGS[name] | (TINY if REHEARSAL else {}))


def shape_of(config: Any) -> Any:
    """Widths and work of a model as the benches count them."""
    from sagc_fast.bench.models import Shape

    return Shape(
        config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim,
        config.intermediate_size, config.vocab_size,
    )  # fmt: skip


def random_model(config: Any, seed: int = 0) -> Any:
    """Weights as :func:`sagc_fast.model.loader.random_model` scales them, made on the device."""
    from sagc_fast.model.transformer import Transformer

    model = Transformer(config, DTYPE, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("norm") else 0.0)
    return model


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def free_memory() -> None:
    """Give cached memory back, for the next who measures in this process."""
    import gc

    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def wall_seconds(call: Callable[[], Any]) -> float:
    """Of a call with all the work that it has started."""
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started


_flush: torch.Tensor | None = None
SPIN_CYCLES_PER_SECOND = 4e9
"""Cycles that the device spins for a second of the host's: twice what goes by in one (H200: 1.98 GHz)."""


def kernel_seconds(call: Callable[[], Any], budget_seconds: float = 0.25) -> float:
    """Median over launches with a cold second-level cache, on the device's own clock; ``call`` is warmed up here. In a
    rehearsal the seconds of the first call.

    The device is kept spinning until the host has queued all of a call. Else what takes the host longer to launch than
    the device to run, as several small kernels do, would be timed by the host's clock; in a CUDA graph it is not.
    """
    global _flush
    if REHEARSAL:
        return wall_seconds(call)
    call()
    host_seconds = _host_seconds(call)
    once = max(wall_seconds(call), 1e-5) + 2 * host_seconds
    repeats = int(min(50, max(5, budget_seconds / once)))
    if _flush is None:
        _flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=DEVICE)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in pairs:
        _flush.zero_()
        torch.cuda._sleep(int(SPIN_CYCLES_PER_SECOND * host_seconds))
        begin.record()
        call()
        end.record()
    synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def _host_seconds(call: Callable[[], Any]) -> float:
    """Until a call has queued its work, while the device is idle."""
    synchronize()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def ceilings() -> dict[str, float]:
    """``read_bytes`` and ``matrix_flops`` per second: of this run's part ``ceilings``, else measured now."""
    path = out_folder() / "ceilings.json"
    if path.exists():
        return json.loads(path.read_text())
    from gpu.ceilings import measure

    return measure()
