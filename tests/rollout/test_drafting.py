"""Drafting in whole calls changes no bit, saves steps where text repeats, and keeps its hands off where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sagc_fast.errors import ConfigError
from sagc_fast.rollout import speculation, step_cost
from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.types import SamplingParams

pytestmark = pytest.mark.usefixtures("tiny_models_draft")


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """The stand-ins have steps of microseconds, in which drafts would not pay for the host's work."""
    monkeypatch.setattr(step_cost, "DRAFT_SECONDS", 1e-9)
    monkeypatch.setattr(step_cost, "DRAFT_SECONDS_PER_ROW", 0.0)


# ---- losslessness with real models -----------------------------------------------------------------------------------

PROMPTS = [[5, 6, 7], list(range(40, 77)), [9, 10] * 8, [250, 1, 30, 4]]
STOPS = [(), (), ("a",), ("bc", "\x11"), ("\n\n",)]


@pytest.fixture(scope="module")
def model(tiny_model):
    """Weights large enough for peaked distributions, which fall into loops."""
    model = tiny_model("qwen3", seed=3)
    with torch.no_grad():
        model.final_norm.mul_(6.0)
    return model


@st.composite
def requests(draw):
    def one():
        return SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.5])),
            max_new_tokens=draw(st.integers(1, 30)),
            seed=draw(st.integers(0, 3)),
            stop=draw(st.sampled_from(STOPS)),
            stop_token_ids=draw(st.sampled_from([(), (17,), (3, 99)])),
            ignore_eos=draw(st.booleans()),
            top_k=draw(st.sampled_from([0, 0, 4])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.7])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        )

    chosen = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
    return {
        "prompts": [PROMPTS[i] for i in chosen],
        "prompt_ids": chosen,
        "params": [[one() for _ in range(draw(st.integers(1, 4)))] for _ in chosen],
        "num_blocks": draw(st.sampled_from([9, 12, 20, 200])),  # the longest sequence alone needs 9
        "settings": {
            "block_size": 8,
            "max_num_seqs": draw(st.integers(1, 12)),
            "max_batch_tokens": draw(st.sampled_from([7, 40, 500])),
            "threads": draw(st.sampled_from([1, 2])),
            "speculation": draw(st.sampled_from(["fixed", "fixed", "auto"])),
        },
    }


@given(case=requests())
@settings(
    max_examples=12,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_tokens_and_logprobs_are_those_of_one_sequence_at_a_time(
    case, model, helpers, engine_with_blocks, byte_tokenizer
):
    sizes = [len(params) for params in case["params"]]
    call = {"params": case["params"], "prompt_ids": case["prompt_ids"]}
    alone = RolloutEngine(model, byte_tokenizer, max_num_seqs=1, speculation="off")
    expected = alone.generate(case["prompts"], sizes, **call)
    engine = engine_with_blocks(model, case["num_blocks"], tokenizer=byte_tokenizer, **case["settings"])
    groups = engine.generate(case["prompts"], sizes, **call)
    assert helpers.outcome(groups) == helpers.outcome(expected)
    assert [c.text for g in groups for c in g.completions] == [c.text for g in expected for c in g.completions]


def test_these_models_do_draft_and_accept(model, helpers):
    """Or the test above would show nothing."""
    params = SamplingParams(max_new_tokens=120, ignore_eos=True, temperature=0.7)
    engine = RolloutEngine(model, speculation="fixed")
    groups = engine.generate(PROMPTS, 1, params)
    stats = engine.stats
    assert stats.num_accepted_tokens > 100
    assert stats.num_steps_saved > 10
    assert sum(stats.active_rows) == stats.num_output_tokens - stats.num_accepted_tokens
    plain = RolloutEngine(model, speculation="off")
    assert helpers.outcome(groups) == helpers.outcome(plain.generate(PROMPTS, 1, params))
    assert (plain.stats.num_steps, plain.stats.num_draft_tokens, plain.stats.num_steps_saved) == (120, 0, 0.0)
    assert stats.num_steps + stats.num_steps_saved == 120


def test_a_third_of_the_memory_changes_nothing(model, helpers, engine_with_blocks):
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=0.7)
    roomy = RolloutEngine(model, block_size=8, speculation="off")
    expected = helpers.outcome(roomy.generate(PROMPTS, 6, params))
    tight = engine_with_blocks(model, roomy.stats.kv_blocks_peak // 3, block_size=8, speculation="fixed")
    assert helpers.outcome(tight.generate(PROMPTS, 6, params)) == expected
    assert tight.stats.num_preemptions > 0
    assert tight.stats.num_accepted_tokens > 0
    assert tight.stats.kv_blocks_peak <= roomy.stats.kv_blocks_peak // 3


# ---- ends inside a run of accepted drafts ----------------------------------------------------------------------------


class Reciting:
    """Greedy decoding recites one text over and over, a byte a token; the row's position says where it is."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, config, text):
        self.config = config
        self.script = list(text.encode())
        self.num_tokens = 0

    def forward_paged(self, token_ids_T, layout, kv):
        self.num_tokens += len(token_ids_T)
        return layout.positions_T[layout.logits_rows_R, None].float()

    def logits(self, hidden_RE):
        logits = torch.zeros(len(hidden_RE), self.config.vocab_size)
        for row, position in zip(logits, hidden_RE[:, 0].long().tolist(), strict=True):
            row[self.script[position % len(self.script)]] = 50.0
        return logits


@pytest.mark.parametrize("end", [{"stop": ["fgh ab"]}, {"stop_token_ids": [ord("k")]}, {"max_new_tokens": 61}, {}])
def test_an_end_cuts_an_accepted_run_where_it_falls(tiny_config, byte_tokenizer, end):
    """The text repeats after 20 bytes; the first end comes late, when whole runs are being accepted."""
    text = (
        "abcde fgh abcde fgx " * 3 + "abcde fgh abk" if "stop_token_ids" in end else "abcde fgx " * 5 + "abcde fgh ab"
    )
    params = SamplingParams(**{"temperature": 0, "max_new_tokens": 100, **end})
    outcomes = []
    for mode in ("off", "fixed"):
        model = Reciting(tiny_config(), text)
        engine = RolloutEngine(model, byte_tokenizer, speculation=mode)
        completions = engine.generate(["x", "yz"], [2, 1], params)
        outcomes.append(
            [(c.token_ids, c.logprobs, c.text, c.finish_reason) for g in completions for c in g.completions]
        )
        stats = engine.stats
        num_rejected = stats.num_draft_tokens - stats.num_accepted_tokens
        assert model.num_tokens == stats.num_prefill_tokens + stats.num_output_tokens - 3 + num_rejected
        assert sum(stats.active_rows) + stats.num_accepted_tokens == stats.num_output_tokens
    assert outcomes[0] == outcomes[1]
    assert stats.num_accepted_tokens > 20
    assert stats.num_steps < 60


# ---- when it drafts --------------------------------------------------------------------------------------------------


def test_text_without_a_pattern_is_hardly_ever_drafted(helpers):
    engine = RolloutEngine(helpers.Model(), speculation="fixed")
    engine.generate([[1] * 8, [2] * 9], 12, SamplingParams(max_new_tokens=100, ignore_eos=True))
    assert engine.stats.num_draft_tokens < 0.02 * engine.stats.num_output_tokens


def test_off_means_off_and_fixed_is_the_same_every_time(helpers):
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    stats = []
    for mode in ("fixed", "fixed", "off"):
        engine = RolloutEngine(helpers.Model(memory=1, sharpness=8.0), speculation=mode)
        for _ in range(2):
            engine.generate([[1, 2], [3]], 6, params)
        stats.append(engine.stats)
    assert stats[0].num_accepted_tokens > 0
    assert stats[0].active_rows == stats[1].active_rows
    assert stats[0].num_draft_tokens == stats[1].num_draft_tokens
    assert stats[2].num_draft_tokens == 0


def test_recalled_completions_are_drafted_from_and_change_nothing(helpers):
    """One completion of a prompt has no siblings; the last call's completion of the same prompt stands in for them."""
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=0.3)
    prompts = [[4, 4, 8], [15, 16]]
    outcomes, accepted = [], []
    for recall in (0, 1):
        engine = RolloutEngine(helpers.Model(), speculation="fixed", draft_recall_mb=recall)
        engine.generate(prompts, 1, params)
        outcomes.append(helpers.outcome(engine.generate(prompts, 1, params)))
        accepted.append(engine.stats.num_accepted_tokens)
    assert outcomes[0] == outcomes[1]
    assert accepted[1] > accepted[0] + 60


def test_drafts_take_no_block_from_anybody(helpers, engine_with_blocks):
    """With room for hardly more than one sequence, drafts use what is free, and nothing more is preempted for them."""
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    model = helpers.Model(memory=1, sharpness=8.0)
    expected = [helpers.sample_alone(model, [3] * 10, 0, sample, params) for sample in range(3)]
    num_preemptions = []
    for mode in ("off", "fixed"):
        engine = engine_with_blocks(model, 18, block_size=4, speculation=mode)
        assert helpers.outcome(engine.generate([[3] * 10], 3, params)) == [expected]
        num_preemptions.append(engine.stats.num_preemptions)
    assert engine.stats.num_accepted_tokens > 0
    assert num_preemptions[1] <= num_preemptions[0] > 0


@pytest.mark.parametrize("ends", [{"max_new_tokens": 80, "ignore_eos": True}, {"max_new_tokens": 100}])
def test_steps_saved_are_those_that_a_call_without_drafts_has_more(helpers, ends):
    """Whatever ended the rows, as long as none waits for another."""
    model, params = helpers.Model(memory=1, sharpness=5.0), SamplingParams(seed=5, **ends)
    drafting, plain = (RolloutEngine(model, speculation=mode) for mode in ("fixed", "off"))
    for engine in (drafting, plain):
        engine.generate([[3, 4], [5] * 7, [8, 9, 1]], [2, 3, 3], params)
    stats = drafting.stats
    assert stats.num_accepted_tokens > 0
    assert stats.num_steps + stats.num_steps_saved == plain.stats.num_steps
    assert 0 < stats.num_steps_saved <= stats.num_accepted_tokens
    cost = drafting._speculation.cost
    without, with_drafts = (sum(map(cost.seconds, s.active_rows)) for s in (plain.stats, stats))
    assert without - with_drafts > stats.draft_gain_seconds > 0


@pytest.mark.parametrize(("num_rows", "lengths"), [(2, [80] * 8), (3, [60, 50, 40, 90, 10, 20])])
def test_steps_saved_are_exact_too_where_rows_are_waited_for(helpers, num_rows, lengths):
    """As long as completions start in the same order. Every accepted token had counted as half a step of two rows, or
    a third of three, also where only the row that was over first could let another begin."""
    model = helpers.Model(memory=1, sharpness=8.0)
    params = [[SamplingParams(max_new_tokens=length, ignore_eos=True) for length in lengths]]
    drafting, plain = (RolloutEngine(model, max_num_seqs=num_rows, speculation=mode) for mode in ("fixed", "off"))
    for engine in (drafting, plain):
        engine.generate([[3, 4]], len(lengths), params)
    stats = drafting.stats
    assert stats.num_accepted_tokens > 10
    assert stats.num_steps + stats.num_steps_saved == plain.stats.num_steps


def test_who_comes_last_is_asked_only_while_nobody_waits(helpers, monkeypatch):
    num_waiting = []

    def spy(speculator, slots, cursors):
        num_waiting.append(speculator._rows.sequences[slots[0]].group.num_waiting)
        return original(speculator, slots, cursors)

    original = speculation.Speculator._last_chances
    monkeypatch.setattr(speculation.Speculator, "_last_chances", spy)
    engine = RolloutEngine(helpers.Model(memory=1, sharpness=8.0), max_num_seqs=2, speculation="fixed")
    engine.generate([[3, 4]], 8, SamplingParams(max_new_tokens=80, ignore_eos=True))
    assert num_waiting
    assert not any(num_waiting)


def test_records_of_two_calls_add_up(helpers):
    from sagc_fast.train.accounting import merge_stats

    engine = RolloutEngine(helpers.Model(memory=1, sharpness=8.0), speculation="fixed")
    parts = []
    for seed in (1, 2):
        engine.generate([[3, 4]], 2, SamplingParams(max_new_tokens=40, seed=seed, ignore_eos=True))
        parts.append(engine.stats)
    both = merge_stats(parts)
    for name in ("num_draft_tokens", "num_accepted_tokens", "num_steps_saved", "draft_gain_seconds"):
        assert getattr(both, name) == sum(getattr(part, name) for part in parts) != 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculation": True}, "speculation is True; it must be one of auto, fixed, off"),
        ({"draft_recall_mb": -1}, "draft_recall_mb is -1; it must be a number of megabytes"),
        ({"draft_recall_mb": float("nan")}, "draft_recall_mb is nan"),
    ],
)
def test_bad_settings_are_refused(helpers, settings, message):
    with pytest.raises(ConfigError, match=message):
        RolloutEngine(helpers.Model(), **settings)


def test_greedy_siblings_are_drafted_from_each_other(helpers):
    """Equal texts run in step; what the others have already written is enough."""
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=0)
    engine = RolloutEngine(helpers.Model(), max_num_seqs=2, speculation="fixed")
    groups = engine.generate([[7, 8]], 6, params)
    assert engine.stats.num_accepted_tokens > 60
    plain = RolloutEngine(helpers.Model(), speculation="off")
    assert helpers.outcome(groups) == helpers.outcome(plain.generate([[7, 8]], 6, replace(params)))
