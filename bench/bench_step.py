"""One whole GRPO step, generation and update, beside TRL's GRPOTrainer: the same model, prompts and completion lengths.

    python bench/bench_step.py --peer-python /path/to/trl/bin/python
    python bench/bench_step.py --ours bf16 --group-size 8 --runs 5          # ours alone

`sagc-fast bench step` compares whole steps in fp32 with intervals; this shows phases, both dtypes and the ceiling.
Every trainer is a process of its own with one thread; runs alternate, CPU seconds are compared. Under `bf16` ours holds
bf16 parameters with fp32 masters, TRL bf16 parameters alone. Prints a table of phases, the update's rate against the
rate that the model's matrix products reach alone, the ratios, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from sagc_fast.bench.ceilings import gemm_rate
from sagc_fast.bench.engines import OWN_PYTHON, PEERS
from sagc_fast.bench.machine import commit, describe_machine
from sagc_fast.bench.models import model_folder, shape_of
from sagc_fast.bench.worker import Worker
from sagc_fast.bench.workload import Workload

PHASES = ("rollout", "forward", "backward", "optimizer", "update", "step")
WARM_UP = Workload(num_prompts=2, group_size=2, mean_length=16, max_length=32)
GEMM_ROWS = 2048


def update_flops(workload: Workload, folder: Path) -> dict[str, float]:
    """Floating-point operations of one update by the formula, each prompt counted once. Backward costs twice the
    forward; the head computes its logits again, attention its scores (5 products to 2)."""
    shape, lengths = shape_of(folder), workload.lengths()
    prompts = [len(ids) for ids in workload.prompts()]
    completion_tokens = sum(map(sum, lengths))
    tokens = sum(prompts) + completion_tokens
    pairs = sum(
        p * (p + 1) / 2 + sum(n * (p + (n + 1) / 2) for n in group) for p, group in zip(prompts, lengths, strict=True)
    )
    return {
        "layers": 3 * shape.layer_flops_per_token() * tokens,
        "head": 4 * shape.head_flops_per_row() * completion_tokens,
        "attention": 3.5 * shape.attention_flops(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="S", help="S, M, smollm2 or a folder (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3, help="timed steps of each trainer (default: %(default)s)")
    parser.add_argument("--ours", default="fp32,bf16", help="dtypes of ours (default: %(default)s)")
    parser.add_argument("--peer-python", help="python of an environment with TRL; without it ours runs alone")
    parser.add_argument("--peer", default="fp32,bf16", help="dtypes of TRL (default: %(default)s)")
    options = parser.parse_args()
    workload = Workload(group_size=options.group_size)
    settings = {"threads": 1, "learning_rate": 1e-5, "max_length": workload.max_length}
    trainers = [("ours", dtype, OWN_PYTHON, "run_sagc_step.py") for dtype in options.ours.split(",")]
    if options.peer_python:
        trainers += [("TRL", dtype, options.peer_python, "run_trl_step.py") for dtype in options.peer.split(",")]
    folders = {dtype: model_folder(options.model, dtype) for _, dtype, *_ in trainers}
    answers: dict[str, list[dict[str, Any]]] = {}
    versions: dict[str, Any] = {}
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        workers = {}
        for name, dtype, python, script in trainers:
            chosen = {**settings, "model": str(folders[dtype]), "dtype": dtype}
            worker = stack.enter_context(Worker(f"{name} {dtype}", python, PEERS / script, chosen))
            worker.rollout(WARM_UP.prompts(), WARM_UP.lengths(), 0)
            workers[worker.name], answers[worker.name] = worker, []
            versions |= worker.facts["versions"]
        for run in range(options.runs):
            for name, worker in workers.items():
                started = time.time()
                answers[name].append(worker.rollout(workload.prompts(run), workload.lengths(), run))
                phases = {phase: round(value, 2) for phase, value in answers[name][-1]["seconds"].items()}
                print(f"run {run + 1} {name}: {time.time() - started:.0f} s of wall time, CPU {phases}", flush=True)
            for dtype in options.ours.split(","):
                shapes = shape_of(folders[dtype]).products()
                rates.setdefault(dtype, []).append(gemm_rate(shapes, dtype, GEMM_ROWS, repeats=2).per_second("cpu"))
    report(options, workload, folders, answers, rates, versions)


def report(
    options: argparse.Namespace, workload: Workload, folders: dict[str, Path], answers: dict[str, list[dict[str, Any]]],
    rates: dict[str, list[float]], versions: dict[str, Any],
) -> None:  # fmt: skip
    for done in answers.values():
        for answer in done:
            answer["seconds"]["step"] = answer["seconds"]["rollout"] + answer["seconds"]["update"]
    medians = {
        name: {phase: median(a["seconds"].get(phase, 0.0) for a in done) for phase in PHASES}
        for name, done in answers.items()
    }
    print(f"\nCPU seconds, median of {options.runs}; {workload.describe()['output_tokens']} completion tokens")
    print(f"{'':<12}" + "".join(f"{phase:>11}" for phase in PHASES))
    for name, row in medians.items():
        print(f"{name:<12}" + "".join(f"{row[phase]:>11.2f}" for phase in PHASES))
    facts: dict[str, Any] = {"medians": medians, "ceilings": {}, "ratios": {}}
    for dtype, measured in rates.items():
        flops, rate = update_flops(workload, folders[dtype]), median(measured)
        seconds = medians[f"ours {dtype}"]["update"]
        share = sum(flops.values()) / seconds / rate
        facts["ceilings"][dtype] = {
            "gflop": {k: v / 1e9 for k, v in flops.items()}, "gemm_gflops": rate / 1e9, "share": share,
        }  # fmt: skip
        print(
            f"ours {dtype}: {sum(flops.values()) / 1e9:.0f} GFLOP in {seconds:.2f} s of update, {share:.0%} of the "
            f"{rate / 1e9:.0f} GFLOP/s that the model's products reach alone in the same run"
        )
    for name in (name for name in medians if name.startswith("ours")):
        for peer in (name for name in medians if name.startswith("TRL")):
            ratios = {phase: medians[peer][phase] / medians[name][phase] for phase in ("rollout", "update", "step")}
            facts["ratios"][f"{peer} / {name}"] = ratios
            print(f"{peer} / {name}: " + ", ".join(f"{phase} {value:.1f}x" for phase, value in ratios.items()))
    runs = {name: [a["seconds"] for a in done] for name, done in answers.items()}
    peaks = {name: max(a["peak_rss_bytes"] or 0 for a in done) / 1e6 for name, done in answers.items()}
    record = {
        "bench": "step", "model": options.model, "workload": workload.describe(), "runs": runs, "peak_rss_mb": peaks,
        "versions": versions, "machine": describe_machine(1), "commit": commit(), **facts,
    }  # fmt: skip
    print(json.dumps(record))


if __name__ == "__main__":
    main()
