"""Compile the kernels ahead of time, without a GPU, exactly as their launchers would launch them; look at the result.

    python -m sagc_fast.kernels.aot                     the table: every kernel and configuration, sm_80 and sm_90
    python -m sagc_fast.kernels.aot --only decode --arch 90
    python -m sagc_fast.kernels.aot --known tests/kernels/resources.json       compile only what the file does not know
    python -m sagc_fast.kernels.aot --update tests/kernels/resources.json      the same, and write it into the file

What the launchers would launch is written down and compiled (compile_ahead), so the table cannot drift from the code.
Compiling everything takes minutes, so the table can be kept in a file: each line carries a hash of all that its machine
code depends on, and only lines of today's kernels and of this Triton are believed.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from sagc_fast.kernels.compile_ahead import ARCHITECTURES, HEADER, Launch, Usage, compile_launch, recording, usage_of
from sagc_fast.kernels.launch_all import SHAPES, WIDTHS, Shape, launch_all

TABLE_SHAPES = SHAPES | WIDTHS
Place = tuple[int, str]
"""(architecture, key of a launch)."""


def launches(shape: Shape, dtype: torch.dtype = torch.bfloat16, first: bool = False) -> list[Launch]:
    """What a model of this shape launches, with every configuration of a tuned kernel or only the first."""
    with recording(first) as found:
        launch_all(shape, dtype, "meta")
    return list(found)


@dataclass(frozen=True)
class Line:
    """One compiled kernel of the table."""

    architecture: int
    key: str
    title: str
    usage: Usage

    def __str__(self) -> str:
        return self.usage.line(self.architecture, self.title)


def wanted_launches(models: Iterable[str] = TABLE_SHAPES, first: bool = False) -> dict[str, Launch]:
    """By key, each once, of all models."""
    return {launch.key: launch for model in models for launch in launches(TABLE_SHAPES[model], first=first)}


def read_table(path: Path) -> dict[Place, Line]:
    """Lines of a file that write_table wrote; none when it is of another Triton."""
    content = json.loads(path.read_text())
    lines = [Line(**{**row, "usage": Usage(**row["usage"])}) for row in content["kernels"]]
    return {(line.architecture, line.key): line for line in lines} if content["triton"] == triton.__version__ else {}


def write_table(path: Path, lines: Iterable[Line]) -> None:
    rows = sorted((asdict(line) for line in lines), key=lambda row: (row["title"], row["architecture"]))
    text = ",\n  ".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"triton": "{triton.__version__}", "kernels": [\n  {text}\n]}}\n')


def compiled(launches: dict[str, Launch], places: list[Place], num_processes: int) -> Iterator[Line]:
    """The lines of ``places``, in their order. Other processes are started only for more than a few."""
    if num_processes == 1 or len(places) <= 4:
        yield from (_compile_line(launches[key], architecture) for architecture, key in places)
        return
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_compile_place, places)


@functools.cache
def _all_launches() -> dict[str, Launch]:
    """Of a worker process: a launch itself cannot be sent to one."""
    return wanted_launches()


def _compile_place(place: Place) -> Line:
    architecture, key = place
    return _compile_line(_all_launches()[key], architecture)


def _compile_line(launch: Launch, architecture: int) -> Line:
    return Line(architecture, launch.key, launch.title, usage_of(compile_launch(launch, architecture), architecture))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sagc_fast.kernels.aot", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, action="append", help="80 or 90; default: both")
    parser.add_argument("--model", choices=TABLE_SHAPES, action="append", help="default: all")
    parser.add_argument("--first", action="store_true", help="only the first configuration of a tuned kernel")
    parser.add_argument("--only", metavar="WORD", nargs="+", default=[""], help="kernels whose name holds a WORD")
    parser.add_argument("--known", metavar="FILE", type=Path, help="a kept table; what it knows is not compiled")
    parser.add_argument("--update", metavar="FILE", type=Path, help="the same, and keep this table there")
    parser.add_argument("--processes", type=int, default=2, help="that compile at a time; default: 2")
    options = parser.parse_args(arguments)
    file = options.update or options.known
    known = read_table(file) if file and file.exists() else {}
    wanted = {
        key: launch
        for key, launch in wanted_launches(options.model or TABLE_SHAPES, options.first).items()
        if any(word in launch.name for word in options.only)
    }
    places = [(architecture, key) for key in wanted for architecture in options.arch or ARCHITECTURES]
    unknown = [place for place in places if place not in known]
    print(f"{HEADER} (Triton {triton.__version__})")
    lines = [known[place] for place in places if place in known]
    print(*lines, sep="\n", end="\n" if lines else "")
    for line in compiled(wanted, unknown, options.processes):
        lines.append(line)
        print(line, flush=True)
        if options.update:
            write_table(options.update, lines)
    if options.update:
        write_table(options.update, lines)
    elif options.known and unknown:
        print(f"{len(unknown)} of these are not in {options.known}; --update would put them there.")
    num_bad = sum(not line.usage.fits(line.architecture) for line in lines)
    print(f"{num_bad} of {len(lines)} spill or exceed shared memory.")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
