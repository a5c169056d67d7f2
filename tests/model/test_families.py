"""Logits equal transformers' for every family, before and after a trip through our own folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from sagc_fast.model import loader
from sagc_fast.model.loader import load_model, save_model
from sagc_fast.ops.layouts import PackedLayout

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": ("LlamaConfig", {}),
    "llama-multi-head": ("LlamaConfig", {"num_key_value_heads": 4, "num_hidden_layers": 3, "hidden_size": 64}),
    "llama-wide-heads": ("LlamaConfig", {"head_dim": 20, "num_key_value_heads": 1}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "head_dim": 32}),
    "llama-tied-biases": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "qwen3-one-kv-head": ("Qwen3Config", {"head_dim": 34, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "qwen3-one-head": ("Qwen3Config", {"head_dim": 6, "num_attention_heads": 1, "num_key_value_heads": 1}),
    "qwen3-tied-bias": ("Qwen3Config", {"tie_word_embeddings": True, "head_dim": 12, "attention_bias": True}),
}
TOLERANCE = 1e-4


def _ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(97, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=CASES.items(), ids=CASES.keys(), scope="module")
def pair(request: pytest.FixtureRequest, hf_folder: Callable) -> tuple:
    """(transformers model, its folder, our model)"""
    config_class, fields = request.param[1]
    theirs, folder = hf_folder(config_class, **fields)
    return theirs, folder, load_model(folder)


def test_dense_logits_equal_transformers(pair: tuple) -> None:
    theirs, _, ours = pair
    for length in (1, 13, 150):
        ids = _ids(length)
        with torch.no_grad():
            expected = theirs(ids.unsqueeze(0)).logits[0]
        assert float(expected.abs().max()) > 1
        torch.testing.assert_close(ours.forward_dense(ids), expected, rtol=0, atol=TOLERANCE)


def test_paged_logits_equal_transformers(pair: tuple, each_backend: str, bare_cache: Callable) -> None:
    """A prompt in two chunks, then token by token, beside another sequence."""
    theirs, _, ours = pair
    ids, other = _ids(60), _ids(30, seed=1)
    with torch.no_grad():
        expected, expected_other = (theirs(x.unsqueeze(0)).logits[0] for x in (ids, other))
    cache, rows, other_rows, at = bare_cache(ours.config), [], [], 0
    for count in (37, 19, 1, 1, 1, 1):
        step, tokens = {"a": count}, [ids[at : at + count]]
        if at == 37:
            step["b"] = 30
            tokens.append(other)
        hidden = ours.forward_paged(torch.cat(tokens), cache.append(step), cache)
        logits = ours.logits(hidden)
        rows.append(logits[:count])
        other_rows.append(logits[count:])
        at += count
    torch.testing.assert_close(torch.cat(rows), expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(torch.cat(other_rows), expected_other, rtol=0, atol=TOLERANCE)


def test_packed_groups_equal_transformers_with_gradients(pair: tuple) -> None:
    """The prompt once, completions behind it: logits and the gradient of the embedding agree
    with transformers run on every [prompt; completion]."""
    theirs, _, ours = pair
    prompt, completions = _ids(9), [_ids(n, seed=n) for n in (5, 12, 1)]
    spans = ((9, 5), (14, 12), (26, 1))
    positions = torch.cat([torch.arange(9), *(torch.arange(9, 9 + len(c)) for c in completions)])
    layout = PackedLayout(positions, ((0, 9),), (spans,))
    for checkpoint in (False, True):
        ours.zero_grad()
        theirs.zero_grad()
        hidden = ours.forward_packed(torch.cat([prompt, *completions]), layout, checkpoint_activations=checkpoint)
        logits = hidden @ ours.lm_head_weight.t()
        expected = [theirs(torch.cat([prompt, c]).unsqueeze(0)).logits[0, 9:] for c in completions]
        torch.testing.assert_close(logits[9:], torch.cat(expected), rtol=0, atol=TOLERANCE)
        logits[9:].pow(2).mean().backward()
        torch.cat(expected).pow(2).mean().backward()
        wanted = theirs.get_input_embeddings().weight.grad
        scale = float(wanted.abs().max())
        torch.testing.assert_close(ours.embed_weight.grad, wanted, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("shard_bytes", [loader.SHARD_BYTES, 20_000])
def test_our_folder_loads_in_transformers_and_again_in_ours(
    pair: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    theirs, folder, ours = pair
    monkeypatch.setattr(loader, "SHARD_BYTES", shard_bytes)
    save_model(ours, tmp_path, source=folder)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == 20_000)
    assert (tmp_path / "generation_config.json").exists()
    again = load_model(tmp_path)
    assert again.config == ours.config
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
    assert [n for n, _ in again.named_parameters()] == [n for n, _ in ours.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        ids = _ids(40).unsqueeze(0)
        assert torch.equal(reloaded(ids).logits, theirs(ids).logits)


def test_saving_over_a_sharded_folder_leaves_no_stale_shard(hf_folder: Callable, tmp_path: Path) -> None:
    _, folder = hf_folder("LlamaConfig")
    model = load_model(folder)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"old")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    save_model(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_sharded_folder_of_transformers_loads(hf_folder: Callable) -> None:
    theirs, folder = hf_folder("Qwen2Config", max_shard_size="40KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    ids = _ids(20)
    with torch.no_grad():
        expected = theirs(ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(load_model(folder).forward_dense(ids), expected, rtol=0, atol=TOLERANCE)


def test_config_of_transformers_4_loads_the_same(hf_folder: Callable) -> None:
    """rope_theta and rope_scaling at the top level, ``type`` for ``rope_type``, torch_dtype."""
    _, folder = hf_folder("LlamaConfig", rope_parameters=LLAMA3_ROPE, head_dim=32)
    expected = load_model(folder).config
    fields = json.loads((folder / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields.pop("dtype")
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = {**rope, "type": rope.pop("rope_type")}
    (folder / "config.json").write_text(json.dumps(fields))
    assert load_model(folder).config == expected


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_follows_transformers(
    hf_folder: Callable, bare_cache: Callable, each_backend: str, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    theirs, folder = hf_folder("Qwen3Config", head_dim=16)
    model = load_model(folder, dtype=name)
    assert model.dtype == dtype
    ids = _ids(30)
    with torch.no_grad():
        expected = theirs.to(dtype)(ids.unsqueeze(0)).logits[0].float()
        dense = model.forward_dense(ids)
    assert float((dense - expected).abs().mean()) < 0.05 * float(expected.abs().mean())
    cache = bare_cache(model.config, dtype=dtype)
    paged = model.logits(model.forward_paged(ids, cache.append({0: 30}), cache))
    assert float((paged - expected).abs().mean()) < 0.05 * float(expected.abs().mean())
    save_model(model, tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).dtype == dtype
    assert all(
        torch.equal(a, b) for a, b in zip(load_model(tmp_path, name).parameters(), model.parameters(), strict=True)
    )
