"""Comparing records: noise is called noise, change is called change, and the machine's drift is neither."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sagc_fast.bench.compare import compare, parse_share, select
from sagc_fast.bench.record import append_history, read_history
from sagc_fast.cli import main
from sagc_fast.errors import ConfigError

STEADY = [100.0, 101.0, 99.0, 100.5, 99.5]


def scaled(factor: float) -> list[float]:
    return [factor * value for value in STEADY]


def verdict(before, after):
    (change,) = compare([before], [after])
    return change.verdict


def test_same_runs_are_no_difference(make_record):
    assert verdict(make_record(STEADY), make_record(STEADY[::-1])) == "no difference"


def test_a_gain_and_a_loss_are_told(make_record):
    assert verdict(make_record(STEADY), make_record(scaled(1.2))) == "faster"
    assert verdict(make_record(STEADY), make_record(scaled(0.8))) == "slower"
    (change,) = compare([make_record(STEADY)], [make_record(scaled(0.8))])
    assert change.ratio == pytest.approx(0.8)
    assert change.worsening == pytest.approx(0.25)


def test_for_a_time_less_is_better(make_record):
    (change,) = compare([make_record(STEADY, better="lower")], [make_record(scaled(1.2), better="lower")])
    assert change.verdict == "slower"
    assert change.worsening == pytest.approx(0.2)


def test_three_runs_cannot_tell_whatever_they_say(make_record):
    assert verdict(make_record(STEADY[:3]), make_record(scaled(2.0)[:3])) == "too few runs"


def test_noise_seldom_passes_for_change(make_record):
    rng = np.random.default_rng(1)
    sides, verdicts = [make_record(STEADY), make_record(STEADY)], []
    for _ in range(60):
        for side in sides:
            side["results"][0]["metrics"]["speed"]["values"] = (100 * rng.lognormal(0, 0.1, 6)).tolist()
        verdicts.append(verdict(*sides))
    assert sum(v != "no difference" for v in verdicts) <= 5


def test_a_change_no_larger_than_the_machines_own_is_none(make_record):
    slower_machine = make_record(scaled(0.8), gemm=0.78e11)
    assert verdict(make_record(STEADY), slower_machine) == "no difference"
    assert verdict(make_record(STEADY), make_record(scaled(0.6), gemm=0.78e11)) == "slower"


def test_runs_of_several_records_are_pooled(make_record):
    (change,) = compare([make_record(STEADY[:3]), make_record(STEADY[3:])], [make_record(scaled(1.2))])
    assert (change.num_before, change.num_after, change.verdict) == (5, 5, "faster")


def test_secondary_metrics_only_when_asked_for(make_record):
    assert [c.metric for c in compare([make_record(STEADY)], [make_record(STEADY)], is_all=True)] == ["speed", "size"]


def test_other_settings_are_not_compared(make_record):
    other = make_record(STEADY) | {"settings": {"model": "M"}}
    with pytest.raises(ConfigError, match="same settings in common"):
        compare([make_record(STEADY)], [other])


def test_labels_and_commits_are_found_in_a_history(make_record, tmp_path):
    history = tmp_path / "bench.jsonl"
    append_history(history, make_record(STEADY, label="old"))
    append_history(history, make_record(STEADY) | {"commit": "abcdef12"})
    assert [record["label"] for record in select("old", history)] == ["old"]
    assert [record["commit"] for record in select("abcdef", history)] == ["abcdef12"]
    with pytest.raises(ConfigError, match=r"holds abcdef12, old|holds old"):
        select("new", history)
    with pytest.raises(ConfigError, match="--history FILE"):
        select("old", None)


@pytest.mark.parametrize(
    ("line", "message"), [("{", "no benchmark record"), ("[]", "no benchmark"), ('{"schema": 9}', "no benchmark")]
)
def test_a_line_that_is_no_record_is_named(tmp_path, line, message):
    (tmp_path / "h.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(ConfigError, match=f"line 2 is {message}"):
        read_history(tmp_path / "h.jsonl")


def test_an_empty_or_binary_history_is_named_with_the_remedy(tmp_path):
    (tmp_path / "h.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"h\.jsonl is empty; measure with"):
        read_history(tmp_path / "h.jsonl")
    (tmp_path / "h.jsonl").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"it is not text in UTF-8; give a file"):
        read_history(tmp_path / "h.jsonl")


def test_a_record_of_another_schema_is_refused(make_record, tmp_path):
    append_history(tmp_path / "h.jsonl", make_record(STEADY) | {"schema": 99})
    with pytest.raises(ConfigError, match="schema 99"):
        read_history(tmp_path / "h.jsonl")


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("0", 0.0)])
def test_shares(text, share):
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "five", "-1%", "nan"])
def test_what_is_no_share(text):
    with pytest.raises(ConfigError, match="--fail-if-slower"):
        parse_share(text)


def test_exit_status_for_continuous_integration(make_record, tmp_path, capsys):
    for name, factor in (("a", 1.0), ("b", 0.8), ("c", 1.3)):
        append_history(tmp_path / name, make_record(scaled(factor)))
    paths = {name: str(tmp_path / name) for name in "abc"}
    assert main(["bench", "compare", paths["a"], paths["b"]]) == 0
    out = capsys.readouterr().out
    assert "slower" in out
    assert json.loads(out.splitlines()[-1])["changes"][0]["verdict"] == "slower"
    assert main(["bench", "compare", paths["a"], paths["b"], "--fail-if-slower", "5%", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 1
    assert main(["bench", "compare", paths["a"], paths["b"], "--fail-if-slower", "30%"]) == 0
    assert main(["bench", "compare", paths["a"], paths["c"], "--fail-if-slower", "5%"]) == 0
    assert main(["bench", "compare", paths["a"], str(tmp_path / "none")]) == 2
