"""``sagc-fast simulate``: group-size policies on synthetic or recorded completion lengths, without a model."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sagc_fast.controller.compare import Comparison
    from sagc_fast.controller.config import SAGCConfig
    from sagc_fast.controller.simulate import Scenario
    from sagc_fast.controller.suggest import Suggestion

HELP = "compare group-size policies on synthetic or recorded completion lengths"
EPILOG = """length processes (NAME or NAME:key=value,...; lengths in tokens):
  lognormal   median=200 sigma=0.6
  pareto      median=200 alpha=1.5            a tail without scale
  mixture     median=200 sigma=0.6 long=1500 share=0.1
  drift       median, sigma move to to_median=600 to_sigma=1.0 over the run
  shock       median, sigma jump to to_median=200 to_sigma=1.0 after the share at=0.5 of the run
  difficulty  every problem has its own median and sigma: spread_median=0.5 spread_sigma=0.4
  FILE.jsonl  a recorded trace: runs/NAME/lengths.jsonl
  every synthetic one takes cap=4096 (lengths are cut there; inf is none) and num_problems=512

policies: fixed-G (any G >= 2), sagc, sagc-plain (the paper's rule alone: eta 0.1, no fallback), sagc-fair (ratio over a
reference median), prompt-aware, cost-aware, epsilon-greedy, ucb, oracle (best feasible mixture in hindsight)

examples:
  sagc-fast simulate lognormal:sigma=0.7 --delta 0.5
  sagc-fast simulate mixture --hold prompts --policies fixed-4,fixed-16,sagc --plot mixture.png
  sagc-fast simulate shock:sigma=0.4,to_sigma=0.8 --delta 0.45 --steps 2000 --json
  sagc-fast simulate runs/demo/sagc/lengths.jsonl --max-rows 64
  sagc-fast simulate --suggest runs/demo/sagc/lengths.jsonl       propose tau and delta for these lengths
  sagc-fast simulate lognormal:sigma=0.7 --delta 0.5 --fast --steps 1000000"""


CONTROLLER_OPTIONS = ("tau", "delta", "eta", "gamma", "dwell", "radius", "signal")
MAX_STEPS, MAX_FAST_STEPS, MAX_PROMPTS = 10_000_000, 100_000_000, 1_000_000
"""Bounds that keep the records of a run within about a gigabyte."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("process", nargs="?", default="lognormal", metavar="PROCESS", help="see below (lognormal)")
    parser.add_argument("--policies", metavar="NAMES", help="comma-separated (all)")
    parser.add_argument("--hold", default="all", metavar="WHAT", help="prompts, completions, tokens or all (all)")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps per run (500)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step when prompts are held (16)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and controllers (0)")
    control = parser.add_argument_group("controller")
    control.add_argument("--candidates", default="4,8,16", metavar="SIZES", help="group sizes to choose from (4,8,16)")
    control.add_argument("--tau", type=float, help="a group straggles when max > tau x median (2.0)")
    control.add_argument("--delta", type=float, help="straggler rate to hold (0.25)")
    control.add_argument("--eta", type=float, help="dual step (2.0)")
    control.add_argument("--gamma", type=float, help="forgetting per step (0.97)")
    control.add_argument("--dwell", type=int, help="steps an arm is kept at least (1)")
    control.add_argument("--radius", type=int, help="places one step may move (1)")
    control.add_argument("--signal", help="group, any or batch (group)")
    cost = parser.add_argument_group("cost model")
    cost.add_argument("--iteration-ms", type=float, metavar="MS", help="one decode iteration (12)")
    cost.add_argument("--row-us", type=float, metavar="US", help="each row of an iteration (40)")
    cost.add_argument("--max-rows", type=int, help="rows the engine runs at once (256)")
    cost.add_argument("--update-us", type=float, metavar="US", help="update, per token (60)")
    cost.add_argument("--fixed-seconds", type=float, metavar="S", help="per step, whatever its size (1)")
    cost.add_argument(
        "--difficulty", default="0.5,0.5", metavar="A,B", help="success probabilities are Beta(A, B) (0.5,0.5)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON in place of tables")
    output.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (.png, .svg); needs matplotlib")
    output.add_argument(
        "--suggest",
        nargs="?",
        const="",
        metavar="TRACE",
        help="propose tau and delta from a trace, or from a process (PROCESS)",
    )
    output.add_argument(
        "--keep", type=float, default=0.85, help="--suggest: share of informative groups to keep (0.85)"
    )
    output.add_argument(
        "--fast", action="store_true", help="sagc alone, events without lengths: a million steps in 2 s"
    )


def run(args: argparse.Namespace) -> int:
    if args.suggest is not None or args.fast:
        _refuse_unread_options(args)
    if args.plot is not None:
        from sagc_fast.controller.plot import check_picture_path, require_matplotlib

        require_matplotlib()  # said before the work, not after it
        check_picture_path(args.plot)
    if args.suggest is not None:
        return _suggest(args)
    return _run_fast(args) if args.fast else _compare(args)


def _refuse_unread_options(args: argparse.Namespace) -> None:
    """--suggest chooses tau and delta itself, and neither it nor --fast compares policies or draws."""
    from sagc_fast.errors import ConfigError

    mode = "--fast" if args.suggest is None else "--suggest"
    unread = ["policies", "plot", *(() if args.suggest is None else CONTROLLER_OPTIONS)]
    given = [f"--{name}" for name in unread if getattr(args, name) is not None]
    given += ["--fast"] if args.fast and args.suggest is not None else []
    if given:
        raise ConfigError(f"{mode} makes no use of {', '.join(given)}; leave that out, or leave out {mode}.")


def _config(args: argparse.Namespace) -> tuple[SAGCConfig, list[str]]:
    """The controllers' configuration, and what it warns of."""
    from sagc_fast.controller.config import ControllerWarning, SAGCConfig

    given = {name: getattr(args, name) for name in CONTROLLER_OPTIONS if getattr(args, name) is not None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ControllerWarning)
        config = SAGCConfig(candidates=_numbers(args.candidates, int, "--candidates"), **given)
    return config, [str(warning.message) for warning in caught]


def _scenario(args: argparse.Namespace, process: str) -> Scenario:
    from sagc_fast.controller.costs import CostModel, Difficulties
    from sagc_fast.controller.processes import parse_process
    from sagc_fast.controller.simulate import Scenario
    from sagc_fast.errors import ConfigError

    most = {"steps": MAX_FAST_STEPS if args.fast else MAX_STEPS, "prompts": MAX_PROMPTS}
    for name, largest in most.items():
        if not 1 <= getattr(args, name) <= largest:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1 and at most {largest:,}.")
    if args.seed < 0:
        raise ConfigError(f"--seed is {args.seed}; it must be at least 0.")
    for name in ("iteration_ms", "row_us", "update_us", "fixed_seconds"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be a finite number >= 0.")
    if args.max_rows is not None and args.max_rows < 1:
        raise ConfigError(f"--max-rows is {args.max_rows}; it must be at least 1.")
    scales = {"iteration_ms": 1e-3, "row_us": 1e-6, "update_us": 1e-6, "fixed_seconds": 1.0, "max_rows": 1}
    fields = {"iteration_ms": "iteration_seconds", "row_us": "row_seconds", "update_us": "update_token_seconds"}
    costs = {fields.get(k, k): getattr(args, k) * scale for k, scale in scales.items() if getattr(args, k) is not None}
    difficulty = _numbers(args.difficulty, float, "--difficulty")
    if len(difficulty) != 2 or not all(0 < number < math.inf for number in difficulty):
        raise ConfigError(f"--difficulty is {args.difficulty!r}; it must be two finite numbers > 0 such as 0.5,0.5.")
    return Scenario(
        parse_process(process),
        steps=args.steps,
        num_prompts=args.prompts,
        tau=2.0 if args.tau is None else args.tau,
        costs=CostModel(**costs),
        difficulties=Difficulties(*difficulty),
        seed=args.seed,
    )


def _numbers(text: str, kind: Callable[[str], Any], option: str) -> tuple:
    from sagc_fast.errors import ConfigError

    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}; it must be numbers separated by commas.") from error


def _compare(args: argparse.Namespace) -> int:
    from sagc_fast.controller.compare import DEFAULT_POLICIES, alike, compare
    from sagc_fast.controller.hold import HOLDS
    from sagc_fast.errors import ConfigError

    (config, notes), scenario = _config(args), _scenario(args, args.process)
    if args.hold != "all" and args.hold not in HOLDS:
        raise ConfigError(f"--hold is {args.hold!r}; it must be one of {', '.join(HOLDS)}, all.")
    holds = HOLDS if args.hold == "all" else (args.hold,)
    policies = DEFAULT_POLICIES
    if args.policies is not None:
        policies = tuple(filter(None, map(str.strip, args.policies.split(","))))
    together = alike(scenario, holds)
    with _Progress(len(together) * len(policies) * args.steps) as progress:
        comparison = compare(config, scenario, policies, holds, progress.update)
    notes += comparison.notes
    if args.plot is not None:
        from sagc_fast.controller.plot import plot_comparison

        title = f"{args.process}, tau={config.tau:g}, delta={config.delta:g}, {holds[0]} held"
        plot_comparison(comparison, config, holds[0], title, args.plot)
    if args.json:
        print(json.dumps(_as_dict(comparison, config, args, notes), indent=2))
        return 0
    _print_tables(comparison, config, args, together)
    _print_warnings(notes)
    if args.plot is not None:
        print(f"\nThe picture ({holds[0]} held) is in {args.plot}.")
    return 0


def _as_dict(comparison: Comparison, config: SAGCConfig, args: argparse.Namespace, notes: list[str]) -> dict[str, Any]:
    return {
        "process": args.process,
        "steps": args.steps,
        "seed": args.seed,
        "candidates": list(config.candidates),
        "tau": config.tau,
        "delta": config.delta,
        "true_straggler_rates": {str(size): rate for size, rate in comparison.rates.items()},
        "oracle": comparison.oracle,
        "holds": comparison.rows,
        "notes": notes,
    }


def _print_tables(
    comparison: Comparison, config: SAGCConfig, args: argparse.Namespace, together: list[tuple[str, ...]]
) -> None:
    """One table for all holds that plan alike."""
    rates = ", ".join(f"G={size} {rate:.3f}" for size, rate in comparison.rates.items())
    print(f"{args.process}: {args.steps} steps, tau={config.tau:g}, delta={config.delta:g}")
    print(f"true straggler rates: {rates}{'' if comparison.oracle['is_feasible'] else ', all above delta'}")
    for holds in together:
        rows = comparison.rows[holds[0]]
        wall = rows[0]["equal_wall_clock"]["seconds"]
        print(f"\n{' or '.join(holds) + ' held':<28}per step{'':37}| in {wall:,.0f} s of wall-clock")
        print("policy           rate  log2 G  groups   tokens  seconds  padded  inform. | steps  informative groups")
        for row in rows:
            equal = row["equal_wall_clock"]
            print(
                f"{row['policy']:<15} {row['straggler_rate']:5.3f} {row['mean_log2_group_size']:7.2f} "
                f"{row['groups_per_step']:7.1f} {row['tokens_per_step']:8,.0f} {row['step_seconds']:8.2f} "
                f"{row['padded_step_seconds']:7.2f} {row['informative_groups_per_step']:8.2f} | {equal['steps']:5d} "
                f"{equal['informative_groups']:11,.0f}"
            )
    print(
        "\nseconds: predicted by the cost model (--help), continuous batching; padded: batches run to their longest;\n"
        f"inform.: expected groups with right and wrong answers, success probabilities Beta({args.difficulty})"
    )
    if any(len(holds) > 1 for holds in together):
        print(
            "completions or tokens held: one table, since lengths that change neither with G nor over the run hold\n"
            "both at once; under drift, shock and recorded traces the two differ"
        )


def _print_warnings(notes: list[str]) -> None:
    for note in notes:
        print(f"warning: {note}")


def _run_fast(args: argparse.Namespace) -> int:
    import time

    import numpy as np

    from sagc_fast.controller.fast import simulate_events
    from sagc_fast.controller.simulate import straggler_probabilities

    (config, notes), scenario = _config(args), _scenario(args, args.process)
    table = straggler_probabilities(scenario.process, config.candidates, config.tau, moments=16)
    simulate_events(config, table, 10, args.prompts, args.seed)  # compiles, or loads from the disk cache
    start = time.perf_counter()
    events = simulate_events(config, table, args.steps, args.prompts, args.seed)
    seconds = time.perf_counter() - start
    shares = np.bincount(events.arms, minlength=len(config.candidates)) / args.steps
    result = {
        "steps": args.steps,
        "seconds": seconds,
        "straggler_rate": float(events.num_stragglers.mean() / args.prompts),
        "delta": config.delta,
        "shares": dict(zip(map(str, config.candidates), shares.tolist(), strict=True)),
        "mean_log2_group_size": float(shares @ config.utilities),
        "lambda_mean": float(events.prices.mean()),
        "lambda_max": float(events.prices.max()),
        "notes": notes,
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        played = ", ".join(f"G={size} {share:.1%}" for size, share in result["shares"].items())
        print(
            f"{args.steps:,} steps in {seconds:.2f} s: straggler rate {result['straggler_rate']:.4f} for "
            f"delta={config.delta:g}; {played}; lambda {result['lambda_mean']:.2f} (max {result['lambda_max']:.2f})"
        )
        _print_warnings(notes)
    return 0


def _suggest(args: argparse.Namespace) -> int:
    from sagc_fast.controller.suggest import suggest

    scenario = _scenario(args, args.suggest or args.process)
    found = suggest(scenario.process, _numbers(args.candidates, int, "--candidates"), scenario, args.keep)
    if args.json:
        print(json.dumps(found.as_dict(), indent=2))
        return 0
    _print_suggestion(found)
    _print_warnings(found.notes)
    return 0


def _print_suggestion(found: Suggestion) -> None:
    print(f"suggested: tau={found.tau:g} delta={found.delta:g}")
    for reason in found.reasons:
        print(f"  {reason}")
    print("  G      straggles in    best mixture in hindsight    SAGC, run on these lengths")
    for size, rate in found.rates.items():
        shares = f"{found.shares[size]:16.0%} of steps  {found.replayed_shares[size]:20.0%} of steps"
        print(f"  {size:<6} {rate:11.1%}  {shares}")
    mixture_size = sum(size * share for size, share in found.shares.items())
    mixture_rate = sum(rate * found.shares[size] for size, rate in found.rates.items())
    print(f"  {'mean G':18} {mixture_size:17.1f} {found.replayed_group_size:30.1f}")
    print(f"  {'straggler rate':18} {mixture_rate:17.3f} {found.replayed_rate:30.3f}")
    print(f"  {'seconds per step':18} {found.step_seconds:17.2f} {found.replayed_seconds:30.2f}")
    print(f"  {'informative groups':18} {found.kept:17.0%} {found.replayed_kept:30.0%}")
    print(
        f"seconds: predicted, equal prompts, {found.largest_step_seconds:.2f} with G={max(found.rates)} alone;"
        " informative groups: of those it gives;\nSAGC, which learns the rates as it goes: the last three quarters"
        " of its run"
    )


class _Progress:
    """A rich progress bar on a terminal's stderr; nothing when stderr is a file or a pipe."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._bar = Progress(console=console, transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("simulating", total=total)

    def update(self, hold: str, policy: str, done: int) -> None:
        self._bar.update(self._task, advance=1, description=f"{hold}, {policy}")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
