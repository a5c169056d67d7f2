"""Shape and family of a decoder, read from and written to a Hugging Face ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sagc_fast.errors import ModelLoadError

Family = Literal["llama", "qwen2", "qwen3"]
ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
QWEN3_HEAD_DIM = 128
"""Head width of a Qwen3 configuration that does not name one (transformers' default)."""
ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of low rotary frequencies; field names as in ``config.json``."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Everything the forward pass and the weight files need to know. Widths are in elements."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Context length in tokens."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a sequence; ``generation_config.json`` may add to those of ``config.json``."""
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelLoadError(f"The model's {name} is {value!r}; it must be an integer >= 1.")
        if self.family not in ARCHITECTURES:
            raise ModelLoadError(f"Model family {self.family!r} is unknown; use one of {', '.join(ARCHITECTURES)}.")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim is {self.head_dim}; rotary embeddings need an even number.")
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ModelLoadError(f"eos_token_id {token_id} is outside the vocabulary of {self.vocab_size} tokens.")

    @property
    def has_qk_norm(self) -> bool:
        """Qwen3 normalises each query and key head before the rotation."""
        return self.family == "qwen3"

    @classmethod
    def from_hf_dict(cls, fields: dict[str, Any]) -> ModelConfig:
        """Read a ``config.json`` of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters).

        Raises ModelLoadError naming the field and its value for anything this package would compute wrongly.
        """
        family = fields.get("model_type")
        if family not in ARCHITECTURES:
            raise ModelLoadError(
                f"config.json has model_type {family!r}; supported are {', '.join(ARCHITECTURES)} (decoder-only)."
            )
        _refuse_unsupported(fields)
        num_heads = _required(fields, "num_attention_heads")
        hidden_size = _required(fields, "hidden_size")
        head_dim = fields.get("head_dim") or (QWEN3_HEAD_DIM if family == "qwen3" else hidden_size // num_heads)
        num_kv_heads = fields.get("num_key_value_heads")
        if num_kv_heads is None:
            num_kv_heads = num_heads if family == "llama" else _required(fields, "num_key_value_heads")
        theta, scaling = _rope(fields)
        has_attention_bias = bool(fields.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=_required(fields, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(fields, "intermediate_size"),
            num_layers=_required(fields, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.get("max_position_embeddings") or (2048 if family == "llama" else 32768),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            has_qkv_bias=family == "qwen2" or has_attention_bias,
            has_o_bias=family != "qwen2" and has_attention_bias,
            has_mlp_bias=family == "llama" and bool(fields.get("mlp_bias", False)),
            bos_token_id=fields.get("bos_token_id"),
            eos_token_ids=as_token_ids(fields.get("eos_token_id")),
            pad_token_id=fields.get("pad_token_id"),
        )

    def to_hf_dict(self, dtype: str = "float32") -> dict[str, Any]:
        """A ``config.json`` that transformers 4 and 5 and :meth:`from_hf_dict` read; ``dtype`` as torch names it."""
        scaling = None if self.rope_scaling is None else {"rope_type": "llama3", **vars(self.rope_scaling)}
        eos = self.eos_token_ids
        fields = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
            "pad_token_id": self.pad_token_id,
            "dtype": dtype,
            "torch_dtype": dtype,
        }
        if self.family != "qwen2":
            fields["attention_bias"] = self.has_qkv_bias
        if self.family == "llama":
            fields["mlp_bias"] = self.has_mlp_bias
        return fields


def as_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """``eos_token_id`` of a configuration file, which is a number, a list or null."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _required(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"config.json has {name} {value!r}; it must be an integer >= 1.")
    return value


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    layer_types = fields.get("layer_types") or []
    window_start = fields.get("max_window_layers", fields.get("num_hidden_layers"))
    has_window = (
        bool(fields.get("use_sliding_window")) and not layer_types and window_start != fields["num_hidden_layers"]
    )
    wanted = (
        ("hidden_act", fields.get("hidden_act", "silu"), fields.get("hidden_act", "silu") in ("silu", "swish"), "silu"),
        ("use_sliding_window", True, not has_window, "full attention in every layer"),
        ("layer_types", layer_types, set(layer_types) <= {"full_attention"}, "full attention in every layer"),
        (
            "quantization_config",
            fields.get("quantization_config"),
            fields.get("quantization_config") is None,
            "unquantised weights (convert them first)",
        ),
    )
    for name, value, is_supported, only in wanted:
        if not is_supported:
            raise ModelLoadError(f"config.json has {name} {value!r}; only {only} is supported.")


def _rope(fields: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from either generation of field names."""
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = fields.get(name) or {}
    theta = rope.get("rope_theta", fields.get("rope_theta", 10000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if rope_type not in ROPE_TYPES or any(isinstance(value, dict) for value in rope.values()):
        raise ModelLoadError(f"config.json has {name} {rope!r}; supported rope types are {', '.join(ROPE_TYPES)}.")
    if partial not in (None, 1.0):
        raise ModelLoadError(f"config.json has partial_rotary_factor {partial!r}; only 1.0 is supported.")
    if rope_type == "default":
        return float(theta), None
    try:
        return float(theta), RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ModelLoadError(f"config.json has {name} of type llama3 without {error.args[0]!r}.") from None
