"""fp32 on the CPU: the bits of a token's logits depend on its own sequence alone, however it is served."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sagc_fast.model.loader import random_model

FAMILIES = {"llama": {}, "qwen2": {"has_qkv_bias": True}, "qwen3": {"head_dim": 6}}
HYPOTHESIS = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
pytestmark = pytest.mark.usefixtures("num_threads", "each_backend")


@pytest.fixture(scope="module", params=FAMILIES.items(), ids=FAMILIES.keys())
def model(request: pytest.FixtureRequest, tiny_config: Callable):
    family, fields = request.param
    return random_model(tiny_config(family, **fields), seed=1)


def _sequences(count: int, longest: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(258, (n,), generator=generator) for n in lengths]


def _step(model, cache, tokens: dict) -> dict:
    """Append tokens to the named sequences in one step; logits of every one of them, by name."""
    layout = cache.append({name: len(ids) for name, ids in tokens.items()})
    logits = model.logits(model.forward_paged(torch.cat(list(tokens.values())), layout, cache))
    return dict(zip(tokens, logits.split([len(ids) for ids in tokens.values()]), strict=True))


def _whole(model, cache_class, ids: torch.Tensor) -> torch.Tensor:
    return _step(model, cache_class(model.config, seed=9), {0: ids})[0]


@HYPOTHESIS
@given(st.integers(1, 90), st.data())
def test_any_chunking_of_a_prompt_equals_one_prefill(
    model, bare_cache: Callable, length: int, data: st.DataObject
) -> None:
    ids = (torch.arange(length) * 29 + length) % 258
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=5)) | {length})
    cache, parts, at = bare_cache(model.config), [], 0
    for cut in cuts:
        parts.append(_step(model, cache, {"x": ids[at:cut]})["x"])
        at = cut
    assert torch.equal(torch.cat(parts), _whole(model, bare_cache, ids))


def test_decode_token_by_token_equals_prefill(model, bare_cache: Callable) -> None:
    ids = (torch.arange(70) * 11) % 258
    cache = bare_cache(model.config)
    rows = [_step(model, cache, {0: ids[i : i + 1]})[0] for i in range(len(ids))]
    assert torch.equal(torch.cat(rows), _whole(model, bare_cache, ids))


@HYPOTHESIS
@given(st.integers(1, 30), st.integers(0, 10**6))
def test_batch_composition_and_order_do_not_matter(model, bare_cache: Callable, count: int, seed: int) -> None:
    """Prefills and decodes of other sequences in the same step, in any order, leave a sequence's bits alone."""
    sequences = _sequences(count, 40, seed)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    cache = bare_cache(model.config, num_blocks=count * 4, seed=seed)
    first = _step(model, cache, {i: sequences[i][: (len(sequences[i]) + 1) // 2] for i in order})
    rest = {i: sequences[i][(len(sequences[i]) + 1) // 2 :] for i in reversed(order) if len(sequences[i]) > 1}
    second = _step(model, cache, rest) if rest else {}
    for i, ids in enumerate(sequences):
        together = torch.cat([first[i], second[i]]) if i in second else first[i]
        assert torch.equal(together, _whole(model, bare_cache, ids))


def test_preempted_and_recomputed_sequence_goes_on_with_the_same_bits(model, bare_cache: Callable) -> None:
    ids = (torch.arange(60) * 31) % 258
    cache = bare_cache(model.config)
    _step(model, cache, {"x": ids[:25], "y": ids[5:9]})
    for i in range(25, 40):
        _step(model, cache, {"x": ids[i : i + 1]})
    cache.drop("x")
    _step(model, cache, {"z": ids[:33]})  # takes the freed blocks and overwrites them
    recomputed = _step(model, cache, {"y": ids[9:10], "x": ids[:40]})["x"]
    rest = [_step(model, cache, {"z": ids[33 + i : 34 + i], "x": ids[40 + i : 41 + i]})["x"] for i in range(20)]
    assert torch.equal(torch.cat([recomputed, *rest]), _whole(model, bare_cache, ids))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 15, 16, 17, 33, 70])
def test_head_and_selected_rows_keep_their_bits(model, bare_cache: Callable, rows: int) -> None:
    """Only the wanted rows go through the last layer's feed-forward and the head: any choice gives the same bits."""
    ids = (torch.arange(70) * 17) % 258
    expected = _whole(model, bare_cache, ids)
    picked = torch.randperm(70, generator=torch.Generator().manual_seed(rows))[:rows]
    cache = bare_cache(model.config)
    layout = cache.append({0: 70})
    layout = type(layout)(**{**layout.__dict__, "logits_rows_R": picked})
    assert torch.equal(model.logits(model.forward_paged(ids, layout, cache)), expected[picked])


def test_a_step_that_wants_no_row_still_writes_the_cache(model, bare_cache: Callable) -> None:
    ids = (torch.arange(50) * 13) % 258
    cache = bare_cache(model.config)
    layout = cache.append({0: 30})
    layout = type(layout)(**{**layout.__dict__, "logits_rows_R": torch.zeros(0, dtype=torch.int64)})
    hidden = model.forward_paged(ids[:30], layout, cache)
    assert model.logits(hidden).shape == (0, 258)
    assert torch.equal(_step(model, cache, {0: ids[30:]})[0], _whole(model, bare_cache, ids)[30:])
