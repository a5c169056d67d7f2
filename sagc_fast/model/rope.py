"""Rotary position tables (Su et al. 2021, arXiv:2104.09864), with Llama 3's frequency scaling.

Shape suffixes: P positions, D2 half the head width.
"""

from __future__ import annotations

import math

import torch

from sagc_fast.model.config import ModelConfig, RopeScaling


def rope_tables(
    config: ModelConfig,
    max_positions: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [max_positions, head_dim / 2]. A row depends on its position alone, not on the table's length.
    Angles are formed in fp32, as transformers does, also when ``dtype`` is wider."""
    frequencies_D2 = plain_frequencies(config.head_dim, config.rope_theta)
    if config.rope_scaling is not None:
        frequencies_D2 = llama3_scaled(frequencies_D2, config.rope_scaling)
    angles_PD2 = torch.arange(max_positions).float().unsqueeze(1) * frequencies_D2
    return angles_PD2.cos().to(device, dtype), angles_PD2.sin().to(device, dtype)


def plain_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Radians per position of each pair of dimensions, fp32 [head_dim / 2]."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)


def llama3_scaled(frequencies_D2: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended (Llama 3.1 release)."""
    wavelengths_D2 = 2 * math.pi / frequencies_D2
    context = scaling.original_max_position_embeddings
    smooth_D2 = (context / wavelengths_D2 - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended_D2 = (1 - smooth_D2) * frequencies_D2 / scaling.factor + smooth_D2 * frequencies_D2
    stretched_D2 = torch.where(
        wavelengths_D2 > context / scaling.low_freq_factor, frequencies_D2 / scaling.factor, frequencies_D2
    )
    is_between = (wavelengths_D2 <= context / scaling.low_freq_factor) & (
        wavelengths_D2 >= context / scaling.high_freq_factor
    )
    return torch.where(is_between, blended_D2, stretched_D2)
