"""Which Hugging Face tensor fills which rows of which parameter: the one table behind loading and saving."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sagc_fast.model.config import ModelConfig
from sagc_fast.model.transformer import Transformer


@dataclass(frozen=True)
class WeightSlot:
    """A tensor of the Hugging Face file and its place: rows ``start`` to ``start + shape[0]`` of our parameter."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    parameter: str
    """Name within :class:`Transformer`."""
    start: int = 0

    def view(self, model: Transformer) -> torch.Tensor:
        """The slot as a view of the model's parameter."""
        return model.get_parameter(self.parameter).detach()[self.start : self.start + self.shape[0]]


def weight_slots(config: ModelConfig) -> Iterator[WeightSlot]:
    """Every tensor of a model folder, in file order; all parameters are covered exactly once."""
    yield WeightSlot("model.embed_tokens.weight", (config.vocab_size, config.hidden_size), "embed_weight")
    for layer in range(config.num_layers):
        yield from _layer_slots(config, f"model.layers.{layer}.", f"layers.{layer}.")
    yield WeightSlot("model.norm.weight", (config.hidden_size,), "final_norm")
    if not config.tie_word_embeddings:
        yield WeightSlot("lm_head.weight", (config.vocab_size, config.hidden_size), "head_weight")


def _layer_slots(config: ModelConfig, theirs: str, ours: str) -> Iterator[WeightSlot]:
    width, hidden, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    fused = (
        (attention + "q_proj", q_rows, "qkv", 0, config.has_qkv_bias),
        (attention + "k_proj", kv_rows, "qkv", q_rows, config.has_qkv_bias),
        (attention + "v_proj", kv_rows, "qkv", q_rows + kv_rows, config.has_qkv_bias),
        (mlp + "gate_proj", hidden, "gate_up", 0, config.has_mlp_bias),
        (mlp + "up_proj", hidden, "gate_up", hidden, config.has_mlp_bias),
    )
    yield WeightSlot(theirs + "input_layernorm.weight", (width,), ours + "input_norm")
    for name, rows, parameter, start, has_bias in fused:
        yield WeightSlot(name + ".weight", (rows, width), f"{ours}{parameter}_weight", start)
        if has_bias:
            yield WeightSlot(name + ".bias", (rows,), f"{ours}{parameter}_bias", start)
    if config.has_qk_norm:
        yield WeightSlot(attention + "q_norm.weight", (head_dim,), ours + "q_norm")
        yield WeightSlot(attention + "k_norm.weight", (head_dim,), ours + "k_norm")
    yield WeightSlot(attention + "o_proj.weight", (width, q_rows), ours + "o_weight")
    if config.has_o_bias:
        yield WeightSlot(attention + "o_proj.bias", (width,), ours + "o_bias")
    yield WeightSlot(theirs + "post_attention_layernorm.weight", (width,), ours + "post_norm")
    yield WeightSlot(mlp + "down_proj.weight", (width, hidden), ours + "down_weight")
    if config.has_mlp_bias:
        yield WeightSlot(mlp + "down_proj.bias", (width,), ours + "down_bias")
