"""``sagc-fast bench train``: optimizer steps of the shipped addition policy, beside TRL's trainer.

Both start every run from the same weights on the same problems, prompts per step, group size and learning rate, and
sample until the policy itself ends. The tokens drawn differ, so rates per sampled token are what compares.
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


def run(
    steps: int, threads: int, runs: int, pythons: dict[str, str], label: str | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """The record: seconds per step and sampled tokens per second, CPU and wall, of both trainers."""
    from sagc_fast.tasks.addition import policy_folder

    clock = "cpu" if threads == 1 else "wall"
    settings = {
        "model": str(policy_folder()), "threads": threads, "num_prompts": NUM_PROMPTS, "group_size": GROUP_SIZE,
        "max_new_tokens": MAX_NEW_TOKENS, "learning_rate": LEARNING_RATE,
    }  # fmt: skip
    comparable = {**settings, "model": "addition", "steps": steps}
    record = new_record("train", comparable, threads, label)
    request = {"steps": steps, "problems": _problems(steps)}
    with ExitStack() as stack:
        say(f"starting {OURS}")
        workers = {OURS: stack.enter_context(Worker(OURS, OWN_PYTHON, PEERS / "run_sagc_train.py", settings))}
        python = find_python(TRL, pythons)
        if isinstance(python, Absent):
            record["absent"].append(asdict(python))
        else:
            say("starting TRL")
            try:
                workers[TRL.name] = stack.enter_context(Worker(TRL.name, python, PEERS / TRL.script, settings))
            except PeerError as error:
                record["notes"].append(str(error))
        answers = _take_turns(workers, request, runs, record, say)
    for name, done in answers.items():
        if done:
            record["results"].append(_result(name, workers[name], answers, steps, clock))
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
    workers: dict[str, Worker], request: dict[str, Any], runs: int, record: dict[str, Any], say: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """One warm-up step each, then whole runs in turn. TRL drops out when it fails."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    active = dict(workers)
    for turn in range(-1, runs):
        for name in list(active):
            say(f"warming up {name}" if turn < 0 else f"run {turn + 1} of {runs}: {name}")
            try:
                answer = active[name].run(request | {"steps": 1} if turn < 0 else request)
            except PeerError as error:
                if name == OURS:
                    raise
                record["notes"].append(str(error))
                del active[name]
                continue
            if turn >= 0:
                answers[name].append(answer)
    return answers


def _result(
    name: str, worker: Worker, answers: dict[str, list[dict[str, Any]]], steps: int, clock: str
) -> dict[str, Any]:
    done = answers[name]
    metrics = {}
    for each in ("cpu", "wall"):
        seconds = [answer[f"{each}_seconds"] for answer in done]
        is_primary = name == OURS and each == clock
        tokens = [answer["output_tokens"] / s for answer, s in zip(done, seconds, strict=True)]
        metrics[f"{each}_seconds_per_step"] = metric([s / steps for s in seconds], "s", "lower")
        metrics[f"tokens_per_{each}_second"] = metric(tokens, "tokens/s", "higher", is_primary)
    facts = {**worker.facts, "runs": len(done), "output_tokens": done[-1]["output_tokens"]}
    facts["seconds"] = {phase: rounded(value) for phase, value in done[-1]["seconds"].items()}
    if done[-1].get("peak_rss_bytes"):
        metrics["peak_rss"] = metric([done[-1]["peak_rss_bytes"] / 1e6], "MB", "lower")
    if name != OURS:
        rates = [
            [answer["output_tokens"] / answer[f"{clock}_seconds"] for answer in side] for side in (answers[OURS], done)
        ]
        interval = ratio_interval(*rates, is_paired=True)
        facts["ours_is_faster_by"] = {key: rounded(value) for key, value in asdict(interval).items()}
    return result(name, metrics, **facts)
