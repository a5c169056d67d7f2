"""A model folder as a GGUF file without a tokenizer, for engines that are given token ids (llama.cpp's bench).

The inverse of :mod:`sagc_fast.model.gguf`. Needs the ``gguf`` package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from sagc_fast.errors import ModelLoadError
from sagc_fast.model.config import ModelConfig
from sagc_fast.model.gguf import ROPE_FACTORS, gguf_name
from sagc_fast.model.loader import load_model
from sagc_fast.model.rope import llama3_scaled, plain_frequencies
from sagc_fast.model.weights import weight_slots


def export_gguf(folder: Path, out: Path, dtype: str) -> None:
    """Write the model of a Hugging Face folder to ``out``: matrices in ``dtype`` (fp32 or bf16), vectors in fp32.

    Raises ModelLoadError for a folder that cannot be read and without the gguf package.
    """
    try:
        from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
        from gguf.quants import quantize
    except ImportError:
        raise ModelLoadError(f"Writing {out} needs the gguf package; install it with `pip install gguf`.") from None
    kinds = {
        "fp32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
        "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    }
    tensor_type, file_type = kinds[dtype]
    model = load_model(folder, dtype=dtype)
    writer = GGUFWriter(out, model.config.family)
    write_shape(writer, model.config)
    writer.add_rope_dimension_count(model.config.head_dim)
    writer.add_vocab_size(model.config.vocab_size)
    writer.add_tokenizer_model("none")
    if model.config.rope_scaling is not None:
        frequencies = plain_frequencies(model.config.head_dim, model.config.rope_theta)
        factors = frequencies / llama3_scaled(frequencies, model.config.rope_scaling)
        writer.add_tensor(ROPE_FACTORS, factors.numpy().astype(np.float32))
    writer.add_file_type(file_type)
    for slot in weight_slots(model.config):
        values = slot.view(model).detach().float()
        if model.config.family == "llama" and slot.name.split(".")[-2] in ("q_proj", "k_proj"):
            values = _pairs_from_halves(values, model.config.head_dim)
        array = values.contiguous().numpy()
        if array.ndim == 1 or tensor_type == GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(slot.name), array)
        else:
            writer.add_tensor(gguf_name(slot.name), quantize(array, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_shape(writer: Any, config: ModelConfig) -> None:
    """The metadata that say what a decoder looks like, on a ``gguf.GGUFWriter``."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)


def _pairs_from_halves(values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """llama.cpp's row order for llama models: dimensions i and i + D/2 of a head, which turn together, side by side."""
    return values.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
