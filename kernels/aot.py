"""Compile the kernels ahead of time, without a GPU, exactly as their launchers would launch them; look at the result.

    python -m sagc_fast.kernels.aot                     the table: every kernel and configuration, sm_80 and sm_90
    python -m sagc_fast.kernels.aot --only decode --arch 90
    python -m sagc_fast.kernels.aot --update tests/kernels/resources.json        compile what the file does not know yet
    python -m sagc_fast.kernels.aot --check tests/kernels/resources.json         is the file that of these kernels?

What the launchers would launch is written down and compiled (compile_ahead), so the table cannot drift from the code.
Compiling everything takes minutes, so the whole table is kept in a file: each line carries a hash of all that its
machine code depends on, so a line that no longer belongs to the kernels is found without compiling.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from sagc_fast.kernels.compile_ahead import ARCHITECTURES, HEADER, Launch, Usage, compile_launch, recording, usage_of
from sagc_fast.kernels.launch_all import SHAPES, Shape, launch_all


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


def wanted_launches(models: Iterable[str] = SHAPES, first: bool = False) -> dict[str, Launch]:
    """By key, each once, of all models."""
    return {launch.key: launch for model in models for launch in launches(SHAPES[model], first=first)}


def read_table(path: Path) -> tuple[str, dict[tuple[int, str], Line]]:
    """(Triton's version, lines by architecture and key) of a file that write_table wrote."""
    content = json.loads(path.read_text())
    lines = [Line(**{**row, "usage": Usage(**row["usage"])}) for row in content["kernels"]]
    return content["triton"], {(line.architecture, line.key): line for line in lines}


def write_table(path: Path, lines: Iterable[Line]) -> None:
    rows = sorted((asdict(line) for line in lines), key=lambda row: (row["title"], row["architecture"]))
    text = ",\n  ".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"triton": "{triton.__version__}", "kernels": [\n  {text}\n]}}\n')


def update_table(path: Path, num_processes: int) -> list[Line]:
    """Compile what the file lacks, drop what no longer belongs to it, write it, return its lines."""
    version, known = read_table(path) if path.exists() else ("", {})
    known = known if version == triton.__version__ else {}
    wanted = [(architecture, key) for key in wanted_launches() for architecture in ARCHITECTURES]
    known = {place: line for place, line in known.items() if place in wanted}
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for line in pool.map(_compile_line, [place for place in wanted if place not in known]):
            print(line, flush=True)
            known[line.architecture, line.key] = line
            write_table(path, known.values())
    write_table(path, known.values())
    return list(known.values())


@functools.cache
def _all_launches() -> dict[str, Launch]:
    return wanted_launches()


def _compile_line(place: tuple[int, str]) -> Line:
    architecture, key = place
    launch = _all_launches()[key]
    return Line(architecture, key, launch.title, usage_of(compile_launch(launch, architecture), architecture))


def stale_lines(path: Path) -> list[str]:
    """What the file lacks and what it holds too much, one sentence each; nothing when it is that of these kernels."""
    _, known = read_table(path)
    launches_by_key = wanted_launches()
    wanted = {(architecture, key) for key in launches_by_key for architecture in ARCHITECTURES}
    missing = [f"sm_{arch} {launches_by_key[key].title} is not in it" for arch, key in sorted(wanted - set(known))]
    return missing + [f"sm_{arch} {known[arch, key].title} is of an older source" for arch, key in set(known) - wanted]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sagc_fast.kernels.aot", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, action="append", help="80 or 90; default: both")
    parser.add_argument("--model", choices=SHAPES, action="append", help="default: all three")
    parser.add_argument("--first", action="store_true", help="only the first configuration of a tuned kernel")
    parser.add_argument("--only", metavar="WORD", nargs="+", default=[""], help="kernels whose name holds a WORD")
    parser.add_argument("--update", metavar="FILE", type=Path, help="bring a file with the whole table up to date")
    parser.add_argument("--check", metavar="FILE", type=Path, help="print such a file and say what in it is stale")
    parser.add_argument("--processes", type=int, default=2, help="that compile at a time for --update; default: 2")
    options = parser.parse_args(arguments)
    if options.update:
        lines = update_table(options.update, options.processes)
        return _verdict([line.usage.fits(line.architecture) for line in lines])
    print(f"{HEADER} (Triton {triton.__version__ if options.check is None else read_table(options.check)[0]})")
    if options.check:
        lines = list(read_table(options.check)[1].values())
        print(*lines, *(stale := stale_lines(options.check)), sep="\n")
        return 1 if stale else _verdict([line.usage.fits(line.architecture) for line in lines])
    found = []
    for launch in wanted_launches(options.model or SHAPES, options.first).values():
        if any(word in launch.name for word in options.only):
            for architecture in options.arch or ARCHITECTURES:
                usage = usage_of(compile_launch(launch, architecture), architecture)
                found.append(usage.fits(architecture))
                print(usage.line(architecture, launch.title), flush=True)
    return _verdict(found)


def _verdict(fits: list[bool]) -> int:
    print(f"{fits.count(False)} of {len(fits)} spill or exceed shared memory.")
    return 1 if False in fits else 0


if __name__ == "__main__":
    sys.exit(main())
