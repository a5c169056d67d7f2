"""``sagc-fast bench train``: a few optimizer steps of the shipped addition policy beside TRL's trainer.

From the same weights on the same problems, prompts per step, group size and learning rate. Completions end by
themselves, so rates per sampled token are what compares; ``bench step`` (step.py) forces lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from sagc_fast.bench.engines import OURS, OWN_PYTHON, PEERS, TRL, Absent, find_python
from sagc_fast.bench.record import metric, new_record, result, rounded
from sagc_fast.bench.stats import ratio_interval
from sagc_fast.bench.worker import PeerError, Worker

NUM_PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS = 16, 8, 256
LEARNING_RATE = 1e-4
Say = Callable[[str], None]


def run_train(
    steps: int, threads: int, runs: int, pythons: dict[str, str], label: str | None, say: Say
) -> dict[str, Any]:
    """The record of ``steps`` optimizer steps of the addition policy: seconds per step and tokens per second."""
    from sagc_fast.tasks.addition import policy_folder

    fixed = {
        "threads": threads, "num_prompts": NUM_PROMPTS, "group_size": GROUP_SIZE, "max_new_tokens": MAX_NEW_TOKENS,
        "learning_rate": LEARNING_RATE,
    }  # fmt: skip
    record = new_record("train", {"model": "addition", "steps": steps, **fixed}, threads, label)
    problems = _problems(steps)

    def request(run: int) -> dict[str, Any]:
        return {"steps": steps if run else 1, "problems": problems}

    settings = {"model": str(policy_folder()), **fixed}
    with ExitStack() as stack:
        say(f"starting {OURS}")
        workers = {OURS: stack.enter_context(Worker(OURS, OWN_PYTHON, PEERS / "run_sagc_train.py", settings))}
        python = find_python(TRL, pythons)
        if isinstance(python, Absent):
            record["absent"].append(asdict(python))
        else:
            say("starting TRL")
            try:
                script = PEERS / "run_trl_train.py"
                workers[TRL.name] = stack.enter_context(Worker(TRL.name, python, script, settings))
            except PeerError as error:
                record["notes"].append(str(error))
        answers = _take_turns(workers, request, runs, record, say)
    for name, done in answers.items():
        if done:
            record["results"].append(_result(name, workers[name], answers, steps, threads))
    return record


def _problems(steps: int) -> list[dict[str, str]]:
    """What the addition task draws first, as TRL takes it."""
    from sagc_fast.config import TrainConfig
    from sagc_fast.tasks.base import make_task

    config = TrainConfig.from_dict({"model": {"path": "addition"}, "task": {"name": "addition"}}, where="bench train")
    task = make_task(config.task, seed=config.seed)
    drawn = (task.problem("train", index) for index in range(steps * NUM_PROMPTS))
    return [{"prompt": problem.prompt, "answer": str(problem.answer)} for problem in drawn]


def _take_turns(
    workers: dict[str, Worker], request: Callable[[int], dict[str, Any]], runs: int, record: dict[str, Any], say: Say
) -> dict[str, list[dict[str, Any]]]:
    """The answers to request(1), ... request(runs). TRL drops out when it fails."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    active = dict(workers)
    for run in range(runs + 1):
        asked = request(run)
        for name in list(active):
            say(f"run {run} of {runs}: {name}" if run else f"warming up {name}")
            try:
                answer = active[name].run(asked)
            except PeerError as error:
                if name == OURS:
                    raise
                record["notes"].append(str(error))
                del active[name]
                continue
            if run:
                answers[name].append(answer)
    return answers


def _result(
    name: str, worker: Worker, answers: dict[str, list[dict[str, Any]]], steps: int, threads: int
) -> dict[str, Any]:
    clock = "cpu" if threads == 1 else "wall"
    done = answers[name]
    metrics = {}
    for each in ("cpu", "wall"):
        metrics[f"{each}_seconds_per_step"] = metric([a[f"{each}_seconds"] / steps for a in done], "s", "lower")
        is_primary = name == OURS and each == clock
        metrics[f"tokens_per_{each}_second"] = metric(_rates(done, each), "tokens/s", "higher", is_primary)
    if done[-1].get("peak_rss_bytes"):
        metrics["peak_rss"] = metric([done[-1]["peak_rss_bytes"] / 1e6], "MB", "lower")
    facts = {**worker.facts, "runs": len(done), "output_tokens": done[-1]["output_tokens"]}
    facts["seconds"] = {
        phase: rounded(sorted(a["seconds"][phase] for a in done)[len(done) // 2]) for phase in done[0]["seconds"]
    }
    if name != OURS:
        pairs = min(len(done), len(answers[OURS]))
        interval = ratio_interval(_rates(answers[OURS], clock)[:pairs], _rates(done, clock)[:pairs], is_paired=True)
        facts["ours_is_faster_by"] = {key: rounded(value) for key, value in asdict(interval).items()}
    return result(name, metrics, **facts)


def _rates(answers: list[dict[str, Any]], clock: str) -> list[float]:
    """Sampled tokens per second of each run."""
    return [answer["output_tokens"] / answer[f"{clock}_seconds"] for answer in answers]
