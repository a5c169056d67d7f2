"""The paper's experiment, docs/results.md: a pretrained model and two small policies, GRPO and DAPO, fixed G, SAGC and
its prompt-aware variant, up to three seeds; the fixed sizes through TRL's trainer as well. Runs, tables and figures.

    python bench/results_study.py --peer-python trl=PYTHON      # run what is missing, then write tables and figures
    python bench/results_study.py --draw-only                   # from the CSV files in docs/runs/results

A run whose figures stand in docs/runs/results is not run again, so the study can be stopped at any time and goes on
where it was. It needs `sagc-fast fetch smollm2`, reasoning-gym, and for the rows of TRL a Python that has trl. Runs use
one thread and one process, after one another; comparisons are in CPU seconds of the training process, because the wall
clock of a busy machine measures its neighbours; the wall clock is stored beside them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import results_figures
import results_tables
import studies
from results_grid import EQUAL_STEPS, OURS, STEP_FIELDS, Cell, cells
from studies import ROOT

if TYPE_CHECKING:
    from sagc_fast import TrainConfig

DOCUMENT = ROOT / "docs/results.md"

# ---- running ---------------------------------------------------------------------------------------------------------


def run_missing(work: Path, trl_python: str | None, only: str) -> None:
    import torch

    torch.set_num_threads(1)
    missing = [c for c in cells() if not c.is_done and only in c.name and (c.trainer == OURS or trl_python)]
    for number, cell in enumerate(missing, 1):
        began = time.monotonic()
        config = cell.config(work)
        if cell.model == "addition_large":
            make_large_policy(Path(config.model.path))
        steps, evaluations = run_ours(config) if cell.trainer == OURS else run_trl(cell, config, str(trl_python))
        if evaluations:
            studies.append(cell.heldout_file, cell.key, evaluations)
        studies.append(cell.file, cell.key, steps)  # last: this file says that the run is done
        seconds = steps[-1]["cpu_seconds"]
        print(f"{number}/{len(missing)} {cell.name}: {seconds:.0f} CPU s, {time.monotonic() - began:.0f} s", flush=True)


def make_large_policy(folder: Path) -> None:
    """The starting policy of ``addition_large``, made once."""
    from learning_policies import RECIPES, make_policy

    if not (folder / "tokenizer_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        loss = make_policy(RECIPES["addition_large"], {"name": "addition"}, folder)
        print(f"policy addition_large: {loss:.3f} nats per token", flush=True)


def run_ours(config: TrainConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows by step, rows by held-out evaluation)."""
    records = studies.train(config)
    sizes = [{"group_size": r["group_size_mean"]} if "group_size_mean" in r else {} for r in records]
    steps, evaluations = studies.split_records([r | size for r, size in zip(records, sizes, strict=True)], STEP_FIELDS)
    wall = accumulate(r["step_seconds"] for r in records if r["event"] != "eval")
    return [step | {"wall_seconds": round(total, 3)} for step, total in zip(steps, wall, strict=True)], evaluations


def run_trl(cell: Cell, config: TrainConfig, python: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The same through TRL; what it has trained is evaluated by this package, on the same problems."""
    from sagc_fast.tasks import make_task
    from sagc_fast.tasks.addition import model_folder

    task = make_task(config.task, seed=config.seed)
    num_prompts = config.rollout.prompts_per_step
    problems = [task.problem("train", index) for index in range(cell.steps * num_prompts)]
    with tempfile.TemporaryDirectory(prefix="results-study-") as folder:
        settings = {
            "model": str(model_folder(config.model.path)),
            "dtype": config.model.dtype,
            "algorithm": cell.algorithm,
            "group_size": config.controller.group_size,
            "num_prompts": num_prompts,
            "max_new_tokens": task.max_new_tokens,
            "learning_rate": config.optimizer.learning_rate,
            "warmup_steps": config.optimizer.warmup_steps,
            "seed": config.seed,
            "steps": cell.steps,
            "problems": [{"prompt": p.prompt, "answer": str(p.answer)} for p in problems],
            "stop": "".join(problems[0].stop),
            "scorer": {"target": task.scorer_spec.target, "kwargs": dict(task.scorer_spec.kwargs)},
            "out": folder,
        }
        done = subprocess.run(
            [python, str(ROOT / "bench/trl_results.py")],
            input=json.dumps(settings) + "\n",
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise SystemExit(f"{cell.name} failed:\n{done.stderr[-3000:]}")
        steps = [json.loads(line) for line in done.stdout.splitlines()]
        steps = [{k: round(v, 4) if isinstance(v, float) else v for k, v in step.items()} for step in steps]
        if cell.steps < EQUAL_STEPS[cell.model]:
            return steps, []
        return steps, [evaluated(config, Path(folder), cell.steps)]


def evaluated(config: TrainConfig, weights: Path, step: int) -> dict[str, Any]:
    """The held-out row of weights that another trainer has left."""
    import shutil

    from sagc_fast.rollout.engine import RolloutEngine
    from sagc_fast.tasks import make_task
    from sagc_fast.tasks.addition import model_folder
    from sagc_fast.tasks.scoring import ScoringPool
    from sagc_fast.train.draw import PromptSource
    from sagc_fast.train.evaluate import evaluate

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder(config.model.path) / name, weights / name)
    task = make_task(config.task, seed=config.seed)
    engine = RolloutEngine.from_pretrained(weights, dtype=config.model.dtype, kv_budget_gb=config.rollout.kv_budget_gb)
    source = PromptSource(task, engine.tokenizer, engine.model.config.max_position_embeddings - 1)
    with ScoringPool(task.scorer_spec, 1, config.reward.timeout_seconds) as pool:
        options = config.evaluation
        record = evaluate(engine, source, task.size("heldout"), pool, options, task.max_new_tokens, step)
    return studies.split_records([record], ())[1][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/results"), help="where runs and policies are kept")
    parser.add_argument("--peer-python", metavar="trl=PYTHON", help="interpreter that has trl; without, its rows wait")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only cells whose name holds this")
    parser.add_argument("--draw-only", action="store_true", help="tables and figures from the stored CSV files")
    args = parser.parse_args()
    if not args.draw_only:
        run_missing(args.work, (args.peer_python or "").removeprefix("trl=") or None, args.only)
    if missing := [cell.name for cell in cells() if not cell.is_done]:
        print(f"{len(missing)} of {len(cells())} runs are missing, the next {missing[0]}", flush=True)
    results_figures.draw()
    DOCUMENT.write_text(results_tables.with_tables(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
