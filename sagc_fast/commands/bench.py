"""``sagc-fast bench``: measure this machine, this package and its peers; keep a history; tell change from noise."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sagc_fast.errors import ConfigError

HELP = "measure rollout, kernels, training step and controller beside their peers, and compare two measurements"
EPILOG = """each prints a table with the ceilings measured in the same run, and ends with one JSON line

examples:
  sagc-fast bench rollout --model S --runs 5                     this engine beside the peers that are installed
  sagc-fast bench rollout --model M --dtype bf16 --vs vllm,openvino --peer-python vllm=peer-vllm/bin/python
  sagc-fast bench kernels --model S --rows 1,16,128 --out bench.jsonl
  sagc-fast bench controller --quick --json
  sagc-fast bench step --dtype fp32,bf16 --peer-python trl=peer-trl/bin/python
  sagc-fast bench train --runs 5
  sagc-fast bench compare before.jsonl after.jsonl --fail-if-slower 5%
  sagc-fast bench compare 5536ce5 c0ffee1 --history bench.jsonl  two commits, or labels, of one history"""
EXAMPLES = {
    "rollout": """
  sagc-fast bench rollout --model S --runs 5                     this engine beside the peers that are installed
  sagc-fast bench rollout --quick --vs none                      is everything there?
  sagc-fast bench rollout --model M --dtype bf16 --vs vllm --peer-python vllm=peer-vllm/bin/python""",
    "kernels": """
  sagc-fast bench kernels --model S --rows 1,16,128
  sagc-fast bench kernels --model smollm2 --dtype bf16 --out bench.jsonl --label before""",
    "controller": """
  sagc-fast bench controller
  sagc-fast bench controller --quick --json""",
    "step": """
  sagc-fast bench step --dtype fp32,bf16                         ours alone, by phase, against the ceiling
  sagc-fast bench step --dtype fp32,bf16 --peer-dtype fp32 --peer-python trl=peer-trl/bin/python
  sagc-fast bench step --model smollm2 --dtype bf16 --group-size 4 --runs 1""",
    "train": """
  sagc-fast bench train --runs 5
  sagc-fast bench train --steps 5 --peer-python trl=peer-trl/bin/python --out bench.jsonl""",
    "compare": """
  sagc-fast bench compare before.jsonl after.jsonl --fail-if-slower 5%
  sagc-fast bench compare 5536ce5 c0ffee1 --history bench.jsonl  two commits, or labels, of one history""",
}

MAX_ROWS = 65_536
RUNS = {"rollout": 5, "kernels": 10, "controller": 20, "step": 3, "train": 3}
QUICK_RUNS = {"rollout": 2, "kernels": 3, "controller": 3, "step": 1, "train": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return kinds.add_parser(
            name, help=text, description=text, epilog=f"examples:{EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip

    _add_rollout(add("rollout", "groups of completions with forced lengths: tokens per second beside other engines"))
    kernels = add("kernels", "each operation of a decode step, native and plain torch, against the ceilings")
    kernels.add_argument("--model", default="S", help="S, smollm2 or M: whose shapes (S)")
    kernels.add_argument("--rows", default="1,16,128", metavar="LIST", help="live rows, separated by commas (1,16,128)")
    _add_common(kernels, "kernels")
    _add_dtype(kernels)
    _add_common(
        add("controller", "choosing the group size: microseconds a step, a million simulated steps"), "controller"
    )
    step = add("step", "one GRPO step with forced lengths, by phase: rollout and update, beside TRL's trainer")
    step.add_argument("--model", default="S", metavar="DIR", help="S, M, smollm2 or a model folder (S)")
    step.add_argument("--dtype", default="fp32", metavar="LIST", help="dtypes of ours: fp32, bf16 or fp32,bf16 (fp32)")
    step.add_argument("--peer-dtype", metavar="LIST", help="dtypes of TRL (those of ours)")
    step.add_argument("--group-size", type=int, metavar="G", help="completions per prompt (16)")
    _add_peer_python(step)
    _add_common(step, "step")
    _add_threads(step)
    train = add("train", "optimizer steps of the addition policy: seconds by phase, beside TRL's trainer")
    train.add_argument("--steps", type=int, default=10, help="optimizer steps per run (10)")
    _add_peer_python(train)
    _add_common(train, "train")
    _add_threads(train)
    _add_compare(add("compare", "two measurements: what changed and what is noise"))


def run(args: argparse.Namespace) -> int:
    if args.bench == "compare":
        return _compare(args)
    for name in ("runs", "threads", "steps"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; it must be at least 1.")
    if getattr(args, "threads", 1) > 1024:
        raise ConfigError(f"--threads is {args.threads}; it must be at most 1024, and no more than there are cores.")
    if not 0 <= getattr(args, "peer_seconds", 0.0) < math.inf:
        raise ConfigError(f"--peer-seconds is {args.peer_seconds:g}; it must be a finite number of seconds >= 0.")

    from sagc_fast.bench.record import append_history, open_history

    if args.out is not None:
        open_history(args.out).close()  # what cannot be written is said before the measurement
    if args.runs is None:
        args.runs = (QUICK_RUNS if args.quick else RUNS)[args.bench]
    measure: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "rollout": _rollout, "kernels": _kernels, "controller": _controller, "step": _step,
        "train": _train,
    }  # fmt: skip
    record = measure[args.bench](args)

    from sagc_fast.bench import show

    if not args.json:
        show.show_record(show.console(), record)
    print(json.dumps(record), flush=True)
    if args.out is not None:
        append_history(args.out, record)
    return 0


# ---- options -----------------------------------------------------------------------------------------------------


def _add_common(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("--runs", type=int, metavar="N", help=f"timed runs of each ({RUNS[name]})")
    parser.add_argument("--quick", action="store_true", help="less work and fewer runs: to see that all is there")
    parser.add_argument("--label", help="name of this measurement in the history, for compare")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the record to this history (JSON lines)")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")


def _add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (1)")


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="weights and cache (fp32)")
    _add_threads(parser)


def _add_peer_python(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="NAME=PYTHON",
        help="interpreter of the environment that has a peer; may be given again",
    )  # fmt: skip


def _add_rollout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="S", metavar="DIR", help="S, M, smollm2 or a model folder (S)")
    names = "hf, hf-cb, vllm, openvino, llamacpp, all, none (all)"
    parser.add_argument("--vs", default="all", metavar="NAMES", help=names)
    _add_peer_python(parser)
    _add_dtype(parser)
    parser.add_argument(
        "--kv-dtype", choices=("fp32", "fp16", "bf16"),
        help="keys and values of the engines that can be told, this one and openvino (each engine's own choice: the "
        "model's dtype; openvino 8 bits)",
    )  # fmt: skip
    parser.add_argument("--prompts", type=int, metavar="P", help="prompts of the workload (8)")
    parser.add_argument("--group-size", type=int, metavar="G", help="completions per prompt (16)")
    parser.add_argument("--max-length", type=int, metavar="N", help="longest completion (256; 128 with M)")
    parser.add_argument("--mean-length", type=float, metavar="N", help="mean completion (64; 32 with M)")
    parser.add_argument(
        "--peer-seconds", type=float, default=240.0, metavar="S",
        help="a peer takes no further turn once its runs would exceed this (240)",
    )  # fmt: skip
    parser.add_argument("--no-curve", action="store_true", help="leave out the cost of a step by live rows")
    _add_common(parser, "rollout")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="history file, label or commit")
    parser.add_argument("after", metavar="B", help="history file, label or commit")
    parser.add_argument("--history", type=Path, metavar="FILE", help="where labels and commits are looked up")
    parser.add_argument("--all", action="store_true", help="every metric, not the primary ones alone")
    parser.add_argument(
        "--fail-if-slower", metavar="SHARE", help="exit status 1 when a metric is really worse by more, such as 5%%"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")


# ---- benches -----------------------------------------------------------------------------------------------------


def _rollout(args: argparse.Namespace) -> dict[str, Any]:
    from sagc_fast.bench import rollout
    from sagc_fast.bench.engines import parse_names, parse_pythons
    from sagc_fast.bench.models import QUICK, WORKLOADS
    from sagc_fast.bench.show import say
    from sagc_fast.bench.workload import Workload

    workload = QUICK if args.quick else WORKLOADS.get(args.model, Workload())
    given = {
        "num_prompts": args.prompts, "group_size": args.group_size, "max_length": args.max_length,
        "mean_length": args.mean_length,
    }  # fmt: skip
    settings = rollout.RolloutSettings(
        model=args.model,
        dtype=args.dtype,
        threads=args.threads,
        workload=replace(workload, **{name: value for name, value in given.items() if value is not None}),
        peers=tuple(parse_names(args.vs)),
        runs=args.runs,
        peer_seconds=args.peer_seconds,
        has_curve=not (args.no_curve or args.quick),
        pythons=parse_pythons(args.peer_python),
        kv_dtype=args.kv_dtype,
    )
    return rollout.run(settings, args.label, say)


def _kernels(args: argparse.Namespace) -> dict[str, Any]:
    try:
        rows = tuple(sorted({int(part) for part in args.rows.split(",")}))
    except ValueError:
        rows = ()
    if not rows or rows[0] < 1 or rows[-1] > MAX_ROWS:
        raise ConfigError(
            f"--rows is {args.rows!r}; it must be numbers of rows from 1 to {MAX_ROWS:,} such as 1,16,128."
        )

    from sagc_fast.bench import kernels
    from sagc_fast.bench.show import say

    if args.model not in kernels.shapes():
        raise ConfigError(f"--model {args.model!r} is unknown here; use one of {', '.join(kernels.shapes())}.")
    return kernels.run(
        args.model, args.dtype, args.threads, rows[:1] if args.quick else rows, args.runs, args.label, say
    )


def _controller(args: argparse.Namespace) -> dict[str, Any]:
    from sagc_fast.bench import controller
    from sagc_fast.bench.show import say

    return controller.run(args.runs, args.quick, args.label, say)


def _step(args: argparse.Namespace) -> dict[str, Any]:
    dtypes = _dtypes(args.dtype, "--dtype")
    peer_dtypes = dtypes if args.peer_dtype is None else _dtypes(args.peer_dtype, "--peer-dtype")

    from sagc_fast.bench import step
    from sagc_fast.bench.engines import parse_pythons
    from sagc_fast.bench.models import WORKLOADS
    from sagc_fast.bench.show import say
    from sagc_fast.bench.workload import Workload

    workload = step.QUICK if args.quick else WORKLOADS.get(args.model, Workload())
    if args.group_size is not None:
        workload = replace(workload, group_size=args.group_size)
    pythons = parse_pythons(args.peer_python)
    settings = step.StepSettings(args.model, dtypes, peer_dtypes, workload, args.threads, args.runs, pythons)
    return step.run_step(settings, args.label, say)


def _dtypes(text: str, option: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if not set(names) <= {"fp32", "bf16"}:
        raise ConfigError(f"{option} is {text!r}; it must be fp32, bf16 or fp32,bf16.")
    return names


def _train(args: argparse.Namespace) -> dict[str, Any]:
    from sagc_fast.bench import training
    from sagc_fast.bench.engines import parse_pythons
    from sagc_fast.bench.show import say

    steps = min(args.steps, 2) if args.quick else args.steps
    return training.run_train(steps, args.threads, args.runs, parse_pythons(args.peer_python), args.label, say)


def _compare(args: argparse.Namespace) -> int:
    from sagc_fast.bench import compare, show

    limit = None if args.fail_if_slower is None else compare.parse_share(args.fail_if_slower)
    sides = [compare.select(name, args.history) for name in (args.before, args.after)]
    changes = compare.compare(*sides, is_all=args.all)
    worse = [c for c in changes if c.verdict in ("slower", "worse") and limit is not None and c.worsening > limit]
    if not args.json:
        show.show_changes(show.console(), changes, (args.before, args.after))
    print(json.dumps({"changes": [compare.to_dict(change) for change in changes], "failed": len(worse)}))
    return 1 if worse else 0
