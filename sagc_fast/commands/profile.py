"""``sagc-fast profile``: another command under Nsight where that is there, under torch.profiler elsewhere."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagc_fast import profiling
from sagc_fast.errors import ConfigError

if TYPE_CHECKING:
    from sagc_fast.profiling import Recorder

HELP = "profile another command: phases, operators, a trace; through Nsight where it is installed"
EPILOG = """examples:
  sagc-fast profile -- train --config configs/addition.yaml --run-dir runs/profiled steps=6
  sagc-fast profile --tool nsys --out prof -- train --config configs/smollm2_chain_sum.yaml model.device=cuda steps=6
  sagc-fast profile --tool ncu --print -- generate --model DIR --device cuda --prompt "2+3=" --n 16
  sagc-fast profile -- generate --model addition --prompt "17+25=" --n 16

What stands behind -- is a command line of sagc-fast. Of a training run, --steps optimizer steps are recorded after
--skip-steps, which warm up (allocations, compilation); anything else is recorded whole. docs/profiling.md says how to
read the results."""

PROFILED = ("train", "generate", "bench", "demo")
NUM_OPERATORS = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tool",
        choices=("auto", "nsys", "ncu", "torch"),
        default="auto",
        help="auto: nsys when it is installed and torch sees a GPU, else torch",
    )
    parser.add_argument("--out", default="profile", metavar="DIR", help="folder of the results (default: profile)")
    parser.add_argument(
        "--skip-steps", type=int, default=1, metavar="N", help="warm-up steps left out before recording (default: 1)"
    )
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps recorded (default: 3)")
    parser.add_argument("--print", action="store_true", help="print the Nsight command and do nothing")
    parser.add_argument("--json", action="store_true", help="print the phases as one JSON line at the end (torch)")
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the command to profile")


def run(args: argparse.Namespace) -> int:
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv or argv[0] not in PROFILED:
        raise ConfigError(
            f"profile got {repr(shlex.join(argv)) if argv else 'nothing'} to run; name one of "
            f"{', '.join(PROFILED)} behind --, as in: sagc-fast profile -- train --config FILE."
        )
    if args.steps < 1 or args.skip_steps < 0:
        raise ConfigError(
            f"profile got --skip-steps {args.skip_steps} and --steps {args.steps}; "
            "the first must be at least 0, the second at least 1."
        )
    tool = args.tool if args.tool != "auto" else "nsys" if shutil.which("nsys") and _has_gpu() else "torch"
    if tool == "torch":
        if args.print:
            raise ConfigError("--print shows the command of nsys or ncu; name one with --tool.")
        _make_folder(Path(args.out))
        return _run_torch(argv, args)
    command, environment = nsight_command(tool, argv, args)
    shown = shlex.join([*(f"{name}={value}" for name, value in environment.items()), *command])
    if args.print:
        print(shown)
        return 0
    if shutil.which(tool) is None:
        raise ConfigError(
            f"{tool} is not on the PATH; install NVIDIA Nsight {'Systems' if tool == 'nsys' else 'Compute'}, "
            "use --tool torch, or --print to see the command for another machine."
        )
    _make_folder(Path(args.out))
    print(shown, flush=True)
    status = subprocess.run(command, env=os.environ | environment, check=False).returncode
    if status == 0:
        _explain(tool, Path(args.out))
    return status


def _make_folder(out: Path) -> None:
    """Before the work whose results it is to hold. Raises ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        writable = os.access(out, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ConfigError(f"--out {out} is no folder that can be written; give another one.")


def nsight_command(tool: str, argv: list[str], args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """(command, environment variables that it needs) of nsys or ncu."""
    program = [sys.executable, "-m", "sagc_fast", *argv]
    environment = {profiling.NVTX_VARIABLE: "1"}
    window: list[str] = []
    if argv[0] == "train":
        environment[profiling.WINDOW_VARIABLE] = f"{args.skip_steps}:{args.steps}"
    if tool == "nsys":
        if argv[0] == "train":
            window = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
        options = ["--trace=cuda,nvtx,osrt", "--cuda-graph-trace=node", "--force-overwrite=true", *window]
        return ["nsys", "profile", *options, f"--output={args.out}/timeline", *program], environment
    if argv[0] == "train":
        window = ["--profile-from-start", "off"]
    # Every kernel is replayed many times to read all counters: a few launches of decoding are enough.
    ranges = [x for name in ("forward", "decode") for x in ("--nvtx-include", f"{profiling.PREFIX}{name}/")]
    options = ["--set", "full", "--clock-control", "none", "--nvtx", *ranges, "--launch-count", "60", *window]
    return ["ncu", *options, "--force-overwrite", "-o", f"{args.out}/kernels", *program], environment


def _explain(tool: str, out: Path) -> None:
    if tool == "nsys":
        print(f"timeline: nsys-ui {out}/timeline.nsys-rep")
        print(f"seconds by phase: nsys stats --report nvtx_pushpop_sum {out}/timeline.nsys-rep")
        print(f"seconds by kernel: nsys stats --report cuda_gpu_kern_sum {out}/timeline.nsys-rep")
    else:
        print(f"kernels, rooflines, occupancy: ncu-ui {out}/kernels.ncu-rep")
        print(f"as text: ncu --import {out}/kernels.ncu-rep --page details")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _run_torch(argv: list[str], args: argparse.Namespace) -> int:
    """The command in this process, its window under torch.profiler."""
    # Torch's default of 5 shows of kineto's log its probes (USDT) alone; 6 leaves out those as well and nothing else.
    # KINETO_LOG_LEVEL=1 shows all of it. Read when torch is loaded.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from torch.profiler import ProfilerActivity, profile, record_function

    from sagc_fast.cli import main

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if _has_gpu() else [])]
    profiler = profile(activities=activities)
    is_training = argv[0] == "train"
    recorder = profiling.Recorder(
        record_function,
        args.skip_steps,
        args.steps if is_training else None,
        profiler.start,
        profiler.stop,
    )
    with profiling.recording(recorder):
        if not is_training:
            recorder.open()
        status = main(argv)
    if status != 0:
        return status
    if not recorder.root.children:
        raise ConfigError(
            f"The run ended before its step {args.skip_steps + 1}, where recording begins; "
            "train more steps, or lower --skip-steps."
        )
    trace = Path(args.out) / "trace.json.gz"
    profiler.export_chrome_trace(str(trace))
    skipped = f", after {args.skip_steps} left out to warm up" if args.skip_steps else ""
    steps = recorder.root.children["step"].calls if is_training else 0
    _print_phases(recorder, f"Phases of {steps} steps{skipped}" if is_training else "Phases")
    _print_operators(profiler)
    print(f"trace: {trace} (open it at https://ui.perfetto.dev or chrome://tracing)")
    if args.json:
        print(json.dumps({"phases": phase_records(recorder), "trace": str(trace)}))
    return 0


def phase_records(recorder: Recorder) -> list[dict[str, Any]]:
    """One record per phase: its path, calls, seconds, and share of the phase around it (of all, at the top)."""
    total = sum(phase.seconds for phase in recorder.root.children.values())
    records, path = [], []
    for depth, name, phase, parent in recorder.root.rows():
        path[depth:] = [name]
        around = parent.seconds if depth else total
        records.append(
            {
                "phase": "/".join(path),
                "calls": phase.calls,
                "seconds": phase.seconds,
                "share": phase.seconds / around if around else 0.0,
            }
        )
    return records


def _print_phases(recorder: Recorder, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("phase", no_wrap=True)
    for heading in ("calls", "seconds", "of the phase around it", "ms per call"):
        table.add_column(heading, justify="right")
    for record in phase_records(recorder):
        depth, name = record["phase"].count("/"), record["phase"].rpartition("/")[2]
        milliseconds = 1e3 * record["seconds"] / record["calls"]
        table.add_row(
            "  " * depth + name,
            str(record["calls"]),
            f"{record['seconds']:.3f}",
            f"{record['share']:.0%}",
            f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.0f}",
        )
    Console().print(table)


def _print_operators(profiler: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    events = [e for e in profiler.key_averages() if not e.key.startswith(profiling.PREFIX)]
    on_gpu = any(e.self_device_time_total for e in events)
    spent = (lambda e: e.self_device_time_total) if on_gpu else (lambda e: e.self_cpu_time_total)
    total = sum(map(spent, events)) or 1.0
    table = Table(title=f"Operators, {'GPU' if on_gpu else 'CPU'} time of their own", title_justify="left")
    table.add_column("operator", overflow="fold")
    for heading in ("calls", "ms", "share"):
        table.add_column(heading, justify="right")
    for event in sorted(events, key=spent, reverse=True)[:NUM_OPERATORS]:
        table.add_row(event.key, str(event.count), f"{spent(event) / 1e3:.1f}", f"{spent(event) / total:.0%}")
    Console().print(table)
