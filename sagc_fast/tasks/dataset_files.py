"""Reads question/answer rows from JSONL, Parquet, Arrow and local Hugging Face dataset folders.

Everything is read with json and pyarrow alone; the ``datasets`` package is not needed. Every error names the file and,
for JSONL, the line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagc_fast.errors import ConfigError, DatasetError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it stands, for messages: ``train.jsonl, line 3`` or ``data.parquet, row 3`` (from 1)."""

    question: str
    answer: str
    place: str


def read_rows(path: str, split: str | None, question_column: str, answer_column: str) -> list[Row]:
    """All rows of a file or folder, in order.

    Args:
        path: a file, a folder of files, or a folder written by ``datasets.save_to_disk``.
        split: which part of a folder with several (``train``, ``test``, ...); None: the only one, or ``train``.

    Raises:
        DatasetError: nothing there, nothing readable in it, a damaged line or file, a missing column (those present are
            named), an empty or non-text question, a missing answer.
        ConfigError: Parquet or Arrow without pyarrow installed.
    """
    rows = []
    for file in _files(Path(path).expanduser(), split):
        num_before = len(rows)
        reader = _read_lines if file.suffix in (".jsonl", ".ndjson", ".json") else _read_table
        for record, place in reader(file, (question_column, answer_column)):
            question = _text(record, question_column, place)
            rows.append(Row(question, _text(record, answer_column, place), place))
        if len(rows) == num_before:
            raise DatasetError(f"{file} holds no rows; give a file with at least one line of question and answer.")
    return rows


def _files(path: Path, split: str | None) -> list[Path]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DatasetError(f"{path} ends in {path.suffix!r}; a dataset file ends in one of {', '.join(SUFFIXES)}.")
        return [path]
    if not path.is_dir():
        raise DatasetError(f"There is no dataset at {path}; give a file or a folder.")
    if (path / "dataset_dict.json").is_file():
        return _saved_files(_subfolder(path, split))
    if (path / "state.json").is_file():
        return _saved_files(path)
    files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file() and not _is_metadata(f))
    if not files:
        raise DatasetError(f"The folder {path} holds no dataset file ({', '.join(SUFFIXES)}); check the path.")
    wanted = split or "train"
    of_split = [f for f in files if f.name.startswith(wanted) or wanted in f.relative_to(path).parts[:-1]]
    if of_split:
        return of_split
    if split is not None:
        names = ", ".join(str(f.relative_to(path)) for f in files[:8])
        raise DatasetError(f"The folder {path} holds no file of the split {split!r}; it has {names}.")
    return files


def _is_metadata(file: Path) -> bool:
    return file.name in ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def _subfolder(path: Path, split: str | None) -> Path:
    splits = _load_json(path / "dataset_dict.json").get("splits", [])
    chosen = split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
    if chosen not in splits:
        raise DatasetError(f"The dataset {path} has no split {chosen!r}; it has {', '.join(map(str, splits))}.")
    return path / chosen


def _saved_files(folder: Path) -> list[Path]:
    """The data files that ``datasets.save_to_disk`` lists."""
    listed = _load_json(folder / "state.json").get("_data_files", [])
    files = [folder / entry["filename"] for entry in listed]
    for file in files:
        if not file.is_file():
            raise DatasetError(f"{folder / 'state.json'} lists {file.name}, which is not there; copy the whole folder.")
    return files


def _load_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file} cannot be read ({error}); save the dataset again.") from error


def _read_lines(file: Path, columns: tuple[str, str]) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DatasetError(f"{file} cannot be read: {error.strerror}; check the path and its permissions.") from error
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        place = f"{file}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DatasetError(
                f"{place} is not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8."
            ) from error
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{place} is not JSON ({error}); each line must be one JSON object.") from error
        if not isinstance(record, dict):
            raise DatasetError(f"{place} holds a {type(record).__name__}; each line must be one JSON object.")
        _check_columns(columns, record, place)
        yield record, place


def _read_table(file: Path, columns: tuple[str, str]) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise ConfigError(
            f"Reading {file} needs the package pyarrow; install it with pip install sagc_fast[tasks]."
        ) from error
    try:
        if file.suffix == ".parquet":
            table = parquet.read_table(file)
        else:
            with pyarrow.memory_map(str(file)) as source:
                table = ipc.open_stream(source).read_all()
    except (OSError, pyarrow.ArrowException) as error:
        raise DatasetError(f"{file} is not a readable {file.suffix[1:]} file ({error}); write it again.") from error
    _check_columns(columns, dict.fromkeys(table.column_names), str(file))
    for number, record in enumerate(table.select(list(dict.fromkeys(columns))).to_pylist(), start=1):
        yield record, f"{file}, row {number}"


def _check_columns(columns: tuple[str, str], record: dict[str, Any], place: str) -> None:
    for column in columns:
        if column not in record:
            raise DatasetError(
                f"{place} has no column {column!r}; it has {', '.join(map(repr, record)) or 'none'} "
                "(set task.question_column and task.answer_column)."
            )


def _text(record: dict[str, Any], column: str, place: str) -> str:
    value = record[column]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DatasetError(f"{place}: column {column!r} holds {value!r:.60}; it must be text or a number.")
    if not value.strip():
        raise DatasetError(f"{place}: column {column!r} is empty; remove the row or fill it in.")
    return value
