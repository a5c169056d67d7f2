"""``sagc-fast bench rollout``: this engine and its peers on one workload, in turns, against the machine's ceilings."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sagc_fast.bench import bound
from sagc_fast.bench.engines import ENGINES, EXPORT_ENGINE, EXPORTER, OURS, OWN_PYTHON, PEERS, Absent, find_python
from sagc_fast.bench.models import Shape, cache_folder, model_folder, shape_of
from sagc_fast.bench.record import metric, new_record, result, rounded
from sagc_fast.bench.stats import ratio_interval
from sagc_fast.bench.worker import PeerError, Worker
from sagc_fast.bench.workload import Workload
from sagc_fast.errors import ModelLoadError

WARMUP_LENGTH = 8
CURVE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CURVE_PROMPT = 160
LARGE_ELEMENTS = 2 * 10**8
"""From this many weights on, the decode curve takes fewer steps: they cost a tenth of a second each."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What is measured. Two records with equal settings may be compared."""

    model: str
    dtype: str
    threads: int
    workload: Workload
    peers: tuple[str, ...]
    runs: int
    peer_seconds: float
    """Peers take turns until their runs took so long; each gets one at least."""
    has_curve: bool = True
    pythons: dict[str, str] = field(default_factory=dict)
    kv_dtype: str | None = None
    """Of keys and values, in the engines that can be told; None: what each does of itself."""

    @property
    def clock(self) -> str:
        """One thread is judged by CPU seconds, which other work on the machine does not change; several by the wall."""
        return "cpu" if self.threads == 1 else "wall"

    def comparable(self) -> dict[str, Any]:
        kv = {} if self.kv_dtype is None else {"kv_dtype": self.kv_dtype}
        workload = {"workload": asdict(self.workload)}
        return {"model": self.model, "dtype": self.dtype, **kv, "threads": self.threads, **workload}


def run(settings: RolloutSettings, label: str | None, say: Say) -> dict[str, Any]:
    """The record. Raises SagcError for a model that cannot be used; a peer's failure is noted in the record."""
    folder = model_folder(settings.model, settings.dtype)
    shape = shape_of(folder)
    record = new_record("rollout", settings.comparable(), settings.threads, label)
    record["workload"] = settings.workload.describe()
    say("measuring what the machine can do")
    ceilings = _ceilings(shape, settings)
    record["ceilings"] = ceilings.to_dict()
    with ExitStack() as stack:
        workers = _start(settings, folder, shape, record, stack, say)
        answers = _take_turns(workers, settings, record, say)
        curve = None
        if settings.has_curve:
            say("measuring the cost of a step by live rows")
            curve = _decode_curve(workers[OURS], settings, shape, ceilings)
    for name in workers:
        if answers[name]:
            record["results"].append(_result(name, workers[name], answers, settings))
    _add_bound(record, settings, shape, ceilings, answers[OURS])
    record["curve"] = curve
    return record


# ---- engines -----------------------------------------------------------------------------------------------------


def _start(
    settings: RolloutSettings, folder: Path, shape: Shape, record: dict[str, Any], stack: ExitStack, say: Say
) -> dict[str, Worker]:
    """This engine, and every peer that is there and starts."""
    say(f"starting {OURS}")
    options = _worker_settings(settings, folder, shape)
    workers = {OURS: stack.enter_context(Worker(OURS, OWN_PYTHON, PEERS / "run_sagc.py", options))}
    for name in settings.peers:
        engine = ENGINES[name]
        python = find_python(engine, settings.pythons)
        if isinstance(python, Absent):
            record["absent"].append(asdict(python))
            continue
        if settings.kv_dtype not in (None, settings.dtype) and not engine.takes_kv_dtype:
            record["notes"].append(f"{engine.title} keeps keys and values in {settings.dtype}, as its model is.")
        try:
            own = options
            if (export := EXPORTS.get(name)) is not None:
                own = options | {"model": str(export(folder, settings, say).resolve())}
            say(f"starting {engine.title}")
            workers[name] = stack.enter_context(Worker(name, python, PEERS / engine.script, own))
        except PeerError as error:
            record["notes"].append(str(error))
    return workers


def _worker_settings(settings: RolloutSettings, folder: Path, shape: Shape) -> dict[str, Any]:
    """Room for the whole workload in every engine, those included that share no prompt: nobody has to preempt."""
    about = settings.workload.describe()
    itemsize = bound.ITEM_BYTES[settings.kv_dtype or settings.dtype]
    kv_tokens = about["repeated_prompt_tokens"] + about["output_tokens"]
    kv_bytes = kv_tokens * 2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize
    return {
        "model": str(folder.resolve()),
        "dtype": settings.dtype,
        "kv_dtype": settings.kv_dtype,
        "threads": settings.threads,
        "max_rows": max(about["completions"], max(CURVE_ROWS) if settings.has_curve else 1),
        "max_context": settings.workload.max_prompt + settings.workload.max_length + 16,
        "kv_gb": math.ceil(1.1 * kv_bytes / 1e9),
    }


def _exported(folder: Path, settings: RolloutSettings, say: Say) -> Path:
    """The model in OpenVINO's format, exported on first use into the cache. PeerError when nothing can export it."""
    if (folder / "openvino_model.xml").exists():
        return folder
    out = cache_folder() / "openvino" / folder.resolve().name
    if (out / "openvino_model.xml").exists():
        return out
    python = find_python(EXPORT_ENGINE, settings.pythons)
    if isinstance(python, Absent):
        raise PeerError(f"openvino needs the model exported once, and {python.reason}; {python.install}.")
    say(f"exporting {folder.name} to OpenVINO")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}-unfinished")
    command = [python, str(PEERS / EXPORT_ENGINE.script), str(folder.resolve()), str(aside)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not (aside / "openvino_model.xml").exists():
        reason = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise PeerError(f"{EXPORTER} failed on {folder}: {reason.rstrip('.')}.")
    aside.rename(out)
    return out


def _as_gguf(folder: Path, settings: RolloutSettings, say: Say) -> Path:
    """The model as a GGUF file, written on first use into the cache. PeerError when the model cannot be written so."""
    from sagc_fast.bench.gguf_export import export_gguf

    out = cache_folder() / "gguf" / f"{folder.resolve().name}-{settings.dtype}.gguf"
    if out.exists():
        return out
    say(f"exporting {folder.name} to GGUF")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}-unfinished")
    try:
        export_gguf(folder, aside, settings.dtype)
    except ModelLoadError as error:
        raise PeerError(f"llamacpp needs the model as a GGUF file: {error}") from error
    aside.rename(out)
    return out


EXPORTS = {"openvino": _exported, "llamacpp": _as_gguf}
"""Peers that read a format of their own."""


# ---- runs --------------------------------------------------------------------------------------------------------


def _take_turns(
    workers: dict[str, Worker], settings: RolloutSettings, record: dict[str, Any], say: Say
) -> dict[str, list[dict[str, Any]]]:
    """Warm-up apart, then one run of each in turn; every second turn backwards. A peer that fails drops out."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    lengths = settings.workload.lengths()
    warmup = [[min(WARMUP_LENGTH, length) for length in group[:2]] for group in lengths]
    active = dict(workers)

    def attempt(name: str, run: int, lengths: list[list[int]]) -> dict[str, Any] | None:
        try:
            return active[name].rollout(settings.workload.prompts(run), lengths, seed=run)
        except PeerError as error:
            if name == OURS:
                raise
            record["notes"].append(str(error))
            del active[name]
            return None

    for name in list(active):
        attempt(name, 0, warmup)
    for turn in range(settings.runs):
        for name in list(active) if turn % 2 == 0 else list(reversed(active)):
            spent = sum(answer["wall_seconds"] for answer in answers[name])
            if name != OURS and answers[name] and spent * (turn + 1) / turn > settings.peer_seconds:
                continue
            say(f"run {turn + 1} of {settings.runs}: {name}")
            if (answer := attempt(name, turn + 1, lengths)) is not None:
                answers[name].append(answer | {"turn": turn})
    return answers


def _decode_curve(worker: Worker, settings: RolloutSettings, shape: Shape, ceilings: Any) -> list[dict[str, float]]:
    """Seconds of a decode step by live rows: the difference of two rollouts that differ in their length alone."""
    short, extra = WARMUP_LENGTH, 8 if shape.weight_elements > LARGE_ELEMENTS else 32
    points = []
    for rows in CURVE_ROWS:
        num_prompts, group = max(1, rows // 16), min(rows, 16)
        seconds = []
        for length in (short, short + extra):
            load = Workload(num_prompts, group, min_prompt=CURVE_PROMPT, max_prompt=CURVE_PROMPT)
            runs = [
                worker.rollout(load.prompts(run), [[length] * group] * num_prompts, seed=run)
                for run in range(min(settings.runs, 3))
            ]
            seconds.append(min(answer[f"{settings.clock}_seconds"] for answer in runs))
        step = max(seconds[1] - seconds[0], 1e-9) / extra
        flops = bound.decode_flops(shape, rows, CURVE_PROMPT + short + extra / 2)
        rate = ceilings.gemm_flops[settings.dtype].per_second(settings.clock)
        points.append(
            {
                "rows": rows,
                "step_milliseconds": rounded(1e3 * step),
                "row_microseconds": rounded(1e6 * step / rows),
                "share_of_gemm_rate": rounded(flops / step / rate),
            }
        )
    return points


def _ceilings(shape: Shape, settings: RolloutSettings) -> Any:
    import torch

    from sagc_fast.bench.ceilings import measure_ceilings

    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with torch.inference_mode():
            return measure_ceilings(shape.products(), (settings.dtype,))
    finally:
        torch.set_num_threads(before)


# ---- figures -----------------------------------------------------------------------------------------------------


def _result(
    name: str, worker: Worker, answers: dict[str, list[dict[str, Any]]], settings: RolloutSettings
) -> dict[str, Any]:
    """Metrics of one engine over its runs, and the ratio of ours to it."""
    runs = answers[name]
    tokens = sum(map(sum, settings.workload.lengths()))
    speeds = {clock: [tokens / run[f"{clock}_seconds"] for run in runs] for clock in ("cpu", "wall")}
    is_ours = name == OURS
    metrics = {
        "output_tokens_per_cpu_second": metric(
            speeds["cpu"], "tokens/s", "higher", is_ours and settings.clock == "cpu"
        ),
        "output_tokens_per_second": metric(speeds["wall"], "tokens/s", "higher", is_ours and settings.clock == "wall"),
    }
    facts = {"runs": len(runs), **worker.facts}
    if runs[-1].get("peak_rss_bytes"):
        metrics["peak_rss"] = metric([runs[-1]["peak_rss_bytes"] / 1e6], "MB", "lower")
    for key in ("steps", "row_steps", "prefill_tokens", "kv_bytes", "seconds", "active_rows"):
        if key in runs[-1]:
            facts[key] = runs[-1][key]
    if "row_steps" in facts:
        facts["unused_fraction"] = rounded(1 - tokens / facts["row_steps"])
    if not is_ours:
        facts["ours_is_faster_by"] = _advantage(answers[OURS], runs, settings.clock)
    return result(name, metrics, **facts)


def _advantage(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], clock: str) -> dict[str, float]:
    """Their seconds over ours, in the turns that both ran, with a 95% interval."""
    mine = {answer["turn"]: answer[f"{clock}_seconds"] for answer in ours}
    pairs = [(answer[f"{clock}_seconds"], mine[answer["turn"]]) for answer in theirs]
    interval = ratio_interval(*zip(*pairs, strict=True), is_paired=True)
    return {key: rounded(value) for key, value in asdict(interval).items()}


def _add_bound(
    record: dict[str, Any], settings: RolloutSettings, shape: Shape, ceilings: Any, ours: list[dict[str, Any]]
) -> None:
    """The bound of this engine's own run, the share of it that was reached, and the memory beside its parts."""
    prompts = [len(ids) for ids in settings.workload.prompts()]
    flops = bound.rollout_flops(shape, prompts, settings.workload.lengths())
    limit = bound.rollout_bound(shape, settings.dtype, ceilings, ours[-1]["steps"], flops, settings.clock)
    seconds = metric([answer[f"{settings.clock}_seconds"] for answer in ours], "s", "lower")["median"]
    weight_bytes = shape.weight_elements * bound.ITEM_BYTES[settings.dtype]
    record["bound"] = {
        **{key: rounded(value) if isinstance(value, float) else value for key, value in limit.to_dict().items()},
        "reached": rounded(limit.seconds / seconds),
        "output_tokens_per_second": rounded(record["workload"]["output_tokens"] / limit.seconds),
    }
    record["memory"] = {
        "peak_rss_mb": rounded((ours[-1]["peak_rss_bytes"] or 0) / 1e6),
        "weights_mb": rounded(weight_bytes / 1e6),
        "kv_mb": rounded(ours[-1]["kv_bytes"] / 1e6),
    }
