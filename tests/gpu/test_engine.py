"""The engine on a GPU: the CPU's greedy tokens, the same bits twice, with graphs or without, weights in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sagc_fast import RolloutEngine, SamplingParams, ops

pytestmark = pytest.mark.gpu

PROMPTS = [list(range(40)), [5, 6, 7], [11] * 17, [9, 2, 4, 4]]
SIZES = [5, 3, 1, 4]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, seed=5)


def _drawn(engine: RolloutEngine, params: SamplingParams, **options: Any) -> list[tuple[list[int], list[float]]]:
    groups = engine.generate(PROMPTS, SIZES, params, **options)
    return [(c.token_ids, c.logprobs) for group in groups for c in group.completions]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_are_those_of_the_cpu(family: str, tiny_model, device: torch.device) -> None:
    with ops.use_backend("torch"):
        wanted = _drawn(RolloutEngine(tiny_model(family), kv_budget_gb=0.01), GREEDY)
    found = _drawn(RolloutEngine(tiny_model(family).to(device), kv_budget_gb=0.01), GREEDY)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_call_twice_gives_the_same_bits(dtype: str, tiny_model, device: torch.device) -> None:
    engine = RolloutEngine(tiny_model("qwen2", dtype=dtype).to(device), kv_budget_gb=0.01)
    first = _drawn(engine, SAMPLED)
    engine.release()
    assert _drawn(engine, SAMPLED) == first


def test_little_memory_changes_no_greedy_token(tiny_model, device: torch.device) -> None:
    model = tiny_model("llama").to(device)
    roomy, tight = (RolloutEngine(model, kv_budget_gb=gb, speculation="off") for gb in (0.01, 0.00005))
    assert [t for t, _ in _drawn(tight, GREEDY)] == [t for t, _ in _drawn(roomy, GREEDY)]
    assert tight.stats.num_preemptions > 0


def test_logits_that_are_not_finite_end_the_call(tiny_model, device: torch.device) -> None:
    model = tiny_model("llama").to(device)
    with torch.no_grad():
        model.final_norm.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="not finite"):
        _drawn(RolloutEngine(model, kv_budget_gb=0.01), SAMPLED)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_graphs_change_no_bit(dtype: str, tiny_model, device: torch.device) -> None:
    model = tiny_model("llama", dtype=dtype).to(device)
    on, off = (RolloutEngine(model, kv_budget_gb=0.01, speculation="off", graphs=graphs) for graphs in ("auto", "off"))
    assert _drawn(on, SAMPLED) == _drawn(off, SAMPLED)
    if device.type == "cuda":
        assert on._graphs.refusal is None
        assert on.stats.num_graph_replays > 0
        assert off.stats.num_graph_replays == 0


def test_weights_changed_in_place_are_the_ones_used(tiny_model, device: torch.device) -> None:
    """Between calls of one engine, as the optimizer changes them; a captured graph must read the new ones."""
    model = tiny_model("llama").to(device)
    engine = RolloutEngine(model, kv_budget_gb=0.01)
    before = _drawn(engine, SAMPLED)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, device=device))
    engine.reset()
    after = _drawn(engine, SAMPLED)
    assert after != before
    assert after == _drawn(RolloutEngine(model, kv_budget_gb=0.01), SAMPLED)
