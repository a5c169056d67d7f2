"""The decoder: one copy of the weights for rollout (paged, no gradients) and training (packed groups, autograd).

Weights keep Hugging Face's orientation [out, in]; q, k, v are fused into one matrix and so are gate and up.

Shape suffixes: T tokens of a step or packed batch, R rows whose output is wanted, E model width, F feed-forward width,
H query heads, K kv heads, D head width, V vocabulary, P positions, D2 half the head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sagc_fast import ops
from sagc_fast.model.config import ModelConfig
from sagc_fast.model.rope import rope_tables
from sagc_fast.ops.layouts import PackedLayout, PagedLayout
from sagc_fast.profiling import ranged

if TYPE_CHECKING:
    from sagc_fast.model.lora import Adapters

FIRST_TABLE_POSITIONS = 2048
"""Rotary tables start at this length and double when a longer context comes."""


class KVLayers(Protocol):
    """What the model needs of a KV cache: per layer two tensors [num_blocks, K, block_size, D]."""

    def k(self, layer: int) -> torch.Tensor: ...

    def v(self, layer: int) -> torch.Tensor: ...


class DecoderLayer(nn.Module):
    """Parameters of one layer and its packed (training) forward."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width, hidden = config.hidden_size, config.intermediate_size

        def parameter(*shape: int, when: bool = True) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) if when else None

        self.input_norm = parameter(width)
        self.qkv_weight = parameter((heads + 2 * kv_heads) * head_dim, width)
        self.qkv_bias = parameter((heads + 2 * kv_heads) * head_dim, when=config.has_qkv_bias)
        self.q_norm = parameter(head_dim, when=config.has_qk_norm)
        self.k_norm = parameter(head_dim, when=config.has_qk_norm)
        self.o_weight = parameter(width, heads * head_dim)
        self.o_bias = parameter(width, when=config.has_o_bias)
        self.post_norm = parameter(width)
        self.gate_up_weight = parameter(2 * hidden, width)
        self.gate_up_bias = parameter(2 * hidden, when=config.has_mlp_bias)
        self.down_weight = parameter(width, hidden)
        self.down_bias = parameter(width, when=config.has_mlp_bias)
        self.lora: nn.ModuleDict | None = None
        """Adapters by matrix, when there are any (see lora.py)."""

    def split_heads(self, qkv_TX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views q [T, H, D], k and v [T, K, D] of the fused projection."""
        config = self.config
        qkv = qkv_TX.view(qkv_TX.shape[0], -1, config.head_dim)
        return qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)

    @ranged("dense")
    def project(self, name: str, x_TX: torch.Tensor) -> torch.Tensor:
        """The product with the matrix ``name`` and its bias, in training."""
        weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
        if self.lora is not None and name in self.lora:
            return self.lora[name](x_TX, weight, bias)
        return ops.trained_linear(x_TX, weight, bias)

    def forward(
        self, x_TE: torch.Tensor, layout: PackedLayout, cos_TD2: torch.Tensor, sin_TD2: torch.Tensor
    ) -> torch.Tensor:
        """Residual stream in, residual stream out; differentiable."""
        config, eps = self.config, self.config.rms_norm_eps
        normed_TE = ops.rms_norm(x_TE, self.input_norm, eps)
        qkv_TX = self.project("qkv", normed_TE)
        if self.q_norm is not None:
            q_THD, k_TKD, v_TKD = self.split_heads(qkv_TX)
            q_THD, k_TKD = _head_norm(q_THD, self.q_norm, eps), _head_norm(k_TKD, self.k_norm, eps)
            qkv_TX = torch.cat((q_THD, k_TKD, v_TKD), dim=1).flatten(1)
        q_THD, k_TKD, v_TKD = ops.rotary_split(qkv_TX, cos_TD2, sin_TD2, config.num_heads, config.num_kv_heads)
        attended = ops.varlen_attention(q_THD, k_TKD, v_TKD, layout, config.head_dim**-0.5).flatten(1)
        attended_TE = self.project("o", attended)
        normed_TE, x_TE = ops.add_rms_norm(attended_TE, x_TE, self.post_norm, eps)
        gated_TF = ops.silu_mul(self.project("gate_up", normed_TE))
        return x_TE + self.project("down", gated_TF)


class Transformer(nn.Module):
    """A Llama, Qwen2 or Qwen3 decoder. Parameters are uninitialised until a loader fills them (see loader.py)."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embed_weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.layers = nn.ModuleList(DecoderLayer(config, dtype, device) for _ in range(config.num_layers))
        self.final_norm = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype, device=device))
        self.head_weight = (
            None if config.tie_word_embeddings else nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        )
        self.adapters: Adapters | None = None
        """All of the model, when it is trained through adapters."""
        self.head_lora: nn.Module | None = None
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def lm_head_weight(self) -> nn.Parameter:
        """[V, E]; the embedding itself when tied."""
        return self.embed_weight if self.head_weight is None else self.head_weight

    @property
    def trained_head(self) -> torch.Tensor:
        """[V, E] for the loss: the head, differentiable in its adapter where it has one."""
        return self.lm_head_weight if self.head_lora is None else self.head_lora.weight(self.lm_head_weight)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_weight.device

    def rope(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 (cos, sin) tables [P, D2] with P >= ``num_positions``, on the model's device."""
        if self._rope is None or len(self._rope[0]) < num_positions or self._rope[0].device != self.device:
            length = max(FIRST_TABLE_POSITIONS, 1 << (num_positions - 1).bit_length())
            with torch.inference_mode(False):  # tables made in a rollout must serve training as well
                self._rope = rope_tables(self.config, length, device=self.device)
        return self._rope

    def decoder(self, kv: KVLayers) -> ops.Decoder | None:
        """The whole step of :meth:`forward_paged` and the draw as native code, bound to these weights and this cache;
        None where there is no such code. Valid while no weight changes: make one per call."""
        layers = range(self.config.num_layers)
        if not ops.has_decoder(self.device.type, self.dtype, kv.k(0).dtype):
            return None
        fields = ops.LayerWeights.__dataclass_fields__
        weights = ops.DecoderWeights(
            embedding=self.embed_weight.detach(),
            final_norm=self.final_norm.detach(),
            head=self.lm_head_weight.detach(),
            layers=[ops.LayerWeights(*(getattr(layer, name) for name in fields)) for layer in self.layers],
            num_heads=self.config.num_heads,
            rms_norm_eps=self.config.rms_norm_eps,
        )
        return ops.Decoder(weights, [cache for layer in layers for cache in (kv.k(layer), kv.v(layer))])

    @torch.inference_mode()
    def forward_paged(self, token_ids_T: torch.Tensor, layout: PagedLayout, kv: KVLayers) -> torch.Tensor:
        """One engine step: writes this step's keys and values into ``kv`` and returns the hidden states [R, E], after
        the final norm, of ``layout.logits_rows_R``. Operator by operator; :meth:`decoder` does the same, to the bit."""
        config, layers = self.config, self.layers
        eps, scale = config.rms_norm_eps, config.head_dim**-0.5
        cos_PD2, sin_PD2 = self.rope(layout.max_context_len)
        residual_TE = functional.embedding(token_ids_T, self.embed_weight)
        x_TE = ops.rms_norm(residual_TE, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            q_THD, k_TKD, v_TKD = layer.split_heads(ops.linear(x_TE, layer.qkv_weight, layer.qkv_bias))
            if layer.q_norm is not None:
                q_THD = _head_norm(q_THD, layer.q_norm, eps)
                k_TKD = _head_norm(k_TKD, layer.k_norm, eps)
            own, angles, caches = (q_THD, k_TKD, v_TKD), (cos_PD2, sin_PD2), (kv.k(index), kv.v(index))
            is_last = index + 1 == len(layers)
            if is_last and len(layout.logits_rows_R) == 0:  # a prefill chunk short of the prompt's end: the KV was all
                ops.rope_and_cache(*own, *angles, layout.positions_T, *caches, layout.slots_T)
                return residual_TE[:0]
            x_TE = ops.rope_and_attend(*own, *angles, *caches, layout, scale).flatten(1)
            if is_last:
                x_TE, residual_TE = x_TE[layout.logits_rows_R], residual_TE[layout.logits_rows_R]
            x_TE = ops.linear(x_TE, layer.o_weight, layer.o_bias)
            x_TE, residual_TE = ops.add_rms_norm(x_TE, residual_TE, layer.post_norm, eps)
            x_TE = ops.silu_mul(ops.linear(x_TE, layer.gate_up_weight, layer.gate_up_bias))
            x_TE = ops.linear(x_TE, layer.down_weight, layer.down_bias)
            next_norm = self.final_norm if is_last else layers[index + 1].input_norm
            x_TE, residual_TE = ops.add_rms_norm(x_TE, residual_TE, next_norm, eps)
        return x_TE

    @torch.inference_mode()
    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """fp32 [R, V]; the same bits for a row whatever the other rows (fp32 weights, CPU)."""
        return ops.linear(hidden_RE, self.lm_head_weight).float()

    def forward_packed(
        self, token_ids_T: torch.Tensor, layout: PackedLayout, checkpoint_activations: bool = False
    ) -> torch.Tensor:
        """Hidden states [T, E] of a packed batch after the final norm, with gradients. ``checkpoint_activations`` keeps
        one [T, E] per layer and computes the rest again in backward."""
        cos_PD2, sin_PD2 = self.rope(int(layout.positions_T.max()) + 1 if len(token_ids_T) else 1)
        cos_TD2, sin_TD2 = cos_PD2[layout.positions_T], sin_PD2[layout.positions_T]
        x_TE = functional.embedding(token_ids_T, self.embed_weight)
        for layer in self.layers:
            if checkpoint_activations:
                x_TE = checkpoint(layer, x_TE, layout, cos_TD2, sin_TD2, use_reentrant=False)
            else:
                x_TE = layer(x_TE, layout, cos_TD2, sin_TD2)
        return ops.rms_norm(x_TE, self.final_norm, self.config.rms_norm_eps)

    def forward_dense(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """fp32 logits [T, V] of one plain causal sequence, with gradients: the path that tests compare with."""
        length = len(token_ids_T)
        positions_T = torch.arange(length, device=token_ids_T.device)
        layout = PackedLayout(positions_T, prompt_spans=((0, length),), completion_spans=((),))
        return ops.trained_linear(self.forward_packed(token_ids_T, layout), self.lm_head_weight).float()


def _head_norm(x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Per-head norm of Qwen3, every (token, head) a row. With one head, reshape alone leaves a strided view of qkv."""
    return ops.rms_norm(x_THD.reshape(-1, x_THD.shape[-1]).contiguous(), weight_D, eps).view(x_THD.shape)
