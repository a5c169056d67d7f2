"""``sagc-fast bench step``: one GRPO step, generation and update, by phase, beside TRL's GRPOTrainer.

The same model, prompts and forced completion lengths for both. Every trainer is a process of its own and takes its
turn; CPU seconds are compared. In ``bf16`` ours holds bf16 parameters with fp32 masters, TRL bf16 parameters alone. The
update is held against the rate that the model's dense products reach alone in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sagc_fast.bench.engines import OURS, OWN_PYTHON, PEERS, TRL, Absent, find_python
from sagc_fast.bench.models import model_folder, shape_of
from sagc_fast.bench.record import metric, new_record, result, rounded
from sagc_fast.bench.stats import ratio_interval
from sagc_fast.bench.worker import PeerError, Worker
from sagc_fast.bench.workload import Workload

LEARNING_RATE = 1e-5
QUICK = Workload(num_prompts=2, group_size=4, mean_length=16.0, max_length=32)
WARM_UP = Workload(num_prompts=2, group_size=2, mean_length=16.0, max_length=32)
GEMM_ROWS = 2048
"""Rows of the products that make the ceiling: about those of a micro-batch."""
PHASES = ("rollout", "forward", "backward", "optimizer", "update", "step")
COMPARED = ("rollout", "update", "step")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What is measured. ``peer_dtypes``: in which TRL runs; ``pythons``: interpreter by peer's name."""

    model: str
    dtypes: tuple[str, ...]
    peer_dtypes: tuple[str, ...]
    workload: Workload
    threads: int
    runs: int
    pythons: dict[str, str]


def run_step(settings: StepSettings, label: str | None, say: Say) -> dict[str, Any]:
    """The record: seconds of every phase and tokens per second of each trainer, ``ratios`` of every peer to each of
    ours, and ``update`` by dtype, the operations of ours and their share of the ceiling."""
    workload = settings.workload
    threads = settings.threads
    fixed = {"threads": threads, "max_length": workload.max_length, "learning_rate": LEARNING_RATE}
    record = new_record("step", {"model": settings.model, **fixed, "workload": asdict(workload)}, threads, label)
    record |= {"workload": workload.describe(), "ratios": {}, "update": {}}
    folders = {dtype: model_folder(settings.model, dtype) for dtype in (*settings.dtypes, *settings.peer_dtypes)}
    with ExitStack() as stack:

        def start(name: str, dtype: str, python: str, script: str) -> Worker:
            say(f"starting {name} {dtype}")
            options = {**fixed, "model": str(folders[dtype]), "dtype": dtype}
            return stack.enter_context(Worker(f"{name} {dtype}", python, PEERS / script, options))

        workers = [start(OURS, dtype, OWN_PYTHON, "run_sagc_step.py") for dtype in settings.dtypes]
        python = find_python(TRL, settings.pythons)
        if isinstance(python, Absent):
            record["absent"].append(asdict(python))
        else:
            for dtype in settings.peer_dtypes:
                try:
                    workers.append(start(TRL.name, dtype, python, "run_trl_step.py"))
                except PeerError as error:
                    record["notes"].append(str(error))
        answers = _take_turns(workers, workload, settings.runs, record["notes"], say)
        say("ceilings")
        record["ceilings"] = _ceilings(shape_of(folders[settings.dtypes[0]]).products(), settings)
    done = {worker.name: worker for worker in workers if answers[worker.name]}
    for name, worker in done.items():
        record["results"].append(_result(worker, answers[name], threads))
    ours = [name for name in done if name.startswith(OURS)]
    for peer in (name for name in done if name not in ours):
        for name in ours:
            record["ratios"][f"{peer} / {name}"] = _ratios(answers[peer], answers[name])
    for dtype, name in zip(settings.dtypes, ours, strict=True):
        rate = record["ceilings"]["gemm_flops"][dtype]["per_cpu_second"]
        record["update"][dtype] = _update_facts(workload, folders[dtype], answers[name], rate)
    return record


def update_flops(workload: Workload, folder: Path) -> dict[str, float]:
    """Floating-point operations of one update by the formula, each prompt counted once. Backward costs twice the
    forward; the head computes its logits again, attention its scores (5 products to 2)."""
    shape, lengths = shape_of(folder), workload.lengths()
    prompts = [len(ids) for ids in workload.prompts()]
    completion_tokens = sum(map(sum, lengths))
    pairs = sum(
        p * (p + 1) / 2 + sum(n * (p + (n + 1) / 2) for n in group) for p, group in zip(prompts, lengths, strict=True)
    )
    return {
        "layers": 3 * shape.layer_flops_per_token() * (sum(prompts) + completion_tokens),
        "head": 4 * shape.head_flops_per_row() * completion_tokens,
        "attention": 3.5 * shape.attention_flops(pairs),
    }


def _take_turns(
    workers: list[Worker], workload: Workload, runs: int, notes: list[str], say: Say
) -> dict[str, list[dict[str, Any]]]:
    """Every trainer's answers. A peer drops out when it fails or does other work than it should."""
    answers: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    active = list(workers)
    for run in range(runs + 1):
        asked = workload if run else WARM_UP
        for worker in list(active):
            say(f"run {run} of {runs}: {worker.name}" if run else f"warming up {worker.name}")
            try:
                answer = worker.rollout(asked.prompts(run), asked.lengths(), run)
            except PeerError as error:
                if worker.name.startswith(OURS):
                    raise
                notes.append(str(error))
                active.remove(worker)
                continue
            if run:
                answer["seconds"]["step"] = answer["seconds"]["rollout"] + answer["seconds"]["update"]
                answers[worker.name].append(answer)
                phases = ", ".join(f"{name} {answer['seconds'].get(name, 0.0):.2f}" for name in PHASES)
                say(f"run {run} of {runs}: {worker.name}: CPU seconds {phases}")  # kept when the bench is stopped
    return answers


def _ceilings(products: list[Any], settings: StepSettings) -> dict[str, Any]:
    import torch

    from sagc_fast.bench.ceilings import measure_ceilings

    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        return measure_ceilings(products, settings.dtypes, GEMM_ROWS).to_dict()
    finally:
        torch.set_num_threads(before)


def _result(worker: Worker, answers: list[dict[str, Any]], threads: int) -> dict[str, Any]:
    metrics = {}
    for phase in PHASES:
        values = [answer["seconds"].get(phase, 0.0) for answer in answers]
        metrics[f"{phase}_cpu"] = metric(values, "s", "lower")
    for clock in ("cpu", "wall"):
        rates = [answer["output_tokens"] / answer[f"{clock}_seconds"] for answer in answers]
        is_primary = worker.name.startswith(OURS) and clock == ("cpu" if threads == 1 else "wall")
        metrics[f"tokens_per_{clock}_second"] = metric(rates, "tokens/s", "higher", is_primary)
    if answers[-1].get("peak_rss_bytes"):
        metrics["peak_rss"] = metric([answers[-1]["peak_rss_bytes"] / 1e6], "MB", "lower")
    return result(worker.name, metrics, **worker.facts, runs=len(answers), output_tokens=answers[-1]["output_tokens"])


def _ratios(peer: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By phase: how many times the peer's CPU seconds exceed ours, with the interval of the paired medians."""
    pairs = min(len(peer), len(ours))

    def seconds(answers: list[dict[str, Any]], phase: str) -> list[float]:
        return [answer["seconds"][phase] for answer in answers[:pairs]]

    found = {phase: ratio_interval(seconds(peer, phase), seconds(ours, phase), is_paired=True) for phase in COMPARED}
    return {phase: {k: rounded(v) for k, v in asdict(interval).items()} for phase, interval in found.items()}


def _update_facts(workload: Workload, folder: Path, answers: list[dict[str, Any]], rate: float) -> dict[str, Any]:
    flops = update_flops(workload, folder)
    reached = sum(flops.values()) / median(answer["seconds"]["update"] for answer in answers)
    return {
        "gflop": {name: rounded(value / 1e9) for name, value in flops.items()},
        "gflops": rounded(reached / 1e9),
        "share_of_gemm_rate": rounded(reached / rate),
    }
