"""LoRA: gradients against the plain low-rank formula, a base that never moves, files that peft loads."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sagc_fast.errors import CheckpointError, ConfigError, ModelLoadError
from sagc_fast.model.config import ModelConfig
from sagc_fast.model.loader import load_model, random_model, save_model
from sagc_fast.model.lora import TARGETS, LoraSpec, attach

SPEC = LoraSpec(rank=3, alpha=6.0)
TOKENS = torch.tensor([1, 5, 3, 2, 7, 4, 9])


def model_config(tied: bool = False, **more) -> ModelConfig:
    return ModelConfig.from_hf_dict(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 11, "hidden_size": 16,
            "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied, "eos_token_id": 0,
            "hidden_act": "silu", **more,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base")
    save_model(random_model(model_config(), seed=5), path)
    return path


def adapted(folder: Path, spec: LoraSpec = SPEC, dtype: str = "fp32", filled: bool = True):
    """A model with adapters whose B is not zero, and the adapters."""
    model = load_model(folder, dtype=dtype)
    adapters = attach(model, folder, spec, seed=1)
    if filled:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for part in adapters.parts:
                part.lora_B.copy_(torch.randn(part.lora_B.shape, generator=generator) * 0.2)
    adapters.merge()
    return model, adapters


def loss_of(model) -> torch.Tensor:
    """A loss that every parameter has a part in, the head through ``trained_head``."""
    from sagc_fast.ops.layouts import PackedLayout

    n = len(TOKENS)
    layout = PackedLayout(torch.arange(n), ((0, 2),), (((2, n - 2),),))
    hidden = model.forward_packed(TOKENS, layout)
    return torch.nn.functional.cross_entropy(hidden @ model.trained_head.T, TOKENS.roll(-1))


def dense_gradients(folder: Path, model, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """dA and dB by the chain rule from the gradient of the whole matrices, in float64."""
    plain = load_model(folder).to(dtype)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(model.get_parameter(name))
    loss_of(plain).backward()
    gradients = {}
    from sagc_fast.model.weights import weight_slots

    slots = {slot.name: slot for slot in weight_slots(plain.config)}
    scale = model.adapters.spec.scale
    for part in model.adapters.parts:
        slot = slots[f"{part.name}.weight"]
        whole = plain.get_parameter(slot.parameter).grad[slot.start : slot.start + slot.shape[0]]
        gradients[part.name, "A"] = scale * part.lora_B.to(dtype).T @ whole
        gradients[part.name, "B"] = scale * whole @ part.lora_A.to(dtype).T
    return gradients


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj",), ("v_proj", "up_proj"), ("lm_head",)], ids=len)
def test_gradients_are_those_of_the_low_rank_product(folder, targets):
    model, adapters = adapted(folder, replace(SPEC, target_modules=targets))
    loss_of(model).backward()
    expected = dense_gradients(folder, model)
    assert len(expected) == 2 * len(adapters.parts)
    for part in adapters.parts:
        torch.testing.assert_close(part.lora_A.grad.double(), expected[part.name, "A"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(part.lora_B.grad.double(), expected[part.name, "B"], rtol=1e-4, atol=1e-6)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora" in name for name in trained)
    assert len(trained) == 2 * len(adapters.parts)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_base_comes_back_to_the_bit_after_many_merges(folder, dtype):
    base = {name: p.detach().clone() for name, p in load_model(folder, dtype=dtype).named_parameters()}
    model, adapters = adapted(folder, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        with torch.no_grad():
            for part in adapters.parts:
                part.lora_B.add_(torch.randn(part.lora_B.shape, generator=generator))
        adapters.merge()
    merged = model.layers[0].qkv_weight.detach().clone()
    assert not torch.equal(merged, base["layers.0.qkv_weight"])
    with adapters.unmerged():
        for name, tensor in base.items():
            assert torch.equal(model.get_parameter(name), tensor), name
    assert torch.equal(model.layers[0].qkv_weight, merged)


def test_merged_is_base_plus_scaled_product(folder):
    for rslora in (False, True):
        model, adapters = adapted(folder, replace(SPEC, use_rslora=rslora))
        assert adapters.spec.scale == pytest.approx(6 / math.sqrt(3) if rslora else 2)
        base = load_model(folder)
        part = next(p for p in adapters.parts if p.name == "model.layers.1.self_attn.k_proj")
        rows = slice(part.start, part.start + part.num_rows)
        expected = base.layers[1].qkv_weight[rows] + adapters.spec.scale * part.lora_B @ part.lora_A
        torch.testing.assert_close(model.layers[1].qkv_weight[rows], expected, rtol=1e-6, atol=1e-6)


def test_fresh_adapters_change_nothing_and_depend_on_the_seed(folder):
    model, adapters = adapted(folder, filled=False)
    assert torch.equal(model.forward_dense(TOKENS), load_model(folder).forward_dense(TOKENS))
    again = attach(load_model(folder), folder, SPEC, seed=1)
    other = attach(load_model(folder), folder, SPEC, seed=2)
    assert all(torch.equal(a.lora_A, b.lora_A) for a, b in zip(adapters.parts, again.parts, strict=True))
    assert not torch.equal(adapters.parts[0].lora_A, other.parts[0].lora_A)


def test_dropout_is_that_of_peft(folder, monkeypatch):
    """With a fixed mask: y = W x + scale B A dropout(x), and no dropout without gradients."""
    model, adapters = adapted(folder, replace(SPEC, dropout=0.5))
    layer, x = model.layers[0], torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    mask = (torch.rand(5, 16, generator=torch.Generator().manual_seed(1)) < 0.5) * 2.0
    monkeypatch.setattr("torch.nn.functional.dropout", lambda t, p: t * mask)
    linear = layer.lora["o"]
    part = linear.parts[0]
    base = load_model(folder).layers[0].o_weight
    y = linear(x, layer.o_weight, None)
    torch.testing.assert_close(
        y, x @ base.T + adapters.spec.scale * (x * mask) @ part.lora_A.T @ part.lora_B.T, rtol=1e-4, atol=1e-5
    )
    y.sum().backward()
    expected = adapters.spec.scale * torch.ones(16, 5) @ (x * mask) @ part.lora_A.T
    torch.testing.assert_close(part.lora_B.grad, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, layer.o_weight, None), x @ layer.o_weight.T)


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj", "down_proj")], ids=len)
def test_peft_loads_what_we_save_and_computes_the_same(folder, tmp_path, targets):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model, adapters = adapted(folder, replace(SPEC, target_modules=targets, use_rslora=True))
    adapters.save(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    missing = [n for n, p in theirs.named_parameters() if "lora_B" in n and not p.any()]
    assert not missing, "every B was loaded"
    with torch.no_grad():
        logits = theirs(TOKENS[None]).logits[0]
    torch.testing.assert_close(model.forward_dense(TOKENS), logits, rtol=1e-4, atol=1e-5)
    plain = load_model(tmp_path / "adapter")
    assert plain.adapters is None
    assert torch.equal(plain.forward_dense(TOKENS), model.forward_dense(TOKENS))


def test_we_load_what_peft_saves(folder, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "gate_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(base, config)
    theirs.save_pretrained(tmp_path)
    model = load_model(folder)
    adapters = attach(model, folder, replace(SPEC, target_modules=("gate_proj", "q_proj")))
    adapters.load(tmp_path)
    adapters.merge()
    with torch.no_grad():
        logits = theirs(TOKENS[None]).logits[0]
    torch.testing.assert_close(model.forward_dense(TOKENS), logits, rtol=1e-4, atol=1e-5)


def test_wrong_adapters_are_refused_in_one_sentence(folder, tmp_path):
    _, adapters = adapted(folder)
    adapters.save(tmp_path / "a")
    other = attach(load_model(folder), folder, replace(SPEC, rank=4))
    with pytest.raises(ConfigError, match=r"lora.rank is 4 and the adapter in .* has 3; set it to that"):
        other.load(tmp_path / "a")
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json is not a legible adapter configuration"):
        adapters.load(tmp_path / "nowhere")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    for change, message in (
        ({"target_modules": ["c_attn"]}, "is not a LoRA adapter of"),
        ({"use_dora": True}, "sets use_dora"),
    ):
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelLoadError, match=message):
            adapters.load(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file(tensors | {name: torch.zeros(2, 2)}, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match=r"has shape \[2, 2\]"):
        adapters.load(tmp_path / "a")
    save_file(tensors | {"extra": torch.zeros(1)}, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match="holds extra, which the model does not have"):
        adapters.load(tmp_path / "a")


def test_another_base_is_noticed(folder, tmp_path):
    _, adapters = adapted(folder)
    adapters.save(tmp_path / "a")
    save_model(random_model(model_config(), seed=6), tmp_path / "base")
    with pytest.raises(CheckpointError, match="was trained on other weights than those in"):
        adapted(tmp_path / "base")[1].load(tmp_path / "a")


def test_a_rank_above_that_of_an_adapted_matrix_is_refused(folder):
    model = load_model(folder)
    smallest = min(min(part.lora_B.shape[0], part.lora_A.shape[1]) for part in attach(model, folder, SPEC).parts)
    attach(load_model(folder), folder, replace(SPEC, rank=smallest))
    with pytest.raises(
        ConfigError, match=rf"lora.rank is 100000; it must be at most {smallest}, as .*_proj.weight is of"
    ):
        attach(load_model(folder), folder, replace(SPEC, rank=100_000))


def test_a_tied_head_takes_no_adapter(tmp_path):
    save_model(random_model(model_config(tied=True)), tmp_path)
    with pytest.raises(ConfigError, match="names lm_head, which this model ties to its embedding"):
        attach(load_model(tmp_path), tmp_path, replace(SPEC, target_modules=("lm_head",)))
    with pytest.raises(ConfigError, match="names 'wq'"):
        attach(load_model(tmp_path), tmp_path, replace(SPEC, target_modules=("wq",)))
