"""The parity ladder: the bounds that docs/rollout.md states between the paths that compute a log-prob, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sagc_fast import ops
from sagc_fast.bench.parity import KV_FORMATS, kv_deviation, ladder, paged_logprobs, rounded_cache, through
from sagc_fast.ops.backend import native_module

DOCUMENT = Path(__file__).parents[2] / "docs/rollout.md"
PROMPTS = [[5, 6, 7], list(range(40, 77)), [9] * 16, [250, 1, 30, 4]]


def stated_bounds():
    """(path, dtype of the model, dtype of the cache) -> bound, from the table that begins with ``| log-probs by |``."""
    lines = iter(DOCUMENT.read_text(encoding="utf-8").splitlines())
    head = next(line for line in lines if line.startswith("| log-probs by |"))
    columns = [cell.strip() for cell in head.strip("|").split("|")[1:]]
    next(lines)
    bounds = {}
    for line in lines:
        if not line.startswith("|"):
            break
        path, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for column, cell in zip(columns, cells, strict=True):
            dtype, _, kv = column.partition(", KV ")
            bounds[path, dtype, kv or dtype] = float(cell.split()[0])
    return bounds


BOUNDS = stated_bounds()
DTYPES = sorted({key[1:] for key in BOUNDS})
BACKENDS = ["native", "torch"] if native_module() is not None else ["torch"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
def test_every_path_is_within_the_stated_bound(tiny_model, backend, family, dtype, kv_dtype):
    if backend == "torch" and dtype == "bf16":
        pytest.skip("torch's bf16 products depend on the number of rows; the table is for the native operators")
    fields = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 3, "head_dim": 16}
    with ops.use_backend(backend):
        found = ladder(tiny_model(family, seed=1, dtype=dtype, **fields), PROMPTS, kv_dtype)
    assert set(found) == {path for path, *_ in BOUNDS}
    for path, deviation in found.items():
        assert deviation <= BOUNDS[path, dtype, kv_dtype], path


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_on_the_way_is_what_a_cache_of_that_dtype_does(tiny_model, dtype):
    model, text = tiny_model("llama", seed=2), list(range(100))
    with rounded_cache(through(dtype)):
        rounded = paged_logprobs(model, text, torch.float32)
    torch.testing.assert_close(rounded, paged_logprobs(model, text, dtype), rtol=0, atol=1e-5)
    assert not torch.equal(rounded, paged_logprobs(model, text, torch.float32))


def test_formats_are_ordered_as_their_bits(tiny_model):
    """More bits of a number, smaller deviation; the order that the choice in the documents rests on."""
    model, text = tiny_model("llama", seed=2), list(range(200))
    mean = {name: kv_deviation(model, text, rounded)["mean"] for name, (rounded, _) in KV_FORMATS.items()}
    assert mean["fp16"] < mean["bf16"] < mean["fp8 e4m3"] < mean["fp8 e5m2"]
    assert mean["fp16"] < mean["int8, a scale per token and head"] < mean["fp8 e4m3"]
