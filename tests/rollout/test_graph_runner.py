"""Bursts of graph replays draw the tokens of single steps, to the bit, on a device that only pretends to be one.

What is compared is the engine on the CPU with the runner of a GPU and without: fp32, the same operators.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sagc_fast import RolloutEngine, SamplingParams, ops
from sagc_fast.errors import ConfigError, KVBudgetError
from sagc_fast.rollout import graph_runner
from sagc_fast.rollout.decode_graphs import DecodeGraphs, bucket_of
from sagc_fast.rollout.engine import BYTES_PER_GB
from sagc_fast.rollout.row_buffers import Packed
from sagc_fast.rollout.stand_in_device import GraphRuleError, StandInDevice

PROMPTS = [list(range(18)), [5, 6, 7], list(range(40, 70))]
ENDS = tuple(range(100, 108))


@pytest.fixture(autouse=True)
def _plain_operators():
    """Plain torch, so that the tests are the same with and without a C++ compiler."""
    with ops.use_backend("torch"):
        yield


@pytest.fixture
def engine_of(tiny_model):
    """``engine_of(device, model)``: an engine that runs its bursts on ``device``; None: step by step."""

    def make(device=None, model=None, **settings):
        engine = RolloutEngine(model or tiny_model(num_layers=1), kv_budget_gb=0.01, **{"block_size": 4} | settings)
        engine._graphs = None if device is None else DecodeGraphs(device, settings.get("graphs", "auto"))
        return engine

    return make


def results(engine, prompts=PROMPTS, group_size=4, params=None, **arguments):
    params = params or SamplingParams(max_new_tokens=30, seed=3, stop_token_ids=ENDS)
    groups = engine.generate(prompts, group_size, params, **arguments)
    return [[(c.token_ids, c.logprobs, c.finish_reason, c.text) for c in group.completions] for group in groups]


def launched(engine):
    """Buckets and steps of each burst from now on."""
    bursts, launch = [], engine._graphs.launch

    def spy(bucket, has_filters, num_steps):
        bursts.append((bucket, num_steps))
        launch(bucket, has_filters, num_steps)

    engine._graphs.launch = spy
    return bursts


# ---- the same tokens -------------------------------------------------------------------------------------------------


@st.composite
def schedules(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    prompts = [draw(st.lists(st.integers(0, 250), min_size=1, max_size=20)) for _ in sizes]

    def params():
        return SamplingParams(
            temperature=draw(st.sampled_from([1.0, 0.0, 0.7])),
            max_new_tokens=draw(st.integers(1, 40)),
            seed=draw(st.integers(0, 2**64 - 1)),
            stop_token_ids=draw(st.sampled_from([(), ENDS, (7,)])),
            stop=draw(st.sampled_from([(), (), ("a", "bc")])),
            top_k=draw(st.sampled_from([0, 0, 20])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.9])),
        )

    return {
        "prompts": prompts,
        "group_size": sizes,
        "params": [[params() for _ in range(size)] for size in sizes],
        "prompt_ids": draw(st.permutations([2**64 - 1, 5, 9]))[: len(sizes)],
    }, {
        "max_num_seqs": draw(st.integers(1, 12)),
        "max_batch_tokens": draw(st.integers(12, 40)),
        "block_size": draw(st.sampled_from([4, 16])),
        "speculation": draw(st.sampled_from(["fixed", "off"])),
    }


@pytest.fixture(scope="module")
def kept():
    """Engines whose graphs serve one example after another, as they do call after call."""
    return {}


@settings(
    max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(schedule=schedules(), lag=st.sampled_from(["late", "early"]), is_tight=st.booleans())
def test_random_schedules(schedule, lag, is_tight, tiny_model, byte_tokenizer, kept):
    call, options = schedule
    model = kept.setdefault("model", tiny_model(num_layers=1))
    outcomes = []
    for is_burst in (False, True):
        engine = RolloutEngine(model, byte_tokenizer, **options)
        if is_tight:  # room for little more than the longest completion: rows are sent back
            blocks = -(-65 // options["block_size"]) + 3
            engine.kv_budget_gb = (blocks + 0.5) * engine.bytes_per_block() / BYTES_PER_GB
        if is_burst:
            engine._graphs = DecodeGraphs(StandInDevice(lag))
        outcomes.append(results(engine, **call))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("family", "lag"), [("llama", "early"), ("qwen2", "late"), ("qwen3", "late")])
def test_families_and_lags(engine_of, tiny_model, family, lag):
    model = tiny_model(family)
    assert results(engine_of(StandInDevice(lag), model)) == results(engine_of(None, model))


@pytest.mark.skipif(ops.backend.native_module() is None, reason="the native operators are not built")
def test_native_operators(engine_of):
    with ops.use_backend("native"):
        assert results(engine_of(StandInDevice())) == results(engine_of())


def test_completions_do_not_depend_on_the_other_rows(engine_of):
    together = results(engine_of(StandInDevice()))
    alone = results(engine_of(StandInDevice()), PROMPTS[1:2], group_size=1, prompt_ids=[1])
    assert alone[0][0] == together[1][0]


def test_rows_with_filters_and_stop_strings_go_step_by_step_through_a_graph(engine_of, byte_tokenizer):
    params = [
        SamplingParams(max_new_tokens=12, seed=1, top_p=0.9, min_p=0.01),
        SamplingParams(max_new_tokens=12, seed=1, temperature=0.0, top_k=3),
        SamplingParams(max_new_tokens=12, seed=1, stop=["e", "zz"]),
    ]
    engine = engine_of(StandInDevice(), tokenizer=byte_tokenizer)
    plain = engine_of(tokenizer=byte_tokenizer)
    bursts = launched(engine)
    assert results(engine, params=params, group_size=2) == results(plain, params=params, group_size=2)
    assert {num_steps for _, num_steps in bursts} <= {1, *range(4, 33)}
    assert (8, True) in engine._graphs.buckets


# ---- buckets, bursts, looks ------------------------------------------------------------------------------------------


def test_buckets():
    assert sorted({bucket_of(n) for n in range(1, 513)}) == [
        1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512,
    ]  # fmt: skip
    assert all(n <= bucket_of(n) and (n <= 8 or bucket_of(n) <= 1.6 * n + 7) for n in range(1, 1000))


def test_one_graph_per_bucket_and_rows_move_to_smaller_ones(engine_of):
    engine = engine_of(StandInDevice(), speculation="off")
    bursts = launched(engine)
    params = [[SamplingParams(max_new_tokens=4 + 7 * i, ignore_eos=True) for i in range(4)] for _ in range(3)]
    results(engine, params=params)
    buckets = [bucket for bucket, _ in bursts]
    assert buckets == sorted(buckets, reverse=True)
    assert set(buckets) == {16, 8, 4}
    assert engine._graphs.buckets == [(4, False), (8, False), (16, False)]
    assert engine.stats.num_graph_captures == 3
    results(engine, params=params)
    assert engine.stats.num_graph_captures == 0


def test_the_host_looks_once_per_burst(engine_of):
    engine = engine_of(StandInDevice(), speculation="off")
    params = SamplingParams(max_new_tokens=110, ignore_eos=True)
    results(engine, [[1, 2, 3]], 4, params)
    stats = engine.stats
    assert stats.num_steps == 110
    assert stats.num_device_waits <= 109 / graph_runner.MOST_STEPS + 3
    assert stats.num_graph_replays == 109  # the first token comes with the prompt; everything under way was taken up
    assert stats.num_wasted_row_steps == 0


def test_the_next_burst_is_under_way_while_the_host_books_the_last(engine_of, monkeypatch):
    """At every look but the last one, steps behind those looked at are queued already."""
    queued = []
    read = graph_runner.GraphRunner._read

    def spy(self, chain, places, plan):
        result = read(self, chain, places, plan)
        queued.append(result.num_ahead)
        return result

    monkeypatch.setattr(graph_runner.GraphRunner, "_read", spy)
    results(
        engine_of(StandInDevice(), speculation="off"), [[1]], 2, SamplingParams(max_new_tokens=110, ignore_eos=True)
    )
    assert len(queued) >= 3
    assert all(n > 0 for n in queued[:-1])
    assert queued[-1] == 0


def test_bursts_are_short_while_somebody_waits_and_where_completions_are_short(engine_of):
    def longest(**settings):
        engine = engine_of(StandInDevice(), speculation="off", **settings)
        bursts = launched(engine)
        results(engine, [[1], [2]], 2, SamplingParams(max_new_tokens=40, ignore_eos=True))
        return max(num_steps for _, num_steps in bursts)

    assert longest() == graph_runner.MOST_STEPS
    assert longest(max_num_seqs=3) > graph_runner.MOST_AWAITED_STEPS  # at the end nobody waits
    engine = engine_of(StandInDevice(), speculation="off", max_num_seqs=2)
    bursts = launched(engine)
    results(engine, [[1], [2]], 3, SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert max(num_steps for _, num_steps in bursts[:4]) <= graph_runner.MOST_AWAITED_STEPS


def test_rows_that_are_over_are_counted_as_wasted(engine_of):
    engine = engine_of(StandInDevice(), speculation="off")
    bursts = launched(engine)
    outcome = results(engine)
    computed = sum(bucket * num_steps for bucket, num_steps in bursts)
    drawn_in_bursts = sum(len(tokens) - 1 for group in outcome for tokens, *_ in group)
    assert engine.stats.num_wasted_row_steps == computed - drawn_in_bursts > 0
    assert sum(engine.stats.active_rows) == engine.stats.num_output_tokens


def test_idle_time_of_the_device_is_the_time_between_its_work(engine_of):
    engine = engine_of(StandInDevice("early"))
    results(engine)
    assert 0 < engine.stats.device_idle_seconds < engine.stats.total_seconds


# ---- memory ----------------------------------------------------------------------------------------------------------


class Spoiler(StandInDevice):
    """Puts NaN into the scratch block before every replay."""

    kv = None

    def replay(self, graph):
        self._compute.put(lambda: self.kv().memory[:, :, self.kv().scratch_block].fill_(float("nan")))
        super().replay(graph)


def test_the_scratch_block_reaches_no_live_row(engine_of):
    device = Spoiler()
    engine = engine_of(device)
    device.kv = lambda: engine._kv
    assert results(engine) == results(engine_of())
    assert torch.isfinite(engine._kv.memory[:, :, : engine._kv.num_blocks]).all()


def test_rows_that_are_over_write_to_the_scratch_block_alone(engine_of):
    """A row's blocks may belong to another one as soon as the host knows; the device goes on for a while."""
    device = StandInDevice()
    engine = engine_of(device, speculation="off")
    slots = []
    launch = engine._graphs.launch

    def spy(bucket, has_filters, num_steps):
        for _ in range(num_steps):
            launch(bucket, has_filters, 1)
            rows = engine._graphs.buffers.rows(bucket)
            device.wait(device.record())
            recorded = rows.drawn_KR.gather(0, ((rows.step_R - 1) % len(rows.drawn_KR)).unsqueeze(0)).squeeze(0)
            slots.append((rows.slot_R.clone(), recorded.clone()))

    engine._graphs.launch = spy
    results(engine)
    scratch = engine._kv.scratch_slot
    for slot, recorded in slots:
        assert torch.equal(slot == scratch, recorded == -1)
        live = slot[slot != scratch]
        assert len(live.unique()) == len(live)
    assert any((recorded == -1).any() for _, recorded in slots)


def test_an_optimizer_step_in_place_is_seen_without_a_capture(engine_of, tiny_model):
    engine, other = engine_of(StandInDevice()), tiny_model(seed=9, num_layers=1)
    params = SamplingParams(max_new_tokens=15, ignore_eos=True)
    results(engine, params=params)
    with torch.no_grad():
        for ours, theirs in zip(engine.model.parameters(), other.parameters(), strict=True):
            ours.copy_(theirs)
    engine.reset()
    assert results(engine, params=params) == results(engine_of(None, other), params=params)
    assert engine.stats.num_graph_captures == 0
    assert engine.stats.num_graph_replays > 0


def test_weights_that_moved_are_captured_anew(engine_of, tiny_model):
    engine = engine_of(StandInDevice())
    before = results(engine)
    weight = engine.model.layers[0].down_weight
    weight.data = weight.data.clone()
    assert results(engine) == before
    assert engine.stats.num_graph_captures > 0
    weight.data = weight.data * 2
    model = tiny_model(num_layers=1)
    model.layers[0].down_weight.data.mul_(2)
    assert results(engine) == results(engine_of(None, model))


def test_release_drops_graphs_and_the_next_call_captures(engine_of):
    engine = engine_of(StandInDevice())
    before = results(engine)
    engine.release()
    assert engine._graphs.buckets == []
    assert engine._graphs.buffers is None
    assert results(engine) == before
    assert engine.stats.num_graph_captures > 0


def test_a_graph_shares_its_memory_with_one_that_is_held_and_the_first_with_none(engine_of, monkeypatch):
    """torch refuses the memory pool of graphs that are gone; after a release no capture may name one."""
    engine, given = engine_of(StandInDevice()), []
    capture = StandInDevice.capture

    def spy(self, step, reads, writes, beside=None):
        given.append(beside is None or any(beside is graph for graph in engine._graphs._graphs.values()))
        first.append(beside is None)
        return capture(self, step, reads, writes, beside)

    monkeypatch.setattr(StandInDevice, "capture", spy)
    lengths = [[SamplingParams(max_new_tokens=2 + 9 * i, ignore_eos=True) for i in range(4)] for _ in PROMPTS]
    for _ in range(2):
        first = []
        results(engine, params=lengths)
        assert len(first) > 1
        assert first == [True] + [False] * (len(first) - 1)
        engine.release()
    assert all(given)


def test_longer_contexts_and_more_rows_take_larger_buffers_once(engine_of):
    engine = engine_of(StandInDevice(), block_size=4)
    small = SamplingParams(max_new_tokens=8, ignore_eos=True)
    large = SamplingParams(max_new_tokens=50, ignore_eos=True, stop_token_ids=list(range(20)))
    for params, group_size in ((small, 2), (large, 5)):
        assert results(engine, PROMPTS, group_size, params) == results(
            engine_of(block_size=4), PROMPTS, group_size, params
        )
    captures = engine.stats.num_graph_captures
    assert captures > 0
    results(engine, PROMPTS, 2, small)
    results(engine, PROMPTS, 5, large)
    assert engine.stats.num_graph_captures == 0


def test_the_budget_includes_the_scratch_block(engine_of):
    engine = engine_of(StandInDevice())
    results(engine)
    assert engine._kv.num_bytes <= engine.kv_budget_gb * BYTES_PER_GB
    engine.kv_budget_gb = 4.5 * engine.bytes_per_block() / BYTES_PER_GB
    with pytest.raises(KVBudgetError, match="set kv_budget_gb to at least"):
        results(engine, [[1] * 40], 1, SamplingParams(max_new_tokens=24))


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_call_that_is_broken_off_leaves_the_engine_usable(engine_of):
    engine = engine_of(StandInDevice())

    def stop(group):
        raise KeyError("enough")

    with pytest.raises(KeyError):
        results(engine, on_group=stop)
    assert results(engine) == results(engine_of())


def test_logits_that_are_not_finite_end_the_call_with_a_sentence(engine_of):
    engine = engine_of(StandInDevice())
    before = results(engine)
    plan_run = graph_runner.GraphRunner._run_eagerly
    weight = engine.model.final_norm

    def spoil(self, plan):
        result = plan_run(self, plan)
        weight.data[0] = float("nan")  # behind the prompt's own check
        return result

    value = weight.data[0].item()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_runner.GraphRunner, "_run_eagerly", spoil)
        with pytest.raises(RuntimeError, match="logits are not finite: its weight final_norm holds NaN"):
            results(engine)
    weight.data[0] = value
    assert results(engine) == before


class Refusing(StandInDevice):
    def capture(self, step, reads, writes, beside=None):
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_step_that_cannot_be_captured_runs_operator_by_operator_and_says_so(engine_of):
    engine = engine_of(Refusing())
    with pytest.warns(RuntimeWarning, match="cannot be captured .* not permitted when stream is capturing"):
        assert results(engine) == results(engine_of())
    assert "not permitted" in engine._graphs.refusal
    assert engine.stats.num_graph_replays == 0


def test_graphs_can_be_switched_off(engine_of):
    engine = engine_of(StandInDevice(), graphs="off")
    assert results(engine) == results(engine_of())
    assert engine.stats.num_graph_captures == engine.stats.num_graph_replays == 0
    assert engine.stats.num_device_waits > 0  # bursts, all the same


def test_another_mode_of_graphs_is_an_error(engine_of):
    with pytest.raises(ConfigError, match="graphs is 'on'; it must be one of auto, off"):
        engine_of(graphs="on")


def test_a_step_that_looks_at_a_value_is_found_out(engine_of, monkeypatch):
    place_rows = ops.place_rows
    monkeypatch.setattr(ops, "place_rows", lambda rows, *args: (int(rows.position_R.max()), place_rows(rows, *args)))
    with pytest.raises(GraphRuleError, match="captured step"):
        results(engine_of(StandInDevice()))


def test_a_number_of_the_host_in_the_step_gives_wrong_tokens(engine_of, monkeypatch):
    """The step's record must come from the device: a host counter would be frozen by the capture, and is seen to be."""
    plain = results(engine_of())
    advance_rows, count = ops.advance_rows, iter(range(10**6))

    def with_host_counter(rows, token_R, logprob_R):
        rows.step_R.fill_(next(count) % len(rows.drawn_KR))
        advance_rows(rows, token_R, logprob_R)

    monkeypatch.setattr(ops, "advance_rows", with_host_counter)
    assert results(engine_of(StandInDevice("early"))) != plain


def test_arrays_that_the_host_reads_are_its_own(engine_of):
    """Draws handed out must not change when the next burst is copied to the same buffers."""
    engine = engine_of(StandInDevice())
    read, kept = graph_runner.GraphRunner._read, []

    def spy(self, chain, places, plan):
        result = read(self, chain, places, plan)
        kept.append((result, result.tokens.copy(), result.logprobs.copy()))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_runner.GraphRunner, "_read", spy)
        results(engine)
    for result, tokens, logprobs in kept:
        assert np.array_equal(result.tokens, tokens)
        assert np.array_equal(result.logprobs, logprobs)


def test_an_upload_under_way_keeps_its_contents_while_the_next_is_written():
    """With one host buffer, a burst of the last chain that is still queued would find the block tables of the next."""
    device = StandInDevice("late")
    packed = Packed(device, {"a": ((3,), torch.int64), "b": ((2,), torch.float32)})
    seen = torch.zeros(3, dtype=torch.int64)
    for number in (1, 2):
        packed.write()["a"][...] = number
        packed.upload()
        device.upload(seen[number : number + 1], packed.tensors["a"][:1])
    device.wait(device.record())
    assert seen.tolist() == [0, 1, 2]
    assert packed.tensors["b"].data_ptr() % 64 == packed.memory.data_ptr() % 64
