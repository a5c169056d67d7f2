"""The demo: its table says what the runs' files say, and it touches no folder but its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sagc_fast import cli
from sagc_fast.commands import demo
from sagc_fast.config import TrainConfig, changed_fields

RUN_NAMES = [run.folder for run in demo.RUNS]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """(folder, everything printed) of one quick demo."""
    out = tmp_path_factory.mktemp("demo") / "demo"
    command = [sys.executable, "-m", "sagc_fast", "demo", "--quick", "--json", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "100"}, check=False)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def records(out: Path, name: str, event: str) -> list[dict]:
    lines = (out / name / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def test_every_figure_comes_from_the_metrics_of_its_run(quick):
    out, printed = quick
    figures = json.loads(printed.splitlines()[-1])
    assert figures == json.loads((out / demo.MARKER).read_text())
    for name in RUN_NAMES:
        steps, evals, said = records(out, name, "step"), records(out, name, "eval"), figures["runs"][name]
        assert len(steps) == said["steps"] == demo.QUICK_STEPS
        assert said["output_tokens"] == sum(s["num_output_tokens"] for s in steps)
        for phase in ("rollout", "reward", "update"):
            assert said[f"{phase}_seconds"] == pytest.approx(sum(s[f"{phase}_seconds"] for s in steps))
        groups = sum(s["num_groups"] for s in steps)
        assert said["straggler_rate"] == pytest.approx(sum(s["num_straggler_groups"] for s in steps) / groups)
        assert said["idle_fraction"] == pytest.approx(sum(s["idle_fraction"] for s in steps) / len(steps))
        completions = sum(s["num_completions_sampled"] for s in steps)
        assert said["length_mean"] == pytest.approx(said["output_tokens"] / completions)
        assert (said["accuracy_before"], said["accuracy_after"]) == (evals[0]["accuracy"], evals[-1]["accuracy"])
        assert [e["step"] for e in evals] == [0, demo.QUICK_STEPS]


def test_the_table_shows_the_figures(quick):
    out, printed = quick
    runs = json.loads((out / demo.MARKER).read_text())["runs"]
    lines = {line.split("│")[1].strip(): line for line in printed.splitlines() if line.count("│") > 4}
    for row in demo.ROWS:
        cells = [cell.strip() for cell in lines[row.label.strip()].split("│")[2:5]]
        assert cells == [row.form.format(runs[name][row.key]) for name in RUN_NAMES]
    ratio = lines["tokens sampled"].split("│")[5].strip()
    assert ratio == f"{runs['fixed-16']['output_tokens'] / runs['sagc']['output_tokens']:.2f}"
    assert str(out / "report.html") in printed.replace("\n", "")
    assert "fixed-16" in (out / "report.html").read_text()


def test_the_runs_differ_in_their_controller_alone(quick):
    out, _ = quick
    configs = [TrainConfig.from_yaml(out / name / "config.yaml") for name in RUN_NAMES]
    for config in configs[1:]:
        assert all(p == "run_dir" or p.startswith("controller.") for p in changed_fields(configs[0], config))
    before = [records(out, name, "eval")[0] for name in RUN_NAMES]
    assert len({(e["accuracy"], e["length_mean"]) for e in before}) == 1
    first = [json.loads((out / name / "lengths.jsonl").read_text().splitlines()[0]) for name in RUN_NAMES]
    assert len({tuple(trace["problem_ids"]) for trace in first}) == 1
    assert [group[:4] for group in first[0]["lengths"]] == first[2]["lengths"]  # the same noise, fewer samples


def test_a_demo_is_made_anew_in_its_own_folder(tmp_path):
    out = tmp_path / "demo"
    demo.prepare(out)
    (out / "sagc").mkdir()
    (out / "sagc" / "config.yaml").write_text("x")
    demo.prepare(out)
    assert [p.name for p in out.iterdir()] == [demo.MARKER]


def test_another_folder_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("x")
    assert cli.main(["demo", "--quick", "--out", str(tmp_path)]) == 2
    assert "holds something else than an earlier demo" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    assert cli.main(["demo", "--quick", "--out", str(tmp_path / "thesis.tex")]) == 2
    assert cli.main(["demo", "--quick", "--out", str(tmp_path / "thesis.tex" / "demo")]) == 2
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_a_mistake_in_the_options_makes_no_folder(tmp_path, capsys):
    assert cli.main(["demo", "--steps", "0", "--out", str(tmp_path / "demo")]) == 2
    assert "steps is 0" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_ctrl_c_leaves_nothing_half_made(tmp_path):
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "sagc_fast", "demo", "--quick", "--steps", "1000", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = out / RUN_NAMES[0] / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert errors.strip().splitlines()[-1] == "sagc-fast: interrupted"
    assert list(tmp_path.iterdir()) == []
