"""What a config.json is read as, and what is refused in one sentence."""

from __future__ import annotations

import pytest
import torch

from sagc_fast.errors import ModelLoadError
from sagc_fast.model.config import ModelConfig, RopeScaling
from sagc_fast.model.rope import rope_tables

BASE = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def read(**fields) -> ModelConfig:
    return ModelConfig.from_hf_dict({**BASE, **fields})


def test_missing_fields_take_transformers_defaults() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 8, 2048)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-6, 10000.0, None)
    assert (config.tie_word_embeddings, config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias) == (False,) * 4
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (None, (), None)
    assert read(model_type="qwen3", num_key_value_heads=2).head_dim == 128
    qwen2 = read(model_type="qwen2", num_key_value_heads=2)
    assert (qwen2.has_qkv_bias, qwen2.has_o_bias) == (True, False)


def test_several_end_tokens() -> None:
    assert read(eos_token_id=3).eos_token_ids == (3,)
    assert read(eos_token_id=[3, 5]).eos_token_ids == (3, 5)


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_both_generations_of_rope_fields(fields: dict) -> None:
    config = read(**fields)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert ModelConfig.from_hf_dict(config.to_hf_dict()) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'; supported are llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": None}, "hidden_size None"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers 'two'"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"model_type": "qwen2"}, "num_key_value_heads None"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; only silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling .*'yarn'.*supported rope types"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters .*'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "llama3 without 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, "use_sliding_window True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .*sliding_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config .*awq"),
        ({"eos_token_id": 64}, "eos_token_id 64 is outside the vocabulary of 64"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        read(**fields)
    assert "\n" not in str(caught.value)


def test_a_sliding_window_that_is_switched_off_is_no_obstacle() -> None:
    assert read(use_sliding_window=False, sliding_window=4096, max_window_layers=1).num_layers == 2
    assert read(use_sliding_window=True, sliding_window=4096, max_window_layers=2).num_layers == 2
    assert read(layer_types=["full_attention"] * 2).num_layers == 2


def test_rotary_rows_do_not_depend_on_the_length_of_the_table() -> None:
    config = read(rope_scaling={"rope_type": "llama3", **LLAMA3})
    for short, long in zip(rope_tables(config, 100), rope_tables(config, 5000), strict=True):
        assert torch.equal(short, long[:100])
