"""The page as a reader gets it: whole, self-contained, and with the numbers of the run files."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sagc_fast.errors import ConfigError
from sagc_fast.report import write_report

VOID = {"meta", "link", "input", "br"}


class _Checker(HTMLParser):
    """Collects ids and outside references, and fails on a closing tag that matches nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open_tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.references += [value for name, value in attrs if name in {"src", "href", "srcset", "data"}]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open_tags.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags, f"</{tag}> closes nothing"
        assert self.open_tags.pop() == tag


def _report(runs: list[Path], out: Path) -> str:
    return write_report(runs, out).read_text(encoding="utf-8")


def _embedded(page: str) -> dict:
    return json.loads(re.search(r'id="report-data">(.*?)</script>', page, re.S)[1])


def _records(run: Path, event: str) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def test_embedded_numbers_are_exactly_those_of_the_metrics_file(make_run, tmp_path):
    runs = [make_run("sagc"), make_run("fixed-16", "fixed", seed=1)]
    data = _embedded(_report(runs, tmp_path / "report.html"))
    for run, shown in zip(runs, data["runs"], strict=True):
        steps, evals = _records(run, "step"), _records(run, "eval")
        for name in ("step", "reward_mean", "straggler_rate", "lambda", "group_size", "idle_fraction", "step_seconds"):
            assert shown["steps"][name] == [record[name] for record in steps]
        assert shown["steps"]["length_quantiles.2"] == [record["length_quantiles"][2] for record in steps]
        assert shown["evals"]["accuracy"] == [record["accuracy"] for record in evals]
    assert data["runs"][0]["steps"]["arms.8.low"] == [r["arms"]["8"]["low"] for r in _records(runs[0], "step")]
    assert "arms.8.low" not in data["runs"][1]["steps"]


@pytest.mark.parametrize("metric", ["straggler_rate", "reward_mean", "tokens_per_second", "grad_norm"])
def test_drawn_points_stand_where_the_metrics_put_them(make_run, tmp_path, metric):
    run = make_run("sagc")
    page = _report([run], tmp_path / "report.html")
    figure = re.search(rf'<figure class="chart" id="{metric.replace("_", "-")}".*?</figure>', page, re.S)[0]
    x0, x1, y0, y1 = map(float, re.search(r'data-domain="([^"]+)"', figure)[1].split())
    path = re.search(r'<path class="dots run-0"[^>]* d="([^"]+)"', figure)[1]
    drawn = [tuple(map(float, point.split())) for point in re.findall(r"M([\d. ]+)h0", path)]
    steps = _records(run, "step")
    assert len(drawn) == len(steps)
    for (x, y), record in zip(drawn, steps, strict=True):
        assert x0 + x / 1000 * (x1 - x0) == pytest.approx(record["step"], abs=1e-3 * (x1 - x0))
        assert y0 + (1 - y / 400) * (y1 - y0) == pytest.approx(record[metric], abs=1e-3 * (y1 - y0))


def test_every_completion_of_a_timeline_has_one_bar_of_its_length(make_run, tmp_path):
    run = make_run("sagc")
    page = _report([run], tmp_path / "report.html")
    records = [json.loads(line) for line in (run / "timeline.jsonl").read_text(encoding="utf-8").splitlines()]
    drawings = re.findall(r'<svg id="timeline-0-\d-plot".*?</svg>', page, re.S)
    for record, drawing in zip(records, drawings, strict=True):
        widths = re.findall(r'data-group="(\d+)" x="(\d+)" y="\d+" width="(\d+)"', drawing)
        wanted = [(r["group"], r["first_step"], r["length"]) for r in record["rows"]]
        assert Counter(tuple(map(int, bar)) for bar in widths) == Counter(wanted)


def test_page_is_well_formed_and_refers_to_nothing_outside(make_run, tmp_path):
    page = _report([make_run("sagc"), make_run("fixed-16", "fixed")], tmp_path / "report.html")
    checker = _Checker()
    checker.feed(page)
    assert checker.open_tags == []
    assert [i for i, count in Counter(checker.ids).items() if count > 1] == []
    assert all(reference.startswith(("#", "data:")) for reference in checker.references)
    assert {reference[1:] for reference in checker.references if reference.startswith("#")} <= set(checker.ids)
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_hostile_completion_text_cannot_leave_its_place(make_run, tmp_path):
    run = make_run("sagc")
    texts = ['</script><script>alert(1)</script>"><img src=x onerror=alert(1)>', "\ud83d lone surrogate", "\x00\x0b"]
    records = [json.loads(line) for line in (run / "timeline.jsonl").read_text(encoding="utf-8").splitlines()]
    for row, text in zip(records[0]["rows"], texts, strict=False):
        row["text"] = text
    (run / "timeline.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    page = _report([run], tmp_path / "report.html")
    assert "<img" not in page
    assert page.count("</script>") == 2
    checker = _Checker()
    checker.feed(page)
    assert checker.open_tags == []


def test_same_runs_give_the_same_bytes(make_run, tmp_path):
    run = make_run("sagc")
    first, second = write_report([run], tmp_path / "a.html"), write_report([run], tmp_path / "b.html")
    assert first.read_bytes() == second.read_bytes()


def test_run_cut_in_the_middle_of_a_line_is_shown_up_to_there(make_run, tmp_path):
    run = make_run("sagc")
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    metrics.write_text("".join(lines[:10]) + lines[10][:50], encoding="utf-8")
    page = _report([run], tmp_path / "report.html")
    assert "line 11 of metrics.jsonl could not be read and was left out" in page
    assert _embedded(page)["runs"][0]["steps"]["step"] == [r["step"] for r in _records_of(lines[:10])]


def _records_of(lines: list[str]) -> list[dict]:
    return [record for record in map(json.loads, lines) if record["event"] == "step"]


def test_missing_side_files_are_named_and_cost_only_their_part(make_run, tmp_path):
    run = make_run("sagc")
    for name in ("config.yaml", "versions.json", "timeline.jsonl"):
        (run / name).unlink()
    page = _report([run], tmp_path / "report.html")
    assert "config.yaml is missing" in page
    assert "versions.json is missing" in page
    assert "No run recorded a rollout timeline." in page
    assert 'id="straggler-rate"' in page


def test_metrics_that_a_run_never_recorded_leave_an_empty_figure(make_run, tmp_path):
    run = make_run("sagc")
    steps = [{k: r[k] for k in ("event", "step", "reward_mean", "controller")} for r in _records(run, "step")]
    steps[3]["reward_mean"] = float("nan")
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in steps), encoding="utf-8")
    page = _report([run], tmp_path / "report.html")
    assert _embedded(page)["runs"][0]["steps"]["reward_mean"][3] is None
    assert page.count("No run recorded this.") > 5


def test_resumed_run_shows_the_last_record_of_a_repeated_step(make_run, tmp_path):
    run = make_run("sagc", num_steps=4)
    again = _records(run, "step")[1] | {"reward_mean": 0.125}
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(again) + "\n")
    columns = _embedded(_report([run], tmp_path / "report.html"))["runs"][0]["steps"]
    assert columns["step"] == [1, 2, 3, 4]
    assert columns["reward_mean"][1] == 0.125


def test_run_without_a_step_is_named_beside_runs_that_have_some(make_run, tmp_path):
    empty, whole = make_run("empty"), make_run("whole")
    (empty / "metrics.jsonl").write_text("", encoding="utf-8")
    assert "no optimizer step is recorded yet" in _report([empty, whole], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="No optimizer step is recorded in"):
        write_report([empty], tmp_path / "report.html")


def test_folder_that_is_no_run_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="nowhere is not a run directory"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(ConfigError, match=r"holds no metrics\.jsonl"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="at least one run directory"):
        write_report([], tmp_path / "report.html")


def test_place_that_cannot_be_written_gives_one_sentence_and_no_half_file(make_run, tmp_path):
    run = make_run("sagc")
    (tmp_path / "taken").write_text("a file, not a folder", encoding="utf-8")
    with pytest.raises(ConfigError, match="choose another place with --out"):
        write_report([run], tmp_path / "taken" / "report.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="folder cannot be written"):
        write_report([run], tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "sagc", "taken"]


def test_runs_of_the_same_name_are_told_apart_by_their_folders(make_run, tmp_path):
    runs = [make_run("a/seed-1"), make_run("b/seed-1", seed=3)]
    names = [run["name"] for run in _embedded(_report(runs, tmp_path / "report.html"))["runs"]]
    assert names == ["a/seed-1", "b/seed-1"]


def test_settings_that_differ_are_listed_and_equal_ones_are_not(make_run, tmp_path):
    page = _report([make_run("sagc"), make_run("fixed", "fixed")], tmp_path / "report.html")
    details = re.search(r'<section id="details".*?</section>', page, re.S)[0].split("<details")[0]
    assert "controller.kind" in details
    assert "controller.delta" not in details


def test_header_names_what_all_runs_share(make_run, tmp_path):
    runs = [make_run("sagc"), make_run("fixed", "fixed")]
    shared = {"torch": "2.13.0", "cpu": "Some CPU", "cores": 2, "commit": "0123456789abcdef"}
    for run, day in zip(runs, ("01", "02"), strict=True):
        start = {"time": f"2026-12-{day}T10:00:00+00:00", "command": "sagc-fast train"}
        (run / "versions.json").write_text(json.dumps(shared | {"starts": [start]}), encoding="utf-8")
    page = _report(runs, tmp_path / "report.html")
    assert "<p>Some CPU · 2 cores · torch 2.13.0 · commit 0123456789 · 2026-12-01 and 2026-12-02</p>" in page
    details = re.search(r'<section id="details".*?</section>', page, re.S)[0]
    assert details.count("<dt>commit</dt><dd>0123456789abcdef</dd>") == 1  # once for all
    for day in ("01", "02"):
        assert f"<dt>started</dt><dd>2026-12-{day} 10:00:00 UTC: sagc-fast train</dd>" in details
