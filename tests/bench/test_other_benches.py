"""Kernels, controller and train: whole records from small runs, and figures that add up."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from sagc_fast.bench import controller, kernels, show, step, training
from sagc_fast.bench.kernels import BUILDERS
from sagc_fast.bench.models import Shape, model_folder, shape_of
from sagc_fast.bench.workload import Workload
from sagc_fast.cli import main
from sagc_fast.ops import use_backend

SMALL = Shape(width=16, layers=1, heads=4, kv_heads=2, head_dim=8, hidden=24, vocab=32)


def shown(record) -> str:
    text = io.StringIO()
    show.show_record(Console(file=text, width=160, highlight=False), record)
    return text.getvalue()


def quiet(text: str) -> None:
    pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 20])
def test_every_case_runs_and_counts_work(monkeypatch, dtype, rows):
    monkeypatch.setattr(kernels, "COLD_BYTES", 2000)
    found = [build(SMALL, dtype, rows) for build in BUILDERS.values()]
    assert len({case.name for case in found}) == len(found) == 11
    with use_backend("torch"):
        assert all(case.call() is not None for case in found)
    assert all(case.num_bytes > 0 for case in found)


def test_work_of_a_product_and_of_attention_by_hand():
    product = kernels.linear_case(SMALL, torch.float32, 3, "qkv")
    assert product.flops == 2 * 3 * 64 * 16  # 4 + 2 + 2 heads of 8
    assert product.num_bytes == 4 * (64 * 16 + 3 * (64 + 16))
    attention = kernels.attention_case(SMALL, torch.float32, rows=20, num_shared=160)
    assert attention.flops == 4 * 20 * 256 * 4 * 8
    assert attention.num_bytes == 2 * (20 * 96 + 2 * 160) * 2 * 8 * 4  # two groups' prompts, each read once


def test_kernels_record(monkeypatch):
    monkeypatch.setattr(kernels, "shapes", lambda: {"S": SMALL})
    monkeypatch.setattr(kernels, "COLD_BYTES", 2000)
    monkeypatch.setattr(kernels, "BATCH_SECONDS", 1e-5)
    monkeypatch.setattr("sagc_fast.bench.ceilings.READ_BYTES", 2**16)
    threads = torch.get_num_threads()
    record = kernels.run("S", "fp32", 1, (2,), 2, "x", quiet)
    assert torch.get_num_threads() == threads
    assert json.loads(json.dumps(record)) == record
    names = [entry["name"] for entry in record["results"]]
    assert any("linear qkv" in name and "[torch]" in name for name in names)
    entry = record["results"][0]
    best = min(entry["metrics"]["time"]["values"]) * 1e-6
    assert entry["facts"]["gflops"] == pytest.approx(2 * 2 * 64 * 16 / best / 1e9, rel=1e-4)
    assert "GFLOP/s" in shown(record)


def test_controller_record(monkeypatch):
    monkeypatch.setattr(controller, "_fresh_process", lambda: [0.1, 0.2])
    monkeypatch.setattr(controller, "CALLS", 20)
    monkeypatch.setattr(controller, "STEPS", {True: 100})
    record = controller.run(2, True, None, quiet)
    assert json.loads(json.dumps(record)) == record
    units = {entry["metrics"]["time"]["unit"] for entry in record["results"]}
    assert units == {"us", "s"}
    assert all(len(entry["metrics"]["time"]["values"]) == 2 for entry in record["results"])
    assert "100 simulated steps" in shown(record)


def test_train_record_beside_a_stand_in_for_trl(monkeypatch, fake_python):
    monkeypatch.setattr(training, "OWN_PYTHON", str(fake_python))
    record = training.run_train(4, 1, 2, {"trl": str(fake_python)}, None, quiet)
    ours, trl = record["results"]
    assert ours["metrics"]["cpu_seconds_per_step"]["median"] == 0.25
    assert ours["metrics"]["tokens_per_cpu_second"]["values"] == [100, 100]
    assert trl["facts"]["ours_is_faster_by"]["ratio"] == 1.0
    assert "faster than trl by 1.00" in shown(record)


def test_both_trainers_get_the_same_problems():
    problems = training._problems(2)
    assert len(problems) == 2 * training.NUM_PROMPTS
    assert all(set(problem) == {"prompt", "answer"} and problem["prompt"].endswith("=") for problem in problems)


def test_train_without_trl_names_it(monkeypatch, fake_python):
    monkeypatch.setattr(training, "OWN_PYTHON", str(fake_python))
    monkeypatch.setattr(training, "TRL", replace(training.TRL, module="no_such_module"))
    record = training.run_train(1, 1, 1, {}, None, quiet)
    assert [entry["name"] for entry in record["results"]] == ["sagc_fast"]
    assert record["absent"][0]["name"] == "trl"


def test_our_own_trainer_takes_the_steps_asked_for():
    from sagc_fast.bench.engines import OWN_PYTHON, PEERS
    from sagc_fast.bench.worker import Worker
    from sagc_fast.tasks.addition import policy_folder

    settings = {
        "model": str(policy_folder()), "threads": 1, "num_prompts": 2, "group_size": 2, "max_new_tokens": 4,
        "learning_rate": 1e-4,
    }  # fmt: skip
    with Worker("sagc_fast", OWN_PYTHON, PEERS / "run_sagc_train.py", settings) as worker:
        answer = worker.run({"steps": 2, "problems": []})
    assert 0 < answer["output_tokens"] <= 2 * 2 * 2 * 4
    assert answer["seconds"]["rollout"] > 0


def test_step_record_by_phase_and_a_trainer_that_does_other_work(monkeypatch, thin_shape, fake_python, broken_python):
    monkeypatch.setattr(step, "OWN_PYTHON", str(fake_python))
    monkeypatch.setattr(step, "GEMM_ROWS", 4)
    settings = step.StepSettings(
        model="S", dtypes=("fp32", "bf16"), peer_dtypes=("fp32",), workload=step.QUICK, threads=1, runs=2,
        pythons={"trl": str(fake_python)},
    )  # fmt: skip
    record = step.run_step(settings, None, quiet)
    assert json.loads(json.dumps(record)) == record
    assert [entry["name"] for entry in record["results"]] == ["sagc_fast fp32", "sagc_fast bf16", "trl fp32"]
    metrics = record["results"][0]["metrics"]
    assert [metrics[f"{p}_cpu"]["median"] for p in ("rollout", "forward", "update", "step")] == [0.5, 0.0, 0.25, 0.75]
    assert set(record["ratios"]) == {"trl fp32 / sagc_fast fp32", "trl fp32 / sagc_fast bf16"}
    assert record["ratios"]["trl fp32 / sagc_fast bf16"]["update"]["ratio"] == 1.0
    for dtype in ("fp32", "bf16"):
        facts, rate = record["update"][dtype], record["ceilings"]["gemm_flops"][dtype]["per_cpu_second"]
        assert facts["gflops"] == pytest.approx(sum(facts["gflop"].values()) / 0.25, rel=1e-4)
        assert facts["share_of_gemm_rate"] == pytest.approx(facts["gflops"] * 1e9 / rate, rel=1e-4)
    text = shown(record)
    assert "trl fp32 / sagc_fast bf16: rollout 1.0 (1.0 - 1.0), update 1.0" in text
    settings = replace(settings, dtypes=("fp32",), runs=1, pythons={"trl": str(broken_python("short"))})
    record = step.run_step(settings, None, quiet)
    assert [entry["name"] for entry in record["results"]] == ["sagc_fast fp32"]
    assert "tokens where" in record["notes"][0]


def test_the_operations_of_an_update_are_those_of_the_formula(thin_shape):
    """One prompt of 3 tokens with completions of 1 and 2: 6 tokens in the layers, 3 at the head, pairs by hand."""
    workload = Workload(
        num_prompts=1, group_size=2, mean_length=1.5, max_length=2, min_length=1, min_prompt=3, max_prompt=3
    )
    lengths = workload.lengths()[0]
    shape = shape_of(model_folder("S", "fp32"))
    flops = step.update_flops(workload, model_folder("S", "fp32"))
    assert flops["layers"] == 3 * shape.layer_flops_per_token() * (3 + sum(lengths))
    assert flops["head"] == 4 * 2 * shape.vocab * shape.width * sum(lengths)
    pairs = 6 + sum(sum(3 + t + 1 for t in range(n)) for n in lengths)
    assert flops["attention"] == pytest.approx(3.5 * shape.attention_flops(pairs))


def test_our_own_step_does_the_forced_work(tiny_model, tmp_path):
    from sagc_fast.bench.engines import OWN_PYTHON, PEERS
    from sagc_fast.bench.worker import Worker
    from sagc_fast.model.loader import save_model

    save_model(tiny_model(), tmp_path)
    settings = {"model": str(tmp_path), "threads": 1, "max_length": 4, "learning_rate": 1e-3}
    with Worker("sagc_fast", OWN_PYTHON, PEERS / "run_sagc_step.py", settings) as worker:
        answers = [worker.rollout([[5, 6, 7]], [[1, 4, 2]], seed) for seed in range(2)]
    assert [answer["output_tokens"] for answer in answers] == [7, 7]
    assert answers[0]["seconds"]["update"] > 0


@pytest.mark.parametrize("bench", ["rollout", "kernels", "controller", "step", "train", "compare"])
def test_the_help_of_every_bench_ends_with_examples(bench, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["bench", bench, "--help"])
    examples = capsys.readouterr().out.partition("\nexamples:\n")[2].splitlines()
    assert len(examples) >= 2
    assert all(line.startswith(f"  sagc-fast bench {bench}") for line in examples)
