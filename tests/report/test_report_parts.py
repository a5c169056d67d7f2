"""The parts behind the page: sentences worked out by hand, rows of the timeline, ticks and smoothing."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagc_fast.report.charts import nice_ticks, rolling, spaced_indices
from sagc_fast.report.data import load_runs
from sagc_fast.report.summary import (
    comparison_sentences,
    comparisons,
    pick_baseline,
    single_sentences,
    summarize,
    warnings,
)
from sagc_fast.report.text import compact, duration, percent
from sagc_fast.report.timeline import assign_lanes, snapshot


def _write(folder, controller, seconds, tokens, stragglers, accuracies, **extra):
    """A run of len(seconds) steps with 4 groups each and an evaluation before the first and after the last step."""
    folder.mkdir()
    total, lines = 0.0, []
    for step, (s, t, k) in enumerate(zip(seconds, tokens, stragglers, strict=True), start=1):
        total += s
        lines.append(
            {"event": "step", "step": step, "controller": controller, "group_size": 16 if controller == "fixed" else 4,
             "num_groups": 4, "num_straggler_groups": k, "straggler_rate": k / 4, "num_output_tokens": t,
             "rollout_seconds": s / 2, "update_seconds": s / 4, "step_seconds": s, "time_seconds": total,
             "reward_mean": 0.1 * step, "delta": 0.25} | extra
        )  # fmt: skip
    for step, (accuracy, stderr) in zip((0, len(seconds)), accuracies, strict=False):
        lines.append({"event": "eval", "step": step, "accuracy": accuracy, "accuracy_stderr": stderr})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "config.yaml").write_text("steps: 2\n", encoding="utf-8")
    (folder / "versions.json").write_text("{}", encoding="utf-8")
    return folder


def _plain(sentences: list[str]) -> str:
    return " ".join(sentences).replace("<b>", "").replace("</b>", "").replace("\N{NO-BREAK SPACE}", " ")


def test_a_clock_that_measured_the_neighbours_is_not_believed(tmp_path):
    """The clock says that sagc was slower; it waited for a CPU half of its time, and its process worked less."""
    sagc = _write(tmp_path / "sagc", "sagc", [8, 8], [100, 100], [1, 1], [], cpu_seconds=3.0)
    fixed = _write(tmp_path / "fixed", "fixed", [6, 6], [400, 400], [4, 3], [], cpu_seconds=4.5)
    runs = load_runs([sagc, fixed])
    said = _plain(comparison_sentences(runs[0], runs[1]))
    assert "fixed took 1.50 times the CPU seconds of sagc for 2 steps of training (9.0 against 6.0)" in said
    assert "times as long" not in said
    assert "75% fewer output tokens (200 against 800), each in 2.67 times the time." in said


def test_comparison_states_time_tokens_stragglers_and_accuracy(tmp_path):
    sagc = _write(tmp_path / "sagc", "sagc", [2, 2], [100, 100], [1, 1], [(0.5, 0.02), (0.9, 0.02)])
    fixed = _write(tmp_path / "fixed", "fixed", [5, 5], [400, 400], [4, 3], [(0.5, 0.02), (0.8, 0.02)])
    runs = load_runs([sagc, fixed])
    assert pick_baseline(runs) == 1
    said = _plain(comparison_sentences(runs[0], runs[1]))
    assert "sagc finished 2 steps 2.50 times as fast as fixed (4.0 s against 10 s of training)." in said
    assert "75% fewer output tokens (200 against 800), each in 1.60 times the time." in said
    assert "25% of the groups of sagc straggled and 88% of those of fixed" in said
    assert "at mean group sizes of 4 and 16; the goal of sagc was 25%." in said
    assert "sagc went from 50% ± 3.9 to 90% ± 3.9 (step 2)" in said
    assert "sagc ended higher." in said


def test_adaptive_run_is_held_against_the_largest_and_the_smallest_fixed_size(tmp_path):
    def fixed(size):
        return _write(tmp_path / f"fixed-{size}", "fixed", [1], [10], [0], [], group_size=size)

    sagc = _write(tmp_path / "sagc", "sagc", [1], [10], [0], [])
    runs = load_runs([fixed(4), fixed(16), sagc, fixed(8)])
    assert comparisons(runs) == [(2, 1), (2, 0)]
    assert comparisons(runs[:2]) == [(0, 1)]
    assert comparisons(runs[2:3]) == []


def test_comparison_uses_only_the_steps_that_both_have(tmp_path):
    short = _write(tmp_path / "short", "sagc", [1, 1], [10, 10], [0, 0], [])
    longer = _write(tmp_path / "longer", "fixed", [1, 1, 50], [10, 10, 900], [0, 0, 4], [])
    runs = load_runs([short, longer])
    said = _plain(comparison_sentences(runs[0], runs[1]))
    assert "took the same time for 2 steps" in said
    assert "Both sampled about as many output tokens" in said


def test_accuracies_within_their_interval_are_not_called_different(tmp_path):
    ours = _write(tmp_path / "ours", "sagc", [1, 1], [10, 10], [0, 0], [(0.5, 0.02), (0.82, 0.02)])
    other = _write(tmp_path / "other", "fixed", [1, 1], [10, 10], [0, 0], [(0.5, 0.02), (0.8, 0.02)])
    runs = load_runs([ours, other])
    assert "do not differ beyond the noise" in _plain(comparison_sentences(runs[0], runs[1]))


def test_slower_run_is_called_slower(tmp_path):
    ours = _write(tmp_path / "ours", "sagc", [3, 3], [10, 10], [0, 0], [])
    other = _write(tmp_path / "other", "fixed", [2, 2], [10, 10], [0, 0], [])
    runs = load_runs([ours, other])
    assert "ours took 1.50 times as long as other for 2 steps" in _plain(comparison_sentences(runs[0], runs[1]))


@pytest.mark.parametrize(
    ("after", "words"), [(0.9, "rose from"), (0.52, "did not change measurably: it went from"), (0.1, "fell from")]
)
def test_single_run_says_what_became_of_held_out_accuracy(tmp_path, after, words):
    run = _write(tmp_path / "run", "sagc", [1, 1], [10, 10], [2, 2], [(0.5, 0.02), (after, 0.02)])
    said = _plain(single_sentences(load_runs([run])[0]))
    assert f"Held-out accuracy of run {words} 50% ± 3.9" in said
    assert "50% of its groups straggled, against a goal of 25% at a mean group size of 4." in said


def test_seconds_by_phase_add_up_to_the_steps(tmp_path):
    run = _write(tmp_path / "run", "fixed", [4, 8], [10, 10], [0, 0], [])
    phases = summarize(load_runs([run])[0]).phase_seconds
    assert phases == {"rollout": 6.0, "reward": 0.0, "update": 3.0, "checkpoint": 0.0, "other": 3.0}


def test_cautions_name_cut_completions_skipped_updates_and_reward_errors(tmp_path):
    extra = {"clipped_ratio": 0.5, "is_skipped": True, "num_reward_errors": 3}
    notes = " ".join(warnings(load_runs([_write(tmp_path / "run", "sagc", [1, 1], [9, 9], [0, 0], [], **extra)])[0]))
    assert "50% of the completions were cut at the length limit" in notes
    assert "2 of 2 updates were skipped" in notes
    assert "6 completions could not be scored" in notes
    assert "no held-out evaluation is recorded" in notes


@pytest.mark.parametrize(("cpu_seconds", "is_said"), [(0.7, False), (0.3, True), (None, False)])
def test_a_run_on_a_busy_machine_says_that_its_seconds_are_not_its_own(tmp_path, cpu_seconds, is_said):
    extra = {} if cpu_seconds is None else {"cpu_seconds": cpu_seconds}
    run = _write(tmp_path / "run", "sagc", [1, 1], [9, 9], [0, 0], [], **extra)
    assert ("kept the machine busy" in " ".join(warnings(load_runs([run])[0]))) == is_said


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 15)), max_size=60).map(
    lambda items: sorted((first, first + more) for first, more in items)
)


@given(spans)
def test_bars_of_one_row_never_overlap_and_rows_are_as_few_as_possible(spans):
    lanes = assign_lanes(spans)
    for lane in set(lanes):
        inside = [span for span, other in zip(spans, lanes, strict=True) if other == lane]
        assert all(before[1] < after[0] for before, after in pairwise(inside))
    busiest = max((sum(first <= t <= last for first, last in spans) for t in range(46)), default=0)
    assert len(set(lanes)) == busiest


def test_idle_share_is_the_hatched_area():
    rows = [{"group": 0, "sample": i, "first_step": 0, "last_step": last, "length": 1} for i, last in enumerate((0, 3))]
    shot = snapshot({"step": 1, "capacity_rows": 2, "rows": rows, "active_rows": [2, 1, 1, 1]})
    assert shot.idle_fraction == 1 - 5 / 8
    assert shot.lanes == (0, 1)
    assert [row["sample"] for row in shot.rows] == [1, 0]


def test_timeline_without_active_rows_counts_them_from_the_bars():
    rows = [{"group": 0, "sample": 0, "first_step": 1, "last_step": 2, "length": 2}]
    assert snapshot({"step": 1, "capacity_rows": 1, "rows": rows}).active_rows == (0, 1, 1)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_inside_and_evenly_spaced(low, span):
    ticks = nice_ticks(low, low + span)
    tolerance = 1e-6 * span + 1e-9
    assert len(ticks) <= 6
    assert all(low - tolerance <= tick <= low + span + tolerance for tick in ticks)


def test_rolling_mean_skips_what_is_missing():
    means, spreads = rolling([1.0, None, 3.0, None, None, None], 3)
    assert means == [1.0, 1.0, 2.0, 3.0, 3.0, None]
    assert spreads == [0.0, 0.0, 1.0, 0.0, 0.0, None]


@given(st.integers(0, 500), st.integers(2, 20))
def test_spaced_indices_keep_both_ends(length, count):
    picked = spaced_indices(length, count)
    assert picked == sorted(set(picked))
    assert len(picked) == min(length, count)
    assert picked[:1] == [0][:length]
    assert picked[-1:] == [length - 1][:length]


def test_numbers_read_as_a_person_writes_them():
    assert [percent(v) for v in (0, 0.004, 0.25, 1.0, None)] == ["0%", "0.4%", "25%", "100%", "–"]
    assert [compact(v) for v in (0, 12, 3.14159, 0.5, 0.0123, 135904.4)] == [
        "0",
        "12",
        "3.14",
        "0.50",
        "0.012",
        "135,904",
    ]
    shown = [duration(v).replace("\N{NO-BREAK SPACE}", " ") for v in (0.25, 42, 192, 59.7 * 60, 3 * 3600 + 300)]
    assert shown == ["0.2 s", "42 s", "3 min 12 s", "59 min 42 s", "3 h 05 min"]
