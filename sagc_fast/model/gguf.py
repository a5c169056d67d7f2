"""GGUF files in: dequantised, renamed and written as a Hugging Face folder (llama, qwen2 and qwen3 architectures).

Needs the ``gguf`` package, which reads the container and dequantises (F32, F16, BF16, Q4_0 to Q8_0, K-quants).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sagc_fast.errors import ModelLoadError
from sagc_fast.model.config import ARCHITECTURES, ModelConfig, RopeScaling
from sagc_fast.model.gguf_tokenizer import write_tokenizer
from sagc_fast.model.loader import parse_dtype, save_model
from sagc_fast.model.rope import llama3_scaled, plain_frequencies
from sagc_fast.model.transformer import Transformer
from sagc_fast.model.weights import weight_slots

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_LOW_HIGH_CONTEXT = (1.0, 4.0, 8192)
"""The constants all published Llama 3.1 to 3.3 models share; GGUF keeps only the factors that follow from them."""


class GGUFMetadata:
    """Typed access to a file's key-value fields; ``get("attention.head_count")`` is within the architecture's own."""

    def __init__(self, reader: Any, path: Path) -> None:
        self.path = path
        self._fields = reader.fields
        self.architecture = self.get_global("general.architecture")

    def get_global(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def get(self, key: str, default: Any = None) -> Any:
        return self.get_global(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelLoadError(f"{self.path} has no field {self.architecture}.{key}; the file is incomplete.")
        return value

    def float32(self, key: str, default: float) -> float:
        """A stored float32 as the shortest decimal that means it (1e-05, not 9.9999997e-06)."""
        return float(str(np.float32(self.get(key, default))))


def convert_gguf(path: str | Path, out_folder: str | Path, dtype: str = "fp32") -> Path:
    """Convert a GGUF file to a Hugging Face folder with weights in ``dtype`` and the tokenizer; returns the folder.

    Raises ModelLoadError for a file that is not there, not GGUF, truncated, of an unsupported architecture,
    quantisation or tokenizer, or that lacks tensors.
    """
    path, out_folder = Path(path), Path(out_folder)
    torch_dtype = parse_dtype(dtype)
    reader = _open(path)
    metadata = GGUFMetadata(reader, path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, tensors)
    model = Transformer(config, torch_dtype)
    _fill(model, tensors, path)
    out_folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(metadata, out_folder)
    save_model(model, out_folder)
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
    }
    (out_folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return out_folder


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelLoadError(f"Reading {path} needs the gguf package; install it with `pip install gguf`.") from None
    if not path.is_file():
        raise ModelLoadError(f"GGUF file {path} is not there; check the path.")
    try:
        return GGUFReader(path)
    except Exception as error:  # the reader raises whatever numpy meets in a damaged file
        raise ModelLoadError(f"{path} is not a complete GGUF file ({error}); download it again.") from error


def _config(metadata: GGUFMetadata, tensors: dict[str, Any]) -> ModelConfig:
    family, path = metadata.architecture, metadata.path
    if family not in ARCHITECTURES:
        raise ModelLoadError(f"{path} has architecture {family!r}; supported are {', '.join(ARCHITECTURES)}.")
    if metadata.get("expert_count"):
        raise ModelLoadError(f"{path} is a mixture of {metadata.get('expert_count')} experts; only dense models load.")
    if "token_embd.weight" not in tensors:
        raise ModelLoadError(f"{path} lacks tensor token_embd.weight; the file is incomplete.")
    num_heads, width = metadata.require("attention.head_count"), metadata.require("embedding_length")
    head_dim = metadata.get("attention.key_length", width // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim:
            raise ModelLoadError(
                f"{path} has {family}.{key} {metadata.get(key)}; only the head width {head_dim} works."
            )
    if metadata.get("rope.scaling.type", "none") != "none":
        raise ModelLoadError(
            f"{path} has {family}.rope.scaling.type {metadata.get('rope.scaling.type')!r}; unsupported."
        )
    theta = metadata.float32("rope.freq_base", 10000.0)
    eos = [metadata.get_global(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return ModelConfig(
        family=family,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=width,
        intermediate_size=metadata.require("feed_forward_length"),
        num_layers=metadata.require("block_count"),
        num_heads=num_heads,
        num_kv_heads=metadata.get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=metadata.require("context_length"),
        rms_norm_eps=metadata.float32("attention.layer_norm_rms_epsilon", 1e-6),
        rope_theta=theta,
        rope_scaling=_rope_scaling(tensors, head_dim, theta, path),
        tie_word_embeddings="output.weight" not in tensors,
        has_qkv_bias="blk.0.attn_q.bias" in tensors,
        has_o_bias="blk.0.attn_output.bias" in tensors,
        has_mlp_bias="blk.0.ffn_down.bias" in tensors,
        bos_token_id=metadata.get_global("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in eos if token_id is not None)),
        pad_token_id=metadata.get_global("tokenizer.ggml.padding_token_id"),
    )


def _rope_scaling(tensors: dict[str, Any], head_dim: int, theta: float, path: Path) -> RopeScaling | None:
    """Llama 3's scaling, recognised from the divisors of the rotary frequencies that stand in for it."""
    if ROPE_FACTORS not in tensors:
        return None
    factors_D2 = torch.from_numpy(np.array(tensors[ROPE_FACTORS].data, dtype=np.float32))
    low, high, context = LLAMA3_LOW_HIGH_CONTEXT
    scaling = RopeScaling(float(factors_D2.max()), low, high, context)
    frequencies_D2 = plain_frequencies(head_dim, theta)
    if not torch.allclose(llama3_scaled(frequencies_D2, scaling) * factors_D2, frequencies_D2, rtol=1e-4):
        raise ModelLoadError(f"{path} scales rotary frequencies in a way ({ROPE_FACTORS}) that is not Llama 3's.")
    return scaling


def _fill(model: Transformer, tensors: dict[str, Any], path: Path) -> None:
    from gguf.quants import dequantize

    config, used = model.config, {ROPE_FACTORS}
    for slot in weight_slots(config):
        name = gguf_name(slot.name)
        used.add(name)
        if name not in tensors:
            raise ModelLoadError(f"{path} lacks tensor {name}; the file is incomplete.")
        tensor = tensors[name]
        try:
            values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        except NotImplementedError:
            raise ModelLoadError(
                f"Tensor {name} in {path} is quantised as {tensor.tensor_type.name}, which the gguf package cannot "
                "undo; use the model as F16 or Q8_0."
            ) from None
        if tuple(values.shape) != slot.shape:
            raise ModelLoadError(f"Tensor {name} in {path} has shape {list(values.shape)}, not {list(slot.shape)}.")
        if config.family == "llama" and "_proj" in slot.name and name.split(".")[2] in ("attn_q", "attn_k"):
            values = _halves_from_pairs(values, config.head_dim)
        slot.view(model).copy_(values)
    if extra := sorted(set(tensors) - used):
        raise ModelLoadError(
            f"{path} holds tensor {extra[0]} ({len(extra)} unknown in all), which no {config.family} has."
        )


def gguf_name(name: str) -> str:
    """What GGUF calls a tensor of a Hugging Face folder."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[stem]}.{kind}"


def _halves_from_pairs(values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo llama.cpp's row order for llama models, where dimensions 2i and 2i + 1 of a head turn together; ours are i
    and i + D/2."""
    return values.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
