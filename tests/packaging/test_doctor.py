"""``sagc-fast doctor``: true about this machine, and its exit status tells a script."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest

from sagc_fast.cli import main
from sagc_fast.commands import _diagnosis as diagnosis


@pytest.fixture(scope="module")
def report():
    return diagnosis.diagnose()


def test_every_operation_is_listed_with_its_backend_and_reason(report):
    rows = dict(report.sections["Operators on the CPU"])
    for name in diagnosis.OPERATIONS:
        assert rows[f"{name} [cpu, float32]"].split(" (")[0] in {"native", "torch"}


def test_this_environment_passes(report):
    assert not report.has_failed
    assert report.to_dict()["ok"] is True
    assert any("same bits alone and in a batch" in check.sentence for check in report.checks)


def test_failed_check_gives_exit_status_1(monkeypatch, capsys, report):
    failed = diagnosis.Diagnosis({"Software": [("torch", "2.13.0")]}, [diagnosis.Check("failure", "It is broken.")])
    monkeypatch.setattr(diagnosis, "diagnose", lambda *_: failed)
    assert main(["doctor"]) == 1
    assert "FAIL  It is broken." in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["checks"] == [{"status": "failure", "sentence": "It is broken."}]


def test_forced_backend_that_is_missing_is_a_failure_beside_everything_else(monkeypatch, capsys):
    """It ended the command with one sentence, without the facts that explain it."""
    monkeypatch.setenv("SAGC_BACKEND", "flash")
    monkeypatch.setattr("sagc_fast.ops.backend._choices", {})
    monkeypatch.setattr("sagc_fast.ops.backend.flash_module", lambda: None)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "instruction sets" in shown
    assert "FAIL  Backend 'flash' (environment variable SAGC_BACKEND) is not there" in shown


@pytest.mark.parametrize(("call", "words"), [(0, "alone and in a batch"), (2, "plain torch disagree")])
def test_self_test_sees_a_wrong_log_probability(monkeypatch, call, words):
    real, calls = diagnosis._completions, iter(range(3))

    def broken(*args):
        found = real(*args)
        if next(calls) == call:
            found = [(tokens, [p + 1e-3 for p in logprobs]) for tokens, logprobs in found]
        return found

    monkeypatch.setattr(diagnosis, "_completions", broken)
    check = diagnosis.check_generation()
    assert check.status == "failure"
    assert words in check.sentence


def test_a_kv_budget_that_is_none_gives_one_sentence(capsys):
    for bad in ("-1", "nan", "inf"):
        assert main(["doctor", "--kv-budget-gb", bad]) == 2
        assert f"--kv-budget-gb is {bad}; it must be a finite number of GB above 0." in capsys.readouterr().err


def test_damaged_native_library_is_a_failure_with_the_remedy(editable, tmp_path):
    python, source = editable
    library = source / "sagc_fast" / "_C.so"
    library.write_bytes(b"not a library")
    try:
        script = python.parent / "sagc-fast"
        done = subprocess.run([script, "doctor"], cwd=tmp_path, capture_output=True, text=True)
    finally:
        library.unlink()
    assert done.returncode == 1, done.stderr
    assert "FAIL  The native CPU operators are built but do not load" in done.stdout
    assert "run pip install again" in done.stdout


def test_doctor_knows_the_shipped_policy_by_its_name(capsys, monkeypatch):
    monkeypatch.setattr(diagnosis, "check_generation", lambda: diagnosis.Check("ok", "left out"))
    assert main(["doctor", "--model", "addition"]) == 0
    assert "context of the model" in capsys.readouterr().out


def test_kv_plan_counts_keys_and_values_of_every_layer(monkeypatch, tmp_path):
    config = SimpleNamespace(num_layers=3, num_kv_heads=2, head_dim=8, max_position_embeddings=4096)
    monkeypatch.setattr("sagc_fast.model.loader.load_config", lambda folder: config)
    rows = dict(diagnosis.kv_plan(tmp_path, 0.003))
    assert rows["0.003 GB in fp32"] == "7,812 tokens (384 bytes each); sequences at once: 7 of 1,024, 1 of 4,096"
    assert rows["0.003 GB in bf16"] == "15,625 tokens (192 bytes each); sequences at once: 15 of 1,024, 3 of 4,096"


def test_model_folder_that_is_none_gives_one_sentence(tmp_path, capsys):
    assert main(["doctor", "--model", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "status"), [("2.11.0", "ok"), ("2.13.1+cu130", "ok"), ("2.10.0", "warning")])
def test_torch_outside_the_tested_releases_is_a_warning(monkeypatch, version, status):
    monkeypatch.setattr(diagnosis, "version_of", lambda name: version)
    assert diagnosis.check_torch().status == status


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ({"avx512_bf16", "amx_bf16"}, "ok", "has AMX"),
        ({"avx512_bf16"}, "ok", "no AMX; bf16 runs on avx512_bf16"),
        ({"avx2"}, "warning", "keep model.dtype fp32"),
    ],
)
def test_the_units_that_bf16_runs_on_are_named(monkeypatch, flags, status, words):
    monkeypatch.setattr(diagnosis, "cpu_flags", lambda: flags)
    check = diagnosis.check_bf16()
    assert check.status == status
    assert words in check.sentence


def test_more_threads_than_cores_is_a_warning(monkeypatch):
    monkeypatch.setattr(diagnosis, "num_cores", lambda: 0)
    assert diagnosis.check_threads().status == "warning"


def test_warming_kernels_without_a_gpu_says_what_is_missing(monkeypatch, capsys):
    from sagc_fast.ops import backend

    monkeypatch.setattr(backend, "triton_module", lambda: None)
    assert main(["doctor", "--warm"]) == 2
    assert "Backend 'triton' (set_backend) is not there" in capsys.readouterr().err
