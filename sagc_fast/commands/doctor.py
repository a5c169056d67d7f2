"""``sagc-fast doctor``: what this machine offers, what is built, and what would get in the way."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "show versions, backends, threads and memory, and check that they work together"
EPILOG = """examples:
  sagc-fast doctor                                        everything on one screen; exit status 1 when a check fails
  sagc-fast doctor --model models/SmolLM2-135M-Instruct   how many sequences a KV budget holds with this model
  sagc-fast doctor --json                                 the same for scripts"""

MARKS = {"ok": "ok  ", "warning": "warn", "failure": "FAIL"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", type=Path, help="model folder to plan the KV cache for")
    parser.add_argument("--kv-budget-gb", metavar="GB", type=float, default=2.0, help="default: 2.0")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the screen")


def run(args: argparse.Namespace) -> int:
    from sagc_fast.commands._diagnosis import diagnose

    report = diagnose(args.model, args.kv_budget_gb)
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
