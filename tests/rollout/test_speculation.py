"""Drafting changes no bit, saves steps where text repeats, and keeps its hands off where it does not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from sagc_fast.errors import ConfigError
from sagc_fast.rollout import speculation, step_cost
from sagc_fast.rollout.drafts import HitRates
from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.rollout.speculation import Drafts, chances_of_last, num_accepted, values, worthwhile
from sagc_fast.types import SamplingParams

pytestmark = pytest.mark.usefixtures("tiny_models_draft")


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """The stand-ins have steps of microseconds, in which drafts would not pay for the host's work."""
    monkeypatch.setattr(step_cost, "DRAFT_SECONDS", 1e-9)
    monkeypatch.setattr(step_cost, "DRAFT_SECONDS_PER_ROW", 0.0)


# ---- which drafts count ----------------------------------------------------------------------------------------------

rows_of_drafts = st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5), max_size=6)


def drafts_of(rows):
    """A row is a list of (drafted, drawn) pairs."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return Drafts(lengths, np.array([drafted for row in rows for drafted, _ in row], dtype=np.int64))


@given(rows=rows_of_drafts)
def test_drafts_count_up_to_the_first_that_was_not_drawn(rows):
    drawn = [token for row in rows for token in (*(drawn for _, drawn in row), 7)]
    hits = [next((i for i, (a, b) in enumerate(row) if a != b), len(row)) for row in rows]
    assert num_accepted(drafts_of(rows), np.array(drawn, dtype=np.int64)).tolist() == hits


@given(rows=rows_of_drafts, most=st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_cutting_keeps_the_first_of_every_row(rows, most):
    cut = drafts_of(rows).cut(np.array(most[: len(rows)], dtype=np.int64))
    expected = drafts_of([row[:limit] for row, limit in zip(rows, most, strict=False)])
    assert (cut.lengths.tolist(), cut.tokens.tolist()) == (expected.lengths.tolist(), expected.tokens.tolist())


# ---- how many are drafted --------------------------------------------------------------------------------------------


def rates_of(probability):
    rates = HitRates()
    rates.trials = [1_000_000] * len(rates.trials)
    rates.hits = [round(1_000_000 * probability)] * len(rates.hits)
    return rates


def drafted(match_lengths, rates, fixed_tokens, most=100, budget=1000):
    lengths = np.array(match_lengths)
    return worthwhile(lengths, np.full(lengths.size, most), budget, rates, fixed_tokens).tolist()


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.6, 0.9, 0.97])
@pytest.mark.parametrize(("num_rows", "fixed_tokens"), [(1, 12), (4, 12), (10, 12), (3, 60), (30, 60)])
def test_the_draft_length_is_the_one_with_the_cheapest_tokens(monkeypatch, probability, num_rows, fixed_tokens):
    monkeypatch.setattr(speculation, "MARGIN", 1.0)

    def cost_per_token(drafted):
        accepted = sum(probability**i for i in range(1, drafted + 1))
        return np.hypot(fixed_tokens, num_rows * (1 + drafted)) / (num_rows * (1 + accepted))

    best = min(range(speculation.MOST_DRAFTED + 1), key=cost_per_token)
    chosen = drafted([8] * num_rows, rates_of(probability), fixed_tokens)
    assert len(set(chosen)) == 1
    assert cost_per_token(chosen[0]) == pytest.approx(cost_per_token(best), rel=1e-2)


@given(
    rates=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=7, max_size=7),
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3),
    fixed_tokens=st.floats(0.5, 40),
    budget=st.integers(0, 12),
    luck=st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3),
    last=st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3),
)
@example([(0, 0)] * 7, [(1, 3), (1, 3), (1, 1)], 17.0, 6, [1.0] * 3, [1.0] * 3)  # equal chances, not all fit
def test_no_other_choice_of_drafts_is_worth_more(rates, rows, fixed_tokens, budget, luck, last):
    """Against every choice of up to 6 drafts a row, each a prefix; and none at all where they cost more than they are
    worth."""
    hits = HitRates()
    hits.hits, hits.trials = [a for a, _ in rates], [a + b for a, b in rates]
    matches = np.array([match for match, _ in rows])
    most = np.array([min(limit, 6) for _, limit in rows])
    luck, last = np.array(luck[: len(rows)]), np.array(last[: len(rows)])
    last /= last.sum()
    worth_of_row = values(last, fixed_tokens).tolist()
    step = np.hypot(fixed_tokens, len(rows))
    assert sum(worth_of_row) == pytest.approx(step)

    def worth(lengths):
        gain = 0.0
        for row, (match, length) in enumerate(zip(matches.tolist(), lengths, strict=True)):
            chance = 1.0
            for place in range(length):
                level = min((match + place).bit_length(), 6)
                chance *= (hits.hits[level] + 1) / (hits.trials[level] + 2) * luck[row]
                gain += chance * worth_of_row[row]
        return (step + gain) / np.hypot(fixed_tokens, len(rows) + sum(lengths))

    chosen = worthwhile(matches, most, budget, hits, fixed_tokens, luck=luck, last_chances=last).tolist()
    assert sum(chosen) <= budget
    assert not sum(chosen) or worth(chosen) > speculation.MARGIN * 0.999
    assert all(n <= limit and (n == 0 or match) for n, limit, match in zip(chosen, most, matches, strict=True))
    allowed = [range(limit + 1 if match else 1) for limit, match in zip(most.tolist(), matches, strict=True)]
    best = max(worth(c) for c in itertools.product(*allowed) if sum(c) <= budget)
    assert worth(chosen) >= best / speculation.MARGIN * 0.99


def test_drafts_grow_with_acceptance_and_with_the_step_s_own_cost_and_shrink_with_rows():
    lengths = [drafted([4] * 4, rates_of(p), 12)[0] for p in (0.01, 0.5, 0.8, 0.95)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0 < lengths[1] < lengths[-1]
    assert drafted([4] * 2, rates_of(0.8), 12)[0] > drafted([4] * 8, rates_of(0.8), 12)[0]
    assert drafted([4] * 4, rates_of(0.8), 60)[0] > drafted([4] * 4, rates_of(0.8), 12)[0]


def test_small_models_look_at_fewer_rows_and_none_where_the_host_would_do_all_the_work(monkeypatch):
    monkeypatch.setattr(step_cost, "DRAFT_SECONDS", 200e-6)
    monkeypatch.setattr(step_cost, "DRAFT_SECONDS_PER_ROW", 15e-6)
    assert speculation.most_rows(45, 330e-6) == 9
    assert speculation.most_rows(12, 2.4e-3) == 12
    assert speculation.most_rows(45, 100e-6) == 0


@pytest.mark.parametrize(("has_bursts", "first", "longest"), [(False, 1, 1), (True, 6, 16)])
def test_a_look_in_vain_costs_a_hundredth_of_its_steps_the_burst_it_cuts_short_included(
    monkeypatch, has_bursts, first, longest
):
    """One row of an 8M-parameter Llama on random text was a quarter slower with drafts on: every look ended a burst."""
    monkeypatch.setattr(step_cost, "PLAN_SECONDS", 290e-6)
    speculator = speculation.Speculator(None, speculation.Speculation("fixed", 9.4, 1.9e-3, has_bursts=has_bursts))
    speculator._plan_pause(1, is_drafting=False)
    assert speculator.num_quiet_steps(1) == first  # three hundredths of the steps up to the second look
    for _ in range(8):
        speculator._plan_pause(1, is_drafting=False)
    assert speculator.num_quiet_steps(1) == longest


def test_looks_are_spaced_by_what_steps_take_on_this_machine(monkeypatch):
    """A first estimate of twice the time made looks twice as dear as they were meant to be."""
    monkeypatch.setattr(step_cost, "PLAN_SECONDS", 1e-3)

    def pause(mode, seconds):
        settings = speculation.Speculation(mode, 20, 1e-3, has_bursts=True)
        settings.cost.observe(1, seconds)
        speculator = speculation.Speculator(None, settings)
        speculator._plan_pause(1, is_drafting=False)
        return speculator.num_quiet_steps(1)

    assert pause("auto", 0.5e-3) == pytest.approx(2 * pause("auto", 1e-3), rel=0.05)
    assert pause("fixed", 0.5e-3) == pause("fixed", 4e-3)  # no clock has a say


def test_behind_drafts_the_next_look_comes_soon(monkeypatch):
    monkeypatch.setattr(step_cost, "PLAN_SECONDS", 1e-3)
    speculator = speculation.Speculator(None, speculation.Speculation("fixed", 20, 1e-3, has_bursts=True))
    speculator._plan_pause(1, is_drafting=False)
    before = speculator.num_quiet_steps(1)
    speculator._plan_pause(1, is_drafting=True)
    assert speculator.num_quiet_steps(1) == 0
    speculator._plan_pause(1, is_drafting=False)
    assert 0 < speculator.num_quiet_steps(1) < before / 4


def test_rows_that_can_be_foreseen_get_the_drafts():
    rates = HitRates()
    rates.trials = [1000] * len(rates.trials)
    rates.hits = [0, 100, 200, 300, 900, 950, 990]
    lengths = drafted([40, 2, 0, 9], rates, 16)
    assert lengths[0] > lengths[3] > lengths[1] >= lengths[2] == 0
    assert sum(drafted([40, 2, 0, 9], rates, 16, budget=5)) == 5
    assert max(drafted([40, 2, 0, 9], rates, 16, most=3)) == 3


# ---- which row is the last -------------------------------------------------------------------------------------------


@given(
    rows=st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), min_size=1, max_size=6),
    end_rate=st.floats(0, 0.05),
)
def test_one_row_is_the_last(rows, end_rate):
    num_left, foreseen = (np.array(column) for column in zip(*rows, strict=True))
    chances = chances_of_last(num_left, foreseen, end_rate)
    assert chances.min() >= 0
    assert chances.sum() == pytest.approx(1)
    for a, b in itertools.permutations(range(len(rows)), 2):  # the same text, further from the cap
        if num_left[a] == num_left[b] and foreseen[a] < foreseen[b]:
            assert chances[a] >= chances[b] - 1e-9


def test_the_chances_are_those_of_rows_that_end_by_themselves_or_at_their_caps(monkeypatch):
    """Against drawing which rows reach their caps; the slowest of those is the last, of none any."""
    monkeypatch.setattr(speculation, "SPREAD", 1e-3)
    rng = np.random.default_rng(0)
    for num_rows in (1, 2, 5):
        num_left, foreseen = rng.integers(20, 400, num_rows), rng.random(num_rows)
        times = num_left / (1 + foreseen)
        is_there = rng.random((20_000, num_rows)) < np.exp(-0.005 * num_left)
        last = np.argmax(np.where(is_there, times, -1.0), axis=1)
        some = is_there.any(axis=1)
        expected = np.bincount(last[some], minlength=num_rows) / some.size + (1 - some.mean()) / num_rows
        assert chances_of_last(num_left, foreseen, 0.005) == pytest.approx(expected, abs=0.015)


def test_rows_alike_are_worth_the_same_and_a_single_one_a_whole_step():
    alike = chances_of_last(np.full(5, 100), np.full(5, 0.4), 0.01)
    assert alike == pytest.approx(0.2)
    assert values(alike, 12.0) == pytest.approx(np.hypot(12, 5) / 5)
    assert values(chances_of_last(np.array([3]), np.array([0.1]), 0.1), 12.0) == pytest.approx(np.hypot(12, 1))


def test_nothing_is_drafted_for_rows_that_wait_for_one_that_nothing_foresees():
    """All go to their caps; one is never foreseen. As long as any may be the last, the others get drafts; and one that
    is behind gets them whatever the others do."""
    matches, rates = [0, 8, 8, 8], rates_of(0.5)
    most, end_rate = np.full(4, 100), 1e-4
    arguments = np.array(matches), most, 1000, rates, 10.0, 0.0, None
    assert sum(worthwhile(*arguments)) >= 3
    foreseen = np.array([0.0, 0.5, 0.5, 0.5])
    assert not worthwhile(*arguments, chances_of_last(most, foreseen, end_rate)).any()
    often = chances_of_last(most, foreseen, 0.05)  # they end by themselves long before
    assert worthwhile(*arguments, often).sum() >= 3
    behind = chances_of_last(np.array([100, 200, 100, 100]), foreseen, end_rate)
    lengths = worthwhile(*arguments, behind)
    assert lengths[1] > 0
    assert lengths.sum() == lengths[1]


def test_a_text_foreseen_more_rarely_than_others_gets_fewer_drafts():
    arguments = np.full(3, 8), np.full(3, 100), 1000, rates_of(0.8), 12.0, 0.0
    lengths = worthwhile(*arguments, np.array([1.0, 0.6, 0.1]))
    assert lengths[0] > lengths[1] > lengths[2] == 0


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
