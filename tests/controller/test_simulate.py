"""The simulator: processes have their distribution, costs are the documented sums, the command reports both."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest

from sagc_fast.cli import main
from sagc_fast.controller import SAGC, FixedG, SAGCConfig
from sagc_fast.controller.compare import HindsightMixture, _Warned, alike, compare, said_once, static_frontier
from sagc_fast.controller.config import ControllerWarning, DeltaOutOfReachWarning
from sagc_fast.controller.costs import CostModel
from sagc_fast.controller.fast import simulate_events
from sagc_fast.controller.processes import LengthProcess, Mixture, Shock, Trace, parse_process, read_trace
from sagc_fast.controller.simulate import Scenario, run_policy, straggler_probabilities, summarise
from sagc_fast.controller.suggest import suggest
from sagc_fast.errors import ConfigError, DatasetError

IDS = np.arange(400)


def write_trace(path, steps: int = 30, group_size: int = 16, sigma: float = 0.6, groups: int = 12, cap: int = 4096):
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for step in range(1, steps + 1):
            lengths = LengthProcess(sigma=sigma, cap=cap).sample(rng, 0.0, np.arange(groups), group_size).tolist()
            record = {"step": step, "group_size": group_size, "lengths": lengths, "max_new_tokens": cap}
            file.write(json.dumps(record) + "\n")
    return path


def test_processes_have_the_distribution_they_name():
    rng = np.random.default_rng(0)
    lognormal = parse_process("lognormal:median=300,sigma=0.5,cap=inf").sample(rng, 0.0, IDS, 50)
    assert np.median(lognormal) == pytest.approx(300, rel=0.03)
    assert np.log(lognormal).std() == pytest.approx(0.5, rel=0.03)
    pareto = parse_process("pareto:median=100,alpha=1.5,cap=inf").sample(rng, 0.0, IDS, 50)
    assert np.median(pareto) == pytest.approx(100, rel=0.04)
    assert (pareto > 400).mean() == pytest.approx(0.5 * 4**-1.5, rel=0.15)
    mixture = parse_process("mixture:median=100,sigma=0.1,long=2000,share=0.2").sample(rng, 0.0, IDS, 50)
    assert (mixture > 500).mean() == pytest.approx(0.2, abs=0.01)
    capped = parse_process("lognormal:median=300,sigma=0.8,cap=400").sample(rng, 0.0, IDS, 50)
    assert capped.max() == 400
    drift = parse_process("drift:median=100,to_median=400,sigma=0.2,to_sigma=0.8")
    assert np.median(drift.sample(rng, 0.5, IDS, 50)) == pytest.approx(200, rel=0.03)
    shock = Shock(sigma=0.2, to_sigma=1.0, at=0.5)
    spreads = [np.log(shock.sample(rng, progress, IDS, 50)).std() for progress in (0.49, 0.5)]
    assert spreads == pytest.approx([0.2, 1.0], rel=0.05)
    difficulty = parse_process("difficulty:num_problems=400")
    by_problem = np.log(difficulty.sample(rng, 0.0, IDS, 200)).std(axis=1)
    again = np.log(difficulty.sample(rng, 0.0, IDS, 200)).std(axis=1)
    assert np.corrcoef(by_problem, again)[0, 1] > 0.9  # a problem keeps its spread


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("gamma", "neither a trace file"),
        ("lognormal:sigm=1", "no parameter 'sigm'"),
        ("lognormal:sigma=big", "must be a number"),
        ("lognormal:sigma=-1", "sigma is -1.0; it must be a finite number > 0"),
        ("mixture:share=1.5", "share"),
        ("lognormal:median=inf", "must be a finite number > 0"),
        ("lognormal:cap=nan", "cap is nan"),
        ("difficulty:num_problems=1000000000000", "at most 10,000,000"),
    ],
)
def test_a_bad_process_is_named(spec, named):
    with pytest.raises(ConfigError, match=named):
        parse_process(spec)


def test_a_trace_replays_its_own_lengths(tmp_path):
    trace = read_trace(write_trace(tmp_path / "lengths.jsonl", steps=3))
    assert len(trace.steps) == 3
    assert trace.cap == 4096
    groups = trace.sample(np.random.default_rng(0), 0.4, np.arange(12), 4)
    for place, group in enumerate(groups):
        assert set(group) <= set(trace.steps[1][place])
    whole = trace.sample(np.random.default_rng(0), 0.0, np.arange(12), 16)
    assert sorted(whole[3]) == sorted(trace.steps[0][3])
    mixed = {"lengths": [[1, 2, 3, 4], [5, 6]], "max_new_tokens": 9}
    (tmp_path / "mixed.jsonl").write_text(json.dumps(mixed) + "\n\n")
    mixed_trace = read_trace(tmp_path / "mixed.jsonl")
    assert set(mixed_trace.sample(np.random.default_rng(0), 0.0, np.arange(9), 4).reshape(-1)) <= {1, 2, 3, 4}
    assert mixed_trace.sample(np.random.default_rng(0), 0.0, np.arange(2), 8).shape == (2, 8)


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"lengths": [[1e30]]}',
        '{"lengths": [[1000000000000]]}',
        '{"lengths": 3}',
        '{"steps": []}',
        '{"lengths": [[-1]]}',
        '{"lengths": [["a"]]}',
        "[]",
        "3",
    ],
)
def test_a_bad_trace_line_is_named(tmp_path, line):
    path = write_trace(tmp_path / "lengths.jsonl", steps=2)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DatasetError, match="line 3"):
        read_trace(path)


def test_an_empty_or_missing_trace_is_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DatasetError, match="no step"):
        read_trace(tmp_path / "empty.jsonl")
    with pytest.raises(DatasetError, match="cannot be read"):
        parse_process(str(tmp_path / "missing.jsonl"))


def test_a_folder_or_binary_trace_is_said_with_the_remedy(tmp_path):
    with pytest.raises(DatasetError, match=r"is a folder; give the file in a run's folder: .*lengths\.jsonl\.$"):
        read_trace(tmp_path)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match="is not text in UTF-8"):
        read_trace(tmp_path / "binary.jsonl")


def test_cost_model_by_hand():
    """Rows 5, 3, 4 on two slots: the 4 starts when the 3 ends, so 7 iterations; padded: max(5,3) + 4."""
    costs = CostModel(iteration_seconds=1.0, row_seconds=0.1, max_rows=2, update_token_seconds=0.01, fixed_seconds=2.0)
    lengths = np.array([5, 3, 4])
    assert costs.num_iterations(lengths) == 7
    assert costs.continuous_seconds(lengths) == pytest.approx(7 + 1.2)
    assert costs.padded_seconds(lengths) == pytest.approx(5 * 1.2 + 4 * 1.1)
    assert costs.other_seconds(12) == pytest.approx(2.12)
    assert CostModel(max_rows=8).num_iterations(lengths) == 5
    with pytest.raises(ConfigError, match="max_rows"):
        CostModel(max_rows=0)


def test_runs_account_for_what_they_do():
    scenario = Scenario(LengthProcess(sigma=0.6), steps=200, num_prompts=10)
    record = run_policy("fixed-8", FixedG(8), scenario)
    row = summarise(record, record.continuous_seconds.sum() / 2)
    truth = straggler_probabilities(scenario.process, (8,), 2.0)[0, 0]
    assert row["straggler_rate"] == pytest.approx(truth, abs=0.03)
    assert row["mean_log2_group_size"] == 3.0
    assert row["tokens_per_step"] == pytest.approx(10 * 8 * scenario.first_length(), rel=0.03)
    assert row["padded_step_seconds"] > row["step_seconds"]
    assert 85 <= row["equal_wall_clock"]["steps"] <= 115
    assert row["informative_groups_per_step"] == pytest.approx(10 * scenario.difficulties.informative_share(8))


def test_holds_spend_the_same_of_what_they_hold():
    process = LengthProcess(sigma=0.4)
    for hold, column in (("completions", None), ("tokens", "num_tokens")):
        records = [run_policy(str(size), FixedG(size), Scenario(process, steps=60, hold=hold)) for size in (4, 8, 16)]
        spent = [
            (record.num_groups * record.group_size if column is None else getattr(record, column)).mean()
            for record in records
        ]
        assert spent == pytest.approx([spent[0]] * 3, rel=0.03)


def test_same_seed_same_run_other_seed_other_run():
    process = LengthProcess(sigma=0.7)
    runs = [run_policy("sagc", SAGC(SAGCConfig(delta=0.5), 1), Scenario(process, steps=50, seed=s)) for s in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0].num_tokens, runs[1].num_tokens)
    assert (runs[0].num_tokens != runs[2].num_tokens).any()


def test_the_fast_path_agrees_with_the_run_on_lengths():
    process, config = LengthProcess(sigma=0.5), SAGCConfig(delta=0.4)
    slow = run_policy("sagc", SAGC(config), Scenario(process, steps=1500, num_prompts=16))
    table = straggler_probabilities(process, config.candidates, config.tau)
    fast = simulate_events(config, table, 1500, 16)
    assert slow.straggler_rate[200:].mean() == pytest.approx(fast.num_stragglers[200:].mean() / 16, abs=0.02)
    utilities = np.array(config.utilities)
    assert slow.log2_group_size[200:].mean() == pytest.approx(utilities[fast.arms][200:].mean(), abs=0.06)
    for bad in (np.ones((2, 2)), np.full(3, 1.5)):
        with pytest.raises(ConfigError, match="simulate_events"):
            simulate_events(config, bad, 10)


def test_the_oracle_policy_plays_its_shares_evenly():
    policy = HindsightMixture((4, 8, 16), (0.5, 0.3, 0.2))
    played = []
    for _ in range(100):
        played.append(policy.decide())
        policy.observe([])
    assert [played.count(size) for size in (4, 8, 16)] == [50, 30, 20]
    assert 4 <= played[:10].count(4) <= 6


def test_comparison_shows_fixed_sizes_beside_sagc_under_every_hold():
    scenario = Scenario(Mixture(), steps=30, num_prompts=4)
    found = compare(SAGCConfig(delta=0.5), scenario, ("fixed-4", "fixed-16", "sagc", "oracle"))
    assert list(found.rows) == ["prompts", "completions", "tokens"]
    for rows in found.rows.values():
        assert [row["policy"] for row in rows] == ["fixed-4", "fixed-16", "sagc", "oracle"]
        assert len({row["equal_wall_clock"]["seconds"] for row in rows}) == 1
    frontier = static_frontier(found.rows["prompts"])
    assert frontier[0][0] < frontier[1][0]
    assert frontier[0][1] < frontier[1][1]


def test_suggestions_tell_the_sizes_apart_and_are_kept_on_replay(tmp_path):
    trace = read_trace(write_trace(tmp_path / "lengths.jsonl", steps=60, sigma=0.7))
    found = suggest(trace, (4, 8, 16), Scenario(trace, steps=300))
    assert found.rates[16] - found.rates[4] > 0.4
    assert found.rates[4] < found.delta < found.rates[16]
    assert found.kept >= 0.85
    assert found.step_seconds < found.largest_step_seconds
    assert found.replayed_rate == pytest.approx(found.delta, abs=0.05)
    # The mean G need not be the mixture's: by the rates, other mixtures come close to the best one.
    played = sum(size * share for size, share in found.replayed_shares.items())
    assert found.replayed_group_size == pytest.approx(played, abs=0.02)
    assert found.replayed_kept == pytest.approx(found.kept, abs=0.1)
    assert found.replayed_seconds == pytest.approx(found.step_seconds, rel=0.15)
    assert found.notes == []
    small = read_trace(write_trace(tmp_path / "small.jsonl", group_size=4, cap=250))
    notes = suggest(small, (4, 8, 16), Scenario(small, steps=50)).notes
    assert any("no group larger than 4" in note for note in notes)
    assert any("length cap" in note for note in notes)
    with pytest.raises(ConfigError, match="tells the candidates apart"):
        suggest(LengthProcess(sigma=0.01), (4, 8, 16), Scenario(LengthProcess(), steps=10))


def test_a_warning_is_said_once_with_all_it_concerns():
    scenario = Scenario(LengthProcess(sigma=1.0), steps=40, num_prompts=8)
    found = compare(SAGCConfig(delta=0.01), scenario, ("fixed-4", "sagc", "ucb", "sagc-fair"))
    [note] = found.notes
    assert re.match(
        r"delta=0\.01 is out of reach: even G=4 straggles in \d+% to \d+% of its groups, so G=4 is held; .* Concerns "
        r"sagc, ucb, sagc-fair with prompts, completions and tokens held, (at step \d+|from steps \d+ to \d+ on)\.$",
        note,
    )
    [alone] = compare(SAGCConfig(delta=0.01), scenario, ("sagc",), ("prompts",)).notes
    assert re.search(r"90% interval .* Concerns sagc with prompts held, at step \d+\.$", alone)


def test_different_warnings_stay_apart():
    reach = [DeltaOutOfReachWarning(0.2, 4, rate, 0.1, 0.9) for rate in (0.3, 0.4)]
    warned = [
        _Warned("sagc", "prompts", 20, reach[0]),
        _Warned("sagc", "tokens", 30, reach[1]),
        _Warned("ucb", "tokens", 31, reach[1]),
        _Warned("ucb", "tokens", 1, ControllerWarning("numba cannot be imported.")),
    ]
    assert said_once(warned) == [
        f"{reach[0].sentence('30% to 40% of its groups')} Concerns sagc with prompts, tokens held; ucb with tokens "
        "held, from steps 20 to 31 on.",
        "numba cannot be imported. Concerns ucb with tokens held, at step 1.",
    ]


def test_equal_tokens_are_equal_completions_until_lengths_change():
    """Under a drift, tokens held are those of the first steps, with fewer and fewer prompts; completions held grow."""
    steady = Scenario(LengthProcess(), steps=20, num_prompts=5)
    assert alike(steady, ("prompts", "completions", "tokens")) == [("prompts",), ("completions", "tokens")]
    found = compare(SAGCConfig(candidates=(4, 16), delta=0.5), steady, ("sagc",))
    assert found.rows["tokens"] == found.rows["completions"] != found.rows["prompts"]
    drift = parse_process("drift:median=200,to_median=800,sigma=0.3,to_sigma=0.3")
    moving = Scenario(drift, steps=120)
    assert alike(moving, ("completions", "tokens")) == [("completions",), ("tokens",)]
    tokens, completions = (
        run_policy("fixed-8", FixedG(8), replace(moving, hold=hold)).num_tokens for hold in ("tokens", "completions")
    )
    assert completions[-20:].mean() == pytest.approx(3.6 * completions[:20].mean(), rel=0.15)
    assert tokens[-20:].mean() == pytest.approx(tokens[:20].mean(), rel=0.25)


def test_lengths_beyond_every_float_end_at_the_cap():
    for spec in ("lognormal:sigma=1e9,cap=500", "difficulty:spread_median=1e9,cap=500", "pareto:alpha=1e-9,cap=500"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lengths = parse_process(spec).sample(np.random.default_rng(0), 0.0, IDS, 8)
        assert lengths.min() >= 1, spec
        assert lengths.max() == 500, spec
    assert parse_process("lognormal:median=1e300,cap=inf").sample(np.random.default_rng(0), 0.0, IDS, 2).min() > 1e9


def test_rates_of_a_trace_count_every_recorded_step():
    """One step in forty straggles in every group: no coarser grid of moments may miss it or count it twice."""
    calm, straggling = ((10,) * 4,) * 3, ((10, 10, 10, 90),) * 3
    trace = Trace((*(calm,) * 6, straggling, *(calm,) * 33))
    comparison = compare(SAGCConfig(candidates=(3, 4)), Scenario(trace, steps=40), ("fixed-4",), ("prompts",))
    assert comparison.rates[4] == pytest.approx(1 / 40)
    assert comparison.rows["prompts"][0]["straggler_rate"] == pytest.approx(1 / 40)


def test_the_command_prints_tables_json_suggestions_and_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    options = ["--steps", "20", "--prompts", "4", "--delta", "0.4"]
    assert main(["simulate", "lognormal:sigma=0.6", *options, "--hold", "prompts", "--plot", str(picture)]) == 0
    table = capsys.readouterr().out
    for name in ("fixed-2", "fixed-16", "sagc", "prompt-aware", "cost-aware", "oracle", "ucb"):
        assert f"\n{name} " in table
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["simulate", *options, "--policies", "fixed-4,sagc", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["holds"]) == {"prompts", "completions", "tokens"}
    trace = write_trace(tmp_path / "lengths.jsonl")
    assert main(["simulate", str(trace), *options, "--policies", "fixed-8,sagc", "--hold", "tokens"]) == 0
    assert "tokens held" in capsys.readouterr().out
    assert main(["simulate", "--suggest", str(trace), "--steps", "50", "--json"]) == 0
    suggestion = json.loads(capsys.readouterr().out)
    assert main(["simulate", str(trace), "--suggest", "--steps", "50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == suggestion
    assert suggestion["tau"] > 1.0
    assert 0.0 < suggestion["delta"] < 1.0
    assert main(["simulate", "lognormal:sigma=0.5", "--delta", "0.4", "--fast", "--steps", "20000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["straggler_rate"] == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--policies", "sagk"], "sagk"),
        (["--hold", "rows"], "--hold"),
        (["--steps", "0"], "--steps"),
        (["--candidates", "1,4"], "candidates"),
        (["--candidates", "4,100000000"], "contains 100000000; the largest group"),
        (["--policies", "fixed-100000000"], "contains 100000000; the largest group"),
        (["--difficulty", "1"], "--difficulty"),
        (["nothing"], "nothing"),
        (["--policies", ","], "No policy is named"),
        (["--steps", "1000000000000"], "--steps is 1000000000000; it must be at least 1 and at most 10,000,000"),
        (["--iteration-ms", "nan"], "--iteration-ms is nan"),
        (["--row-us", "inf"], "--row-us is inf"),
        (["--max-rows", "0"], "--max-rows is 0"),
        (["--difficulty", "nan,1"], "--difficulty is 'nan,1'"),
        (["--suggest", "--delta", "0.3"], "--suggest makes no use of --delta"),
        (["--fast", "--policies", "sagc"], "--fast makes no use of --policies"),
    ],
)
def test_the_command_names_what_is_wrong(options, named, capsys):
    assert main(["simulate", *options]) == 2
    message = capsys.readouterr().err
    assert named in message
    assert message.count("\n") == 1


def test_without_matplotlib_a_picture_is_refused_before_the_work(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", "--plot", "x.png", "--steps", "100000000"]) == 2
    assert "pip install sagc_fast[plot]" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for path, named in (
        (tmp_path, "ending in .png"),
        (tmp_path / "x.doc", ".png"),
        (tmp_path / "no" / "x.png", "no folder"),
    ):
        assert main(["simulate", "--plot", str(path), "--steps", "10000000"]) == 2
        message = capsys.readouterr().err
        assert named in message
        assert message.count("\n") == 1


def test_what_the_configuration_warns_of_is_printed_once_as_a_line(capsys):
    options = ["--candidates", "2,4", "--steps", "3", "--policies", "sagc,sagc-plain,cost-aware"]
    for mode in ([], ["--fast"]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert main(["simulate", *(options[:4] if mode else options), *mode]) == 0
        said = capsys.readouterr()
        assert said.err == ""
        assert (
            said.out.count("warning: SAGCConfig.candidates contains 2 and tau is 2") == said.out.count("warning: ") == 1
        )


def test_one_table_serves_two_holds_that_plan_alike(capsys):
    options = ["--steps", "5", "--policies", "fixed-4"]
    assert main(["simulate", "lognormal", *options]) == 0
    said = capsys.readouterr().out
    assert "\nprompts held " in said
    assert said.count("fixed-4") == 2
    assert "\ncompletions or tokens held " in said
    assert "one table, since lengths" in said
    assert main(["simulate", "drift", *options]) == 0
    said = capsys.readouterr().out
    assert "\ncompletions held " in said
    assert "\ntokens held " in said
    assert "one table" not in said


def test_a_suggestion_is_printed_with_its_reasons(tmp_path, capsys):
    trace = write_trace(tmp_path / "lengths.jsonl", sigma=0.7)
    assert main(["simulate", "--suggest", str(trace), "--steps", "20"]) == 0
    said = capsys.readouterr().out
    found = suggest(read_trace(trace), (4, 8, 16), Scenario(read_trace(trace), steps=20))
    for reason in found.reasons:
        assert f"  {reason}\n" in said
    assert f"delta={found.delta:g}: the cheapest ({found.step_seconds:.2f} s a step" in found.reasons[1]
    assert f"between {found.rates[4]:.2f}" in found.reasons[2]
    assert f"and {found.rates[16]:.2f}, from where it is always G=16" in found.reasons[2]


def test_an_infinite_cap_clips_nothing():
    record = run_policy("fixed-4", FixedG(4), Scenario(LengthProcess(cap=math.inf), steps=5))
    assert record.clipped_ratio.max() == 0.0
