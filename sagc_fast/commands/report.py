"""``sagc-fast report``: one self-contained HTML page about one or several runs."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "write one HTML page about one or several runs"
EPILOG = """examples:
  sagc-fast report runs/demo/sagc                          writes runs/demo/sagc/report.html
  sagc-fast report runs/demo/sagc runs/demo/fixed-16       both in one page, written to report.html
  sagc-fast report runs/a runs/b --out compare.html

The page needs no network and no server: open it in a browser, print it, send it by mail. Runs that are still going or
were killed are read as far as they go."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directory that `sagc-fast train` wrote")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="default: report.html in the run directory; for several runs, here"
    )


def run(args: argparse.Namespace) -> int:
    from sagc_fast.report import write_report

    out = args.out or (args.runs[0] / "report.html" if len(args.runs) == 1 else Path("report.html"))
    print(f"The report is in {write_report(args.runs, out)}.")
    return 0
