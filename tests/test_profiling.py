"""Ranges: free when off, nested and counted when on, handed to NVTX when asked; and the command around them."""

from __future__ import annotations

import gzip
import json
import os
import stat
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from sagc_fast import profiling
from sagc_fast.cli import main
from sagc_fast.commands.profile import nsight_command, phase_records
from sagc_fast.profiling import STEP, Recorder, annotate, ranged, recording
from sagc_fast.rollout.model_runner import MOST_STEPS


@ranged("work")
def work(value):
    with annotate("inner"):
        return value


def run_step():
    with annotate(STEP):
        return work(3)


def null_mark(name):
    return nullcontext()


def test_ranges_are_nothing_when_off():
    assert annotate("a") is annotate("b")
    assert work(2) == 2
    assert work.__name__ == "work"


def test_phases_nest_and_count():
    with recording(Recorder(null_mark)) as recorder:
        recorder.open()
        for _ in range(3):
            run_step()
        work(1)
    records = {record["phase"]: record for record in phase_records(recorder)}
    assert {path: record["calls"] for path, record in records.items()} == {
        "step": 3, "step/work": 3, "step/work/inner": 3, "work": 1, "work/inner": 1
    }  # fmt: skip
    assert records["step"]["seconds"] >= records["step/work"]["seconds"] >= records["step/work/inner"]["seconds"] >= 0
    assert records["step"]["share"] + records["work"]["share"] == pytest.approx(1.0)
    assert annotate("off again") is annotate("b")


def test_a_window_of_steps_switches_the_profiler_on_and_off():
    events = []

    @contextmanager
    def mark(name):
        events.append(name)
        yield

    recorder = Recorder(mark, 2, 2, lambda: events.append("start"), lambda: events.append("stop"))
    with recording(recorder):
        for _ in range(6):
            work(0)
            run_step()
    step = ["sagc:step", "sagc:work", "sagc:inner"]
    assert events == ["start", *step, "sagc:work", "sagc:inner", *step, "stop"]
    assert recorder.root.children[STEP].calls == 2


def test_a_range_ends_with_the_exception_that_leaves_it():
    with recording(Recorder(null_mark)) as recorder:
        recorder.open()
        with pytest.raises(KeyError), annotate("outer"):
            raise KeyError
        work(1)
    assert list(recorder.root.children) == ["outer", "work"]


def test_a_process_started_with_the_variable_marks_nvtx_ranges():
    code = """
import contextlib, sys, types
seen = []
@contextlib.contextmanager
def annotate(name):
    seen.append(name)
    yield
sys.modules["nvtx"] = types.SimpleNamespace(annotate=annotate)
from sagc_fast.profiling import annotate, ranged
with annotate("outer"):
    ranged("inner")(lambda: None)()
assert seen == ["sagc:outer", "sagc:inner"], seen
"""
    environment = os.environ | {"SAGC_NVTX": "1"}
    environment.pop("SAGC_NVTX_STEPS", None)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_without_any_nvtx_ranges_stay_silent(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with profiling.nvtx_mark()("sagc:x"):
        pass


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def train(tmp_path):
    """The command line of a short training run."""
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {path: addition}\ntask: {name: addition, max_new_tokens: 24}\nrollout: {prompts_per_step: 3}\n"
        "controller: {kind: fixed, group_size: 4}\nevaluation: {num_problems: 0}\nsteps: 3\nthreads: 1\n"
        "metrics: {timeline_every: 1}\n",
        encoding="utf-8",
    )
    return ["train", "--config", str(config), "--run-dir", str(tmp_path / "run")]


def test_the_profile_of_a_training_run_names_its_phases_and_leaves_a_trace(train, tmp_path, capsys):
    out = tmp_path / "profile"
    assert main(["profile", "--out", str(out), "--steps", "2", "--json", "--", *train]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "Phases of 2 steps, after 1 left out to warm up" in " ".join(said)
    result = json.loads(said[-1])
    calls = {record["phase"]: record["calls"] for record in result["phases"]}
    assert calls["step"] == calls["step/rollout"] == calls["step/update"] == 2
    plan = "step/rollout/engine step"
    num_plans, num_forwards, num_bursts = (calls.get(path, 0) for path in (plan, f"{plan}/forward", f"{plan}/decode"))
    assert num_plans == calls[f"{plan}/schedule"] == num_forwards + num_bursts
    timeline = (tmp_path / "run" / "timeline.jsonl").read_text().splitlines()
    num_steps = sum(len(json.loads(line)["active_rows"]) for line in timeline[1:])  # the first step is not recorded
    assert num_plans <= num_steps <= num_forwards + MOST_STEPS * num_bursts
    assert num_forwards >= 2  # prompts, in each of the two rollouts
    assert num_steps > 10
    assert calls["step/update/backward"] >= 1
    trace = json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))
    assert sum(event.get("name") == "sagc:step" and event.get("ph") == "X" for event in trace["traceEvents"]) == 2


def test_a_run_shorter_than_the_window_says_so(train, tmp_path, capsys):
    assert main(["profile", "--skip-steps", "5", "--out", str(tmp_path / "p"), "--", *train]) == 2
    assert "ended before its step 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--"], "profile got nothing to run"),
        (["--", "doctor"], "name one of train, generate"),
        (["--steps", "0", "--", "train"], "the second at least 1"),
        (["--tool", "torch", "--print", "--", "train"], "name one with --tool"),
    ],
)
def test_what_cannot_be_profiled_is_said_in_one_sentence(argv, words, capsys):
    assert main(["profile", *argv]) == 2
    assert words in capsys.readouterr().err


def test_a_place_that_cannot_hold_the_results_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sagc_fast.commands.profile._run_torch", lambda *_: pytest.fail("worked"))
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/deeper"):
        assert main(["profile", "--tool", "torch", "--out", str(tmp_path / out), "--", "train"]) == 2
        assert f"--out {tmp_path / out} is no folder that can be written" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("tool", ["nsys", "ncu"])
def test_a_missing_profiler_is_named_with_the_remedy(tool, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main(["profile", "--tool", tool, "--", "train"]) == 2
    assert f"{tool} is not on the PATH" in capsys.readouterr().err


def test_nsight_gets_the_window_the_ranges_and_the_command(tmp_path, monkeypatch, capsys):
    stand_in = tmp_path / "nsys"
    stand_in.write_text(f'#!/bin/sh\necho "$SAGC_NVTX $SAGC_NVTX_STEPS $@" > {tmp_path}/said\n')
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    out = tmp_path / "out"
    assert main(["profile", "--tool", "nsys", "--out", str(out), "--", "train", "--config", "a b.yaml"]) == 0
    said = (tmp_path / "said").read_text()
    assert said.startswith("1 1:3 profile ")
    assert "--capture-range=cudaProfilerApi" in said
    assert said.rstrip().endswith("-m sagc_fast train --config a b.yaml")
    printed = capsys.readouterr().out
    assert "'a b.yaml'" in printed
    assert "nsys stats --report nvtx_pushpop_sum" in printed


def test_the_printed_command_of_nsight_compute_takes_a_few_decoding_kernels(capsys):
    args = SimpleNamespace(out="profile", skip_steps=1, steps=3)
    command, environment = nsight_command("ncu", ["generate", "--model", "DIR"], args)
    assert environment == {"SAGC_NVTX": "1"}
    assert command[command.index("--launch-count") + 1] == "60"
    assert main(["profile", "--tool", "ncu", "--print", "--", "generate", "--model", "DIR"]) == 0
    assert capsys.readouterr().out.startswith("SAGC_NVTX=1 ncu --set full")
