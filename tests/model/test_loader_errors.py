"""Model folders that are incomplete, damaged or not what they say: one clear sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sagc_fast.errors import ConfigError, ModelLoadError
from sagc_fast.model.loader import load_config, load_model, load_tokenizer, random_model, save_model
from sagc_fast.rollout.engine import RolloutEngine


@pytest.fixture
def folder(tiny_model: Callable, tmp_path: Path) -> Path:
    """A sound folder to spoil."""
    save_model(tiny_model("llama", vocab_size=60, eos_token_ids=(2,)), tmp_path / "model")
    return tmp_path / "model"


def _edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def _edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _error(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert str(folder) in message
    return message


def test_no_folder(tmp_path: Path) -> None:
    assert "is not there; check the path" in _error(tmp_path / "nowhere")


def test_no_folder_has_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere is not there; check the path"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("load", [load_model, load_config, load_tokenizer, RolloutEngine.from_pretrained])
@pytest.mark.parametrize("folder", [None, "", 3])
def test_what_is_no_path(load: Callable, folder: object) -> None:
    with pytest.raises(ModelLoadError, match=f"The model folder is {folder!r}; give the path"):
        load(folder)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "has no config.json" in _error(tmp_path)


@pytest.mark.parametrize("text", ["{not json", "[1, 2]", ""])
def test_config_that_is_not_a_json_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in _error(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in _error(folder)


def test_pickled_weights_name_the_remedy(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "convert them to safetensors" in _error(folder)


def test_missing_tensors_are_named(folder: Path) -> None:
    _edit_weights(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    assert "lacks tensor model.layers.1.mlp.up_proj.weight" in _error(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    _edit_config(folder, num_hidden_layers=4)
    assert "and 14 more" in _error(folder)


def test_extra_tensors_are_named(folder: Path) -> None:
    _edit_weights(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}))
    assert "holds tensor model.layers.0.self_attn.q_proj.bias, which a llama model" in _error(folder)


def test_wrong_shape_names_both(folder: Path) -> None:
    _edit_config(folder, intermediate_size=50)
    message = _error(folder)
    assert "has shape [48, 32] but config.json asks for [50, 32]" in message


def test_integer_weights_are_refused(folder: Path) -> None:
    _edit_weights(folder, lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}))
    assert "model.norm.weight" in (message := _error(folder))
    assert "stored as I8" in message


@pytest.mark.parametrize("keep", [0, 5, 400, -100])
def test_truncated_file(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "damaged or truncated" in _error(folder)


def test_missing_shard(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names model-00001-of-00001.safetensors, which is not there" in _error(folder)


def test_unknown_dtype(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype 'int4' is unknown; use one of fp32, bf16, fp16"):
        load_model(folder, dtype="int4")


def test_harmless_extras_of_old_and_tied_models_load(tiny_model: Callable, tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    save_model(model, tmp_path)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.zeros(258, 32)}
    _edit_weights(tmp_path, lambda t: t.update(more))
    assert torch.equal(load_model(tmp_path).lm_head_weight, model.embed_weight)


def test_end_tokens_of_the_generation_file_are_added(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_config(folder).eos_token_ids == (2, 7)


def test_random_models_repeat_by_seed(tiny_config: Callable) -> None:
    first, same, other = (random_model(tiny_config(), seed=s) for s in (3, 3, 4))
    assert torch.equal(first.embed_weight, same.embed_weight)
    assert not torch.equal(first.embed_weight, other.embed_weight)
    assert all(bool(p.isfinite().all()) for p in first.parameters())


class TestTokenizer:
    @pytest.fixture
    def with_tokenizer(self, folder: Path) -> Path:
        from tokenizers import Tokenizer, models, pre_tokenizers

        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", "a", "b", "c"])}, "<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
        fields = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))
        return folder

    def test_loads_and_travels_with_a_saved_model(
        self, with_tokenizer: Path, tmp_path: Path, tiny_model: Callable
    ) -> None:
        tokenizer = load_tokenizer(with_tokenizer)
        assert tokenizer.encode("a c b") == [1, 3, 2]
        save_model(load_model(with_tokenizer), tmp_path / "copied", source=with_tokenizer)
        save_model(load_model(with_tokenizer), tmp_path / "saved", tokenizer=tokenizer)
        for name in ("copied", "saved"):
            assert load_tokenizer(tmp_path / name).encode("a c b") == [1, 3, 2]

    def test_folder_without_tokenizer(self, folder: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"has no tokenizer .*copy the tokenizer files"):
            load_tokenizer(folder)

    def test_damaged_tokenizer(self, with_tokenizer: Path) -> None:
        (with_tokenizer / "tokenizer.json").write_text('{"model"')
        with pytest.raises(ModelLoadError, match="does not load"):
            load_tokenizer(with_tokenizer)

    def test_more_tokens_than_embeddings(self, with_tokenizer: Path) -> None:
        _edit_config(with_tokenizer, vocab_size=3, eos_token_id=2)
        with pytest.raises(ModelLoadError, match="has 4 tokens but the model only 3 embeddings"):
            load_tokenizer(with_tokenizer)
