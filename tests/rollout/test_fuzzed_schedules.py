"""Real (tiny) models under fuzzed schedules against one sequence at a time, bit for bit (fp32 on the CPU).

The reference below shares no scheduler, no batch, no burst, no draft, no cache and no random numbers with the engine: a
plain loop of the model's operator-by-operator forward over one sequence, with a generator written once more in Python.
``SAGC_FUZZ_EXAMPLES=5000 pytest tests/rollout/test_fuzzed_schedules.py`` runs longer than the suite does.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sagc_fast import SamplingParams, ops
from sagc_fast.ops.backend import native_module, use_backend
from sagc_fast.ops.layouts import PagedLayout
from sagc_fast.rollout import step_cost
from sagc_fast.rollout.kv_cache import DTYPES

pytestmark = pytest.mark.usefixtures("tiny_models_draft")

EXAMPLES = int(os.environ.get("SAGC_FUZZ_EXAMPLES", "9"))
CONTEXT, VOCAB, EOS = 48, 90, 7
MODELS = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 6, "num_kv_heads": 4},
    "wide": {"family": "llama", "vocab_size": 24_000, "hidden_size": 64, "num_layers": 1},  # work for two threads
}
BACKENDS = ["native", "torch"] if native_module() is not None else ["torch"]


# ---- the reference -----------------------------------------------------------------------------------------------


class OwnCache:
    """Keys and values of one sequence: blocks 0, 1, 2, ... of 64 tokens, filled with NaN."""

    def __init__(self, config, length, dtype):
        shape = (-(-length // 64), config.num_kv_heads, 64, config.head_dim)
        self._layers = [[torch.full(shape, float("nan"), dtype=dtype) for _ in "kv"] for _ in range(config.num_layers)]

    def k(self, layer):
        return self._layers[layer][0]

    def v(self, layer):
        return self._layers[layer][1]


def uniform(seed, prompt_id, sample_index, position):
    """Philox4x32-10 on Python's integers: 53 bits of its first two words."""
    a, b, c, d = prompt_id & 0xFFFFFFFF, prompt_id >> 32, sample_index, position
    low, high = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            (second >> 32) ^ b ^ low,
            second & 0xFFFFFFFF,
            (first >> 32) ^ d ^ high,
            first & 0xFFFFFFFF,
        )
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return (((a >> 5) << 26) | (b >> 6)) * 2.0**-53


def layout_of(start, count):
    """``count`` tokens of one sequence behind ``start`` that are in the cache; the last one's output is wanted."""
    positions = torch.arange(start, start + count)
    return PagedLayout(
        positions_T=positions,
        cu_query_S1=torch.tensor([0, count], dtype=torch.int32),
        context_lens_S=torch.tensor([start + count], dtype=torch.int32),
        block_tables_SB=torch.arange(-(-(start + count) // 64), dtype=torch.int32)[None],
        slots_T=positions,
        logits_rows_R=torch.tensor([count - 1]),
        share_group_S=torch.tensor([-1], dtype=torch.int32),
        shared_blocks_S=torch.tensor([0], dtype=torch.int32),
        max_query_len=count,
        max_context_len=start + count,
    )


def one_at_a_time(model, tokenizer, prompt, prompt_id, sample_index, params, kv_dtype):
    """Tokens, log-probs, finish reason and text of one completion."""
    cache = OwnCache(model.config, CONTEXT, DTYPES[kv_dtype])
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    room = min(params.max_new_tokens, CONTEXT - len(prompt))
    tokens, logprobs, text, new, start = [], [], "", list(prompt), 0
    while True:
        logits = model.logits(model.forward_paged(torch.tensor(new), layout_of(start, len(new)), cache))
        noise = torch.tensor([uniform(params.seed, prompt_id, sample_index, len(tokens))], dtype=torch.float64)
        columns = [noise, torch.tensor([params.temperature])]
        if params.is_filtered and params.temperature > 0:
            columns += [torch.tensor([params.top_k]), torch.tensor([params.top_p]), torch.tensor([params.min_p])]
        token, logprob = ops.sample_tokens(logits, *columns)
        start += len(new)
        new = [int(token)]
        tokens += new
        logprobs.append(float(logprob))
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        found = [text.find(stop) for stop in params.stop if stop in text]
        if found or tokens[-1] in ends:
            return tokens, logprobs, "stop", text[: min(found)] if found else text
        if len(tokens) == room:
            return tokens, logprobs, "length", text


# ---- what is fuzzed ----------------------------------------------------------------------------------------------

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.0, 1.8]),
    max_new_tokens=st.one_of(st.integers(1, 6), st.integers(1, 40)),
    seed=st.sampled_from([0, 1, 2**64 - 1]),
    stop=st.sampled_from([(), (), ("0", "A"), ("12", "%"), ("é", "  ")]),
    stop_token_ids=st.sampled_from([(), (3,), tuple(range(20, 40))]),
    ignore_eos=st.booleans(),
    top_k=st.sampled_from([0, 0, 0, 5]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
)


@st.composite
def calls(draw):
    prompts = draw(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=CONTEXT - 1), min_size=1, max_size=4))
    params = [draw(st.lists(params_strategy, min_size=1, max_size=6)) for _ in prompts]
    if draw(st.booleans()):  # rows that need nothing of the host: bursts
        params = [[replace(p, stop=(), top_k=0, top_p=1.0, min_p=0.0) for p in group] for group in params]
    block_size = draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    lengths = [(len(p), one.max_new_tokens) for p, group in zip(prompts, params, strict=True) for one in group]
    largest = max(math.ceil((min(length + new, CONTEXT) - 1) / block_size) for length, new in lengths)
    total = sum(math.ceil((length + new) / block_size) for length, new in lengths)
    return {
        "prompts": prompts,
        "params": params,
        "num_blocks": max(largest, draw(st.sampled_from([largest, total // 3, total // 2, 2 * total]))),
        "engine": {
            "block_size": block_size,
            "max_num_seqs": draw(st.integers(1, 16)),
            "max_batch_tokens": draw(st.one_of(st.integers(1, 12), st.integers(16, 200))),
            "kv_dtype": draw(st.sampled_from(["fp32", "fp32", "bf16", "fp16"])),
            "threads": draw(st.sampled_from([1, 2])),
            "speculation": draw(st.sampled_from(["fixed", "fixed", "auto", "off"])),
            "draft_recall_mb": draw(st.sampled_from([0, 1])),
        },
        "earlier": draw(st.sampled_from(["no call", "same prompts, older weights", "a call that was broken off"])),
    }


class BrokenOffError(Exception):
    """Raised by ``on_group``."""


def break_off(group):
    raise BrokenOffError


def run(case, model, tokenizer, engine_with_blocks):
    """The engine's groups and statistics; an earlier call of the same engine must leave no trace in them."""
    engine = engine_with_blocks(model, case["num_blocks"], tokenizer=tokenizer, **case["engine"])
    ids, sizes = [2**40 + index for index in range(len(case["prompts"]))], [len(p) for p in case["params"]]
    arguments = (case["prompts"], sizes, case["params"])
    if case["earlier"] == "same prompts, older weights":
        with torch.no_grad():
            model.embed_weight.mul_(2.0)
            engine.generate(*arguments, prompt_ids=ids)
            model.embed_weight.mul_(0.5)
        engine.reset()
    elif case["earlier"] == "a call that was broken off":
        with pytest.raises(BrokenOffError):
            engine.generate(*arguments, prompt_ids=ids, on_group=break_off)
    return ids, engine.generate(*arguments, prompt_ids=ids), engine.stats


@pytest.fixture(scope="module", params=MODELS)
def model(request, tiny_model):
    fields = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "eos_token_ids": (EOS,)} | MODELS[request.param]
    return tiny_model(fields.pop("family", request.param), seed=5, **fields)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_schedule_equals_one_sequence_at_a_time(backend, model, byte_tokenizer, engine_with_blocks, monkeypatch):
    monkeypatch.setattr(step_cost, "DRAFT_SECONDS", 1e-9)  # models whose steps take microseconds draft nothing else
    monkeypatch.setattr(step_cost, "DRAFT_SECONDS_PER_ROW", 0.0)
    seen = dict.fromkeys(("num_preemptions", "num_recomputed_tokens", "num_draft_tokens", "num_accepted_tokens"), 0)

    @settings(
        max_examples=max(1, EXAMPLES // (3 if backend == "torch" or model.config.vocab_size > VOCAB else 1)),
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=calls())
    def check(case):
        ids, groups, stats = run(case, model, byte_tokenizer, engine_with_blocks)
        for prompt, prompt_id, params, group in zip(case["prompts"], ids, case["params"], groups, strict=True):
            for sample, (one, found) in enumerate(zip(params, group.completions, strict=True)):
                expected = one_at_a_time(
                    model, byte_tokenizer, prompt, prompt_id, sample, one, case["engine"]["kv_dtype"]
                )
                assert (found.token_ids, found.logprobs, found.finish_reason, found.text) == expected
        for name in seen:
            seen[name] += getattr(stats, name)

    with use_backend(backend):
        check()
    assert all(seen.values()) or EXAMPLES < 50, f"the schedules were too tame: {seen}"
