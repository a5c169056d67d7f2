"""Builds the parts of a run from its configuration: engine, task, controller, optimizer. What they do is elsewhere."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sagc_fast.config import ControllerOptions, TrainConfig
from sagc_fast.controller import SAGC, CostAwareConfig, CostAwareSAGC, FixedG, PromptAwareSAGC, SAGCConfig
from sagc_fast.errors import CheckpointError
from sagc_fast.model.loader import load_model, load_tokenizer, save_model
from sagc_fast.model.lora import LoraSpec, attach
from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.tasks.addition import model_folder
from sagc_fast.train.checkpoint import Checkpoint
from sagc_fast.train.distributed import Processes, local_device
from sagc_fast.train.optimizer import PolicyOptimizer

logger = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"
LENGTHS_FILE = "length_history.json"
"""Of the first process; the others' have their rank in the name."""


def build_engine(config: TrainConfig, checkpoint: Checkpoint | None, processes: Processes) -> RolloutEngine:
    """The engine around the one copy of the policy: the starting weights, or the checkpoint's.

    Raises ModelLoadError for a folder that cannot be read or has no tokenizer (rewards need text).
    """
    is_adapted = config.lora.rank > 0
    folder = model_folder(config.model.path) if checkpoint is None or is_adapted else checkpoint.path
    options = asdict(config.rollout)
    names = ("kv_budget_gb", "block_size", "max_num_seqs", "max_batch_tokens", "speculation", "graphs")
    engine_options = {name: options[name] for name in names}
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, dtype=config.model.dtype, device=local_device(config.model.device))
    if is_adapted:
        _attach_adapters(model, folder, config, checkpoint)
    engine = RolloutEngine(model, tokenizer, **engine_options)
    if checkpoint is not None:  # the history orders admission, so idle rows and preemptions depend on it
        path = _lengths_path(checkpoint.path, processes.rank)
        if path.is_file():  # missing when more processes go on than wrote the checkpoint
            engine.lengths.restore(json.loads(path.read_text(encoding="utf-8")))
    return engine


def _attach_adapters(model: Any, folder: Path, config: TrainConfig, checkpoint: Checkpoint | None) -> None:
    options = config.lora
    spec = LoraSpec(options.rank, options.alpha, options.dropout, options.target_modules, options.use_rslora)
    adapters = attach(model, folder, spec, config.seed)
    if checkpoint is not None:
        adapters.load(checkpoint.path)
    elif options.init_from is not None:
        adapters.load(Path(options.init_from))
    adapters.merge()


def build_reference(config: TrainConfig) -> torch.nn.Module | None:
    """The starting model, frozen, when the algorithm penalises the distance to it and no adapter stands on it."""
    if not config.algorithm.loss.needs_reference or config.lora.rank > 0:
        return None
    folder = model_folder(config.model.path)
    device = local_device(config.model.device)
    return load_model(folder, dtype=config.model.dtype, device=device).requires_grad_(False)


def build_controller(options: ControllerOptions, seed: int, max_length: int) -> Any:
    """The controller of ``options.kind``, its draws keyed by the run's seed; compiled before the first step's clock."""

    def given(record: type) -> dict[str, Any]:
        names = {f.name for f in fields(record)}
        return {name: value for name, value in asdict(options).items() if name in names}

    make: Callable[[], Any]
    if options.kind == "fixed":
        make = partial(FixedG, options.group_size, tau=options.tau, delta=options.delta, max_length=max_length)
    elif options.kind == "cost_aware":
        make = partial(CostAwareSAGC, CostAwareConfig(**given(CostAwareConfig)))
    else:  # one record for both controllers below: what it warns of is said once
        config = SAGCConfig(**given(SAGCConfig), max_length=max_length)
        if options.kind == "prompt_aware":
            make = partial(PromptAwareSAGC, config, seed=seed, strength=options.strength)
        else:
            make = partial(SAGC, config, seed=seed)
    make().observe([[1, 1]], problem_ids=[0])
    return make()


def save_tensors(
    folder: Path, engine: RolloutEngine, optimizer: PolicyOptimizer, length_histories: Sequence[dict[str, Any]]
) -> None:
    """Weights in Hugging Face format, or adapters in peft's, with the tokenizer; beside them the optimizer and every
    engine's length history."""
    if engine.model.adapters is None:
        save_model(engine.model, folder, tokenizer=engine.tokenizer)
    else:
        engine.model.adapters.save(folder)
        engine.tokenizer.save_pretrained(folder)
    for rank, history in enumerate(length_histories):
        _lengths_path(folder, rank).write_text(json.dumps(history), encoding="utf-8")
    save_file({k: v.contiguous() for k, v in optimizer.state_tensors().items()}, folder / OPTIMIZER_FILE)


def _lengths_path(folder: Path, rank: int) -> Path:
    path = folder / LENGTHS_FILE
    return path.with_stem(f"{path.stem}-{rank}") if rank else path


def load_optimizer(checkpoint: Checkpoint, optimizer: PolicyOptimizer) -> None:
    """Continue with the moments and masters of ``checkpoint``. Raises CheckpointError when they are another model's."""
    path = checkpoint.path / OPTIMIZER_FILE
    try:
        optimizer.load_state_tensors(load_file(path), checkpoint.state["num_updates"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} belongs to another model or dtype ({error}); resume with the old ones."
        ) from None


@contextlib.contextmanager
def reproducible_torch(device: str, threads: int | None) -> Iterator[None]:
    """Within: the configured threads, and on the CPU only algorithms whose sums have a fixed order."""
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    if threads is not None:
        torch.set_num_threads(threads)
    if device == "cpu":
        torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import the compiler: seconds
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs a pass over memory
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Within: the package says nothing but errors."""
    package = logging.getLogger("sagc_fast")
    before = package.level
    package.setLevel(logging.ERROR)
    try:
        yield
    finally:
        package.setLevel(before)


@contextlib.contextmanager
def warnings_in_the_log() -> Iterator[None]:
    """Within: Python warnings become log lines, which reach the display without tearing it."""

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        logger.warning("%s", message)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def dump_groups(path: Path, step: int, groups: list[Any]) -> None:
    """Write the prompts and completions behind a loss or gradient that was not finite, for a person to look at."""
    rows = [
        {
            "problem_id": g.problem.problem_id,
            "prompt": g.problem.prompt,
            "rewards": g.rewards,
            "lengths": g.group.lengths,
            "completions": [c.text for c in g.group.completions],
        }
        for g in groups
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"step": step, "groups": rows}, ensure_ascii=False, indent=1), encoding="utf-8")
