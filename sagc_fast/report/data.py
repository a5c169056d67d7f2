"""Reads run directories, whole or damaged, into columns of numbers.

A run that is still going, was killed in the middle of a line or lacks a file still gives a report; what could not be
read is said in :attr:`RunData.problems`, one sentence each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sagc_fast.errors import ConfigError

Columns = dict[str, list[float | None]]


@dataclass(frozen=True)
class RunData:
    """What one run directory says, with its place in the report."""

    name: str
    tag: str
    """A letter that stands for the run in the figures, so that colour is never the only cue."""
    path: Path
    steps: Columns
    """One entry per optimizer step, ascending; nested values have dotted names ("arms.4.mean")."""
    evals: Columns
    """One entry per held-out evaluation, ascending; "minutes" is the training time at that step."""
    timelines: tuple[dict[str, Any], ...]
    """Records of timeline.jsonl as written, ascending by step."""
    controller: str = "unknown"
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        return len(self.steps["step"])

    def column(self, name: str) -> list[float | None]:
        """Values per step; all None when the run never recorded them."""
        return self.steps.get(name) or [None] * self.num_steps

    @property
    def adapts(self) -> bool:
        """True when the group size follows the lengths seen."""
        return self.controller in ("sagc", "prompt_aware", "cost_aware")

    @property
    def size_column(self) -> str:
        """The column that holds a step's group size; its mean where every prompt has its own."""
        return "group_size_mean" if "group_size_mean" in self.steps else "group_size"

    @property
    def arms(self) -> list[int]:
        """Group sizes that the controller keeps a posterior for, ascending; empty when it keeps none."""
        return sorted({int(key.split(".")[1]) for key in self.steps if key.startswith("arms.")})


def load_runs(folders: Sequence[Path]) -> list[RunData]:
    """Read the folders in order. Raises ConfigError when one is no run directory or when no run has a single step."""
    if not folders:
        raise ConfigError("A report needs at least one run directory, for example runs/demo/sagc.")
    names = _unique_names([Path(folder) for folder in folders])
    runs = [
        _load_run(Path(folder), name, index) for index, (folder, name) in enumerate(zip(folders, names, strict=True))
    ]
    if not any(run.num_steps for run in runs):
        listed = ", ".join(str(run.path) for run in runs)
        raise ConfigError(
            f"No optimizer step is recorded in {listed}; a report needs a run that finished at least one step."
        )
    return runs


def _load_run(folder: Path, name: str, index: int) -> RunData:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run directory; name a folder that `sagc-fast train` wrote.")
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"{folder} holds no metrics.jsonl; name a folder that `sagc-fast train` wrote.")
    problems: list[str] = []
    records = list(_read_jsonl(folder / "metrics.jsonl", problems))
    by_step = {r["step"]: r for r in records if r.get("event") == "step" and _number(r.get("step")) is not None}
    steps = _columns([by_step[step] for step in sorted(by_step)])
    steps["minutes"] = [None if t is None else t / 60 for t in steps.get("time_seconds", [])]
    if not by_step:
        problems.append("no optimizer step is recorded yet")
    timelines = ()
    if (folder / "timeline.jsonl").is_file():
        found = (r for r in _read_jsonl(folder / "timeline.jsonl", problems) if _is_timeline(r))
        timelines = tuple(sorted({r["step"]: r for r in found}.values(), key=lambda r: r["step"]))
    first = by_step[min(by_step)] if by_step else {}
    return RunData(
        name=name,
        tag=chr(ord("A") + index) if index < 26 else str(index + 1),
        path=folder,
        steps=steps,
        evals=_eval_columns(records, steps),
        timelines=timelines,
        controller=str(first.get("controller", "unknown")),
        config=_read_config(folder / "config.yaml", problems),
        versions=_read_versions(folder / "versions.json", problems),
        problems=tuple(problems),
    )


def _eval_columns(records: list[dict[str, Any]], steps: Columns) -> Columns:
    evals = {r["step"]: r for r in records if r.get("event") == "eval" and _number(r.get("step")) is not None}
    columns = _columns([evals[step] for step in sorted(evals)])
    minutes = dict(zip(steps["step"], steps["minutes"], strict=False)) | {0: 0.0}
    columns["minutes"] = [minutes.get(step) for step in columns["step"]]
    return columns


def _read_jsonl(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the objects of the file; every unreadable line is skipped and named once, together."""
    bad_lines = []
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    record = json.loads(line)
                except ValueError:
                    record = None
                if isinstance(record, dict):
                    yield record
                elif line.strip():
                    bad_lines.append(number)
    except OSError as error:
        problems.append(f"{path.name} could not be read ({error.strerror})")
    if bad_lines:
        more = f" and {len(bad_lines) - 1} more" if len(bad_lines) > 1 else ""
        problems.append(f"line {bad_lines[0]}{more} of {path.name} could not be read and was left out")


def _columns(records: list[dict[str, Any]]) -> Columns:
    flat = [dict(_leaves(record)) for record in records]
    names = dict.fromkeys(name for record in flat for name in record)
    columns = {name: [record.get(name) for record in flat] for name in names}
    return {"step": []} | columns


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        number = float(value) if isinstance(value, bool) else _number(value)
        if number is not None:
            yield prefix, number
        return
    for key, item in items:
        yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def _is_timeline(record: dict[str, Any]) -> bool:
    rows = record.get("rows")
    return (
        _number(record.get("step")) is not None
        and _number(record.get("capacity_rows")) is not None
        and isinstance(rows, list)
        and all(isinstance(r, dict) and all(_number(r.get(k)) is not None for k in ROW_KEYS) for r in rows)
    )


ROW_KEYS = ("group", "sample", "first_step", "last_step", "length")


def _read_config(path: Path, problems: list[str]) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append("config.yaml is missing")
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        problems.append("config.yaml could not be read")
        return {}
    return config if isinstance(config, dict) else {}


def _read_versions(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        versions = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append("versions.json is missing")
        return {}
    except (OSError, ValueError):
        problems.append("versions.json could not be read")
        return {}
    return versions if isinstance(versions, dict) else {}


def _unique_names(folders: list[Path]) -> list[str]:
    """The last part of each path that tells them apart."""
    resolved = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(set(resolved)):
            break
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            names[index] = f"{name} ({seen[name]})"
    return names
