"""The native decoder against the path operator by operator: the same bits, in every family, whatever the step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sagc_fast import ops
from sagc_fast.model.loader import load_model
from sagc_fast.ops.backend import native_module, use_backend

pytestmark = pytest.mark.skipif(native_module() is None, reason="sagc_fast._C is not built")

FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama-long-sums": ("LlamaConfig", {"intermediate_size": 600}),
    "llama-tied-biases": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2-biases": ("Qwen2Config", {}),
    "qwen3-head-norms": ("Qwen3Config", {"head_dim": 20, "num_key_value_heads": 1}),
}
# Names of sequences and how many tokens each brings; the rows of the step whose output is wanted.
STEPS = (
    ({"a": 70, "b": 3}, []),
    ({"a": 1, "b": 40, "c": 9}, [0, 40, 49]),
    ({"a": 1, "c": 1, "b": 1}, [0, 1, 2]),
    ({"b": 1}, [0]),
    ({"a": 4, "b": 1, "d": 290}, [3, 4, 4, 0, 294]),  # more rows than one slice; in any order, with repeats
)


@pytest.fixture(scope="module")
def folders(hf_folder: Callable[..., tuple[Any, Path]]) -> dict[str, Path]:
    return {
        name: hf_folder(kind, max_position_embeddings=512, **fields)[1] for name, (kind, fields) in FAMILIES.items()
    }


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_as_operator_by_operator(
    folders: dict[str, Path], bare_cache: Any, num_threads: int, family: str, dtype: str, cache_dtype: torch.dtype
) -> None:
    model = load_model(folders[family], dtype=dtype)
    one, other = (bare_cache(model.config, seed=3, dtype=cache_dtype) for _ in "12")
    generator = torch.Generator().manual_seed(1)
    with use_backend("native"):
        decoder = model.decoder(one)
        for step, wanted in STEPS:
            ids = torch.randint(model.config.vocab_size, (sum(step.values()),), generator=generator)
            layouts = [replace(cache.append(step), logits_rows_R=torch.tensor(wanted).long()) for cache in (one, other)]
            hidden = decoder.forward(ids, layouts[0], *model.rope(layouts[0].max_context_len))
            assert torch.equal(hidden, model.forward_paged(ids, layouts[1], other))
            for layer in range(model.config.num_layers):
                assert torch.equal(one.k(layer).nan_to_num(), other.k(layer).nan_to_num())
                assert torch.equal(one.v(layer).nan_to_num(), other.v(layer).nan_to_num())
            if wanted:
                index = torch.arange(len(wanted)).repeat_interleave(torch.arange(1, len(wanted) + 1))
                uniform = torch.rand(len(index), dtype=torch.float64, generator=generator)
                temperature = torch.tensor([0.0, 0.7, 1.0])[torch.arange(len(index)) % 3]
                drawn = decoder.sample(hidden, index, uniform, temperature)
                expected = ops.sample_tokens(model.logits(hidden)[index], uniform, temperature)
                assert all(torch.equal(*pair) for pair in zip(drawn, expected, strict=True))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_next_decoder_sees_updates_in_place(folders: dict[str, Path], bare_cache: Any, dtype: str) -> None:
    model = load_model(folders["qwen2-biases"], dtype=dtype)
    cache = bare_cache(model.config, dtype=model.dtype)
    layout, ids = cache.append({"a": 5}), torch.arange(5)
    before = model.decoder(cache).forward(ids, layout, *model.rope(5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = model.decoder(cache).forward(ids, layout, *model.rope(5))
    assert not torch.equal(before, after)
    assert torch.equal(after, model.forward_paged(ids, layout, cache))


def test_an_instruction_set_chosen_later_gives_its_own_bits(folders: dict[str, Path], bare_cache: Any) -> None:
    """Weights that were laid out for one are read as they are by another."""
    native = native_module()
    assert native is not None
    model, chosen = load_model(folders["llama"], dtype="bf16"), native.cpu_level()
    cache = bare_cache(model.config, dtype=model.dtype)
    decoder, layout, ids = model.decoder(cache), cache.append({"a": 70}), torch.arange(70)
    try:
        for level in native.cpu_levels():
            native.set_cpu_level(level)
            hidden = decoder.forward(ids, layout, *model.rope(70))
            assert torch.equal(hidden, model.forward_paged(ids, layout, cache)), level
    finally:
        native.set_cpu_level(chosen)


def test_bad_steps_are_errors(folders: dict[str, Path], bare_cache: Any) -> None:
    model = load_model(folders["llama"])
    cache = bare_cache(model.config)
    decoder, layout = model.decoder(cache), cache.append({"a": 5})
    angles = model.rope(5)
    for ids, change, message in (
        (torch.tensor([0, 1, 97, 3, 4]), {}, "token id 2 is 97"),
        (torch.arange(5), {"logits_rows_R": torch.tensor([5])}, "wanted row 0 is 5"),
        (torch.arange(5), {"block_tables_SB": layout.block_tables_SB + 40}, "names block"),
        (torch.arange(4), {"logits_rows_R": torch.tensor([0])}, "cu_query must run"),
    ):
        with pytest.raises(RuntimeError, match=message):
            decoder.forward(ids, replace(layout, **change), *angles)
    with pytest.raises(RuntimeError, match="5 positions, the tables of angles 4"):
        decoder.forward(torch.arange(5), layout, *(table[:4] for table in angles))
    hidden = decoder.forward(torch.arange(5), layout, *angles)
    with pytest.raises(RuntimeError, match="must not fall"):
        decoder.sample(hidden, torch.tensor([1, 0]), torch.zeros(2, dtype=torch.float64), torch.ones(2))
    hidden[1] = float("nan")
    with pytest.raises(RuntimeError, match="not finite in 1 of 2 rows"):
        decoder.sample(hidden, torch.tensor([0, 1]), torch.zeros(2, dtype=torch.float64), torch.ones(2))


def test_a_decoder_is_freed_with_its_object(folders: dict[str, Path], bare_cache: Any) -> None:
    model = load_model(folders["llama"])
    cache = bare_cache(model.config)
    decoder = model.decoder(cache)
    handle = decoder._handle
    del decoder
    gc.collect()
    with pytest.raises(RuntimeError, match=f"no decoder {handle}"):
        native_module().decoder_sample(handle, *(torch.zeros(1, 1),) * 4)


def test_plain_torch_and_half_precision_models_have_none(folders: dict[str, Path], bare_cache: Any) -> None:
    model = load_model(folders["llama"])
    assert model.decoder(bare_cache(model.config)) is not None
    half = load_model(folders["llama"], dtype="fp16")
    assert half.decoder(bare_cache(model.config, dtype=torch.float16)) is None
    with use_backend("torch"):
        assert model.decoder(bare_cache(model.config)) is None
