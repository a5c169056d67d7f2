"""What the studies of docs/learning.md and docs/results.md share: runs kept as CSV files, bands over seeds, tables that
a script writes into a page."""

from __future__ import annotations

import csv
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sagc_fast import TrainConfig

ROOT = Path(__file__).parents[1]
WINDOW = 5
"""Steps of the running mean in figures, and of the last rewards in tables."""

Row = Mapping[str, Any]
Run = dict[str, np.ndarray]
"""Numbers of a run by name, one per step."""


def train(config: TrainConfig) -> list[dict[str, Any]]:
    """The records of metrics.jsonl of a run, which is made in ``config.run_dir`` and removed. Raises SystemExit when a
    signal ends it early."""
    from sagc_fast import Trainer

    class Unsaved(Trainer):
        """Leaves no checkpoint: nobody goes on from a run of a study, and one of SmolLM2 is 2 GB."""

        def _save_checkpoint(self, length_histories: list[dict[str, Any]]) -> None:
            pass

    shutil.rmtree(config.run_dir, ignore_errors=True)
    if Unsaved(config).fit()["is_interrupted"]:
        raise SystemExit(f"{config.run_dir} was interrupted; start again to go on")
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(config.run_dir)
    return [json.loads(line) for line in lines]


def split_records(
    records: Sequence[Row], step_fields: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(steps, held-out evaluations) of a run as rows for a CSV file; tokens and CPU seconds are running totals."""
    steps, evaluations, tokens, seconds = [], [], 0, 0.0
    for r in records:
        if r["event"] == "eval":
            length = round(r["length_mean"], 2)
            evaluations.append({"step": r["step"], "accuracy": r["accuracy"], "length_mean": length})
            continue
        tokens += r["num_output_tokens"]
        seconds += r["cpu_seconds"]
        figures = {name: round(r[name], 4) for name in step_fields}
        steps.append({"step": r["step"], **figures, "tokens": tokens, "cpu_seconds": round(seconds, 3)})
    return steps, evaluations


def append(path: Path, key: Row, rows: Sequence[Row]) -> None:
    """Add rows to a CSV file, each with the key of its run in front."""
    path.parent.mkdir(parents=True, exist_ok=True)
    keyed = [{**key, **row} for row in rows]
    with open(path, "a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # shares of a study write to the same files
        writer = csv.DictWriter(file, keyed[0], lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(keyed)
        file.flush()


def rows_of(path: Path, key: Row) -> Iterator[dict[str, str]]:
    """The rows of one run."""
    if path.exists():
        stat = path.stat()
        yield from _read(path, stat.st_mtime_ns, stat.st_size, tuple(key)).get(tuple(map(str, key.values())), ())


@lru_cache(maxsize=16)
def _read(path: Path, mtime_ns: int, size: int, names: tuple[str, ...]) -> dict[tuple[str, ...], list[dict[str, str]]]:
    """The rows by key; read again when the file has changed."""
    runs: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            runs.setdefault(tuple(row[name] for name in names), []).append(row)
    return runs


def columns(path: Path, key: Row) -> Run:
    """The run's numbers, nan where a row has none; ``smooth`` is the reward as a mean over the last :data:`WINDOW`
    steps."""
    rows = list(rows_of(path, key))
    run = {
        name: np.array([float(r[name] or "nan") for r in rows]) for name in (rows[0] if rows else ()) if name not in key
    }
    if run:
        run["smooth"] = running_mean(run["reward_mean"])
    return run


def running_mean(values: np.ndarray) -> np.ndarray:
    """Mean of each value and up to ``WINDOW - 1`` before it."""
    return np.array([values[max(0, i + 1 - WINDOW) : i + 1].mean() for i in range(len(values))])


def band(runs: Sequence[Run], axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, mean, lowest, highest) of the smoothed reward over seeds, where ``axis`` is covered by all of them."""
    start, end = max(r[axis][0] for r in runs), min(r[axis][-1] for r in runs)
    x = np.linspace(start, end, 100)
    y = np.stack([np.interp(x, r[axis], r["smooth"]) for r in runs])
    return x, y.mean(axis=0), y.min(axis=0), y.max(axis=0)


def with_body(page: str, marks: tuple[str, str], body: str) -> str:
    """The page with the text between its two marks replaced."""
    start, end = marks
    before, found, rest = page.partition(start)
    after = rest.partition(end)[2]
    if not found or end not in rest:
        raise SystemExit(f"the page lacks the marks {start} ... {end}")
    return f"{before}{start}\n{body}\n{end}{after}"
