"""``sagc-fast doctor``: what this machine offers, what is built, and what would get in the way."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import fields
from pathlib import Path

from sagc_fast.errors import ConfigError

HELP = "show versions, backends, threads and memory, and check that they work together"
EPILOG = """examples:
  sagc-fast doctor                                        everything on one screen
  sagc-fast doctor --model models/SmolLM2-135M-Instruct   how many sequences a KV budget holds with this model
  sagc-fast doctor --json                                 the same for scripts
  sagc-fast doctor --warm --model models/Llama-3.2-3B     compile and tune the Triton kernels ahead

exit status: 0 when no check fails (warnings are not failures), 1 when one does, 2 when an argument is wrong"""

MARKS = {"ok": "ok  ", "warning": "warn", "failure": "FAIL"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="model folder (or addition) to plan the KV cache for")
    parser.add_argument("--kv-budget-gb", metavar="GB", type=float, default=2.0, help="default: 2.0")
    parser.add_argument(
        "--warm", action="store_true", help="compile and tune the Triton kernels for --model (default: common shapes)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the screen")


def run(args: argparse.Namespace) -> int:
    if not 0 < args.kv_budget_gb < math.inf:
        raise ConfigError(f"--kv-budget-gb is {args.kv_budget_gb:g}; it must be a finite number of GB above 0.")

    from sagc_fast.commands._diagnosis import diagnose
    from sagc_fast.tasks.addition import model_folder

    model = None if args.model is None else model_folder(args.model)
    if args.warm:
        _warm(model)
    report = diagnose(model, args.kv_budget_gb)
    if args.json:
        print(json.dumps(report.to_dict()))
    else:
        for title, rows in report.sections.items():
            print(title)
            for name, value in rows:
                print(f"  {name:<34} {value}")
        print("Checks")
        for check in report.checks:
            print(f"  {MARKS[check.status]}  {check.sentence}")
    return 1 if report.has_failed else 0


def _warm(model: Path | None) -> None:
    """Launch every kernel once at the shapes of the model; Triton keeps what it compiled and measured on disk."""
    import torch

    from sagc_fast.model.loader import load_config
    from sagc_fast.ops.backend import use_backend

    with use_backend("triton"):  # raises with its remedy where there is no GPU
        from sagc_fast.kernels.launch_all import SHAPES, Shape, tune

        device = "cuda" if torch.cuda.is_available() else "cpu"
        shapes = SHAPES
        if model is not None:
            config = load_config(model)
            shapes = {str(model): Shape(**{field.name: getattr(config, field.name) for field in fields(Shape)})}
        for name, shape in shapes.items():
            started = time.perf_counter()
            tune(shape, torch.bfloat16, device)
            print(f"Triton kernels for {name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
