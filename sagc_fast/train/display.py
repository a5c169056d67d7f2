"""What a user sees while a run trains: calm lines that stay in place on a terminal, one line per step elsewhere."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, TypeVar

T = TypeVar("T")

MIN_COLUMNS = 30
"""A narrower terminal gets plain lines: its live display would be a tower of single figures."""
BAR_COLUMNS = 24
INDENT = "  "
FIGURE_COLUMNS = 4
"""Least width of a figure, so that columns stand still while values change."""


def make_display(mode: str, num_steps: int, stream: TextIO | None = None) -> Display:
    """``live``, ``plain``, ``off``, or ``auto``: live when ``stream`` (default: stdout) is a terminal that can move its
    cursor and is not tiny."""
    stream = stream or sys.stdout
    if mode == "off":
        return Display(num_steps)
    if mode == "plain":
        return PlainDisplay(num_steps, stream)
    from rich.console import Console

    console = Console(file=stream)
    if mode == "live" or (console.is_terminal and not console.is_dumb_terminal and console.width >= MIN_COLUMNS):
        return LiveDisplay(num_steps, console)
    return PlainDisplay(num_steps, stream, shutil.get_terminal_size().columns if console.is_terminal else None)


class Display(logging.Handler):
    """Shows nothing. As a logging handler it passes warnings of sagc_fast on to :meth:`note`."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(logging.WARNING)
        self.num_steps = num_steps

    def start(self) -> None:
        logging.getLogger("sagc_fast").addHandler(self)

    def stop(self) -> None:
        logging.getLogger("sagc_fast").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.note(record.getMessage(), is_alarm=record.levelno >= logging.ERROR)

    def note(self, text: str, is_alarm: bool = False) -> None:
        """A sentence for the user."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """Within a step: ``done`` of ``total`` groups or micro-batches."""

    def step(self, record: Mapping[str, Any], seconds_left: float) -> None:
        """A step is done (record: see metrics.jsonl)."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """A held-out evaluation is done."""


class PlainDisplay(Display):
    """One line per step, broken between figures where a terminal of ``columns`` is too narrow for it. A stream that has
    gone away (a closed pipe) silences it; the run goes on."""

    def __init__(self, num_steps: int, stream: TextIO, columns: int | None = None) -> None:
        super().__init__(num_steps)
        self._stream: TextIO | None = stream
        self._columns = columns

    def note(self, text: str, is_alarm: bool = False) -> None:
        self._print(text)

    def step(self, record: Mapping[str, Any], seconds_left: float) -> None:
        parts = [f"step {record['step']}/{self.num_steps}", *step_summary(record), f"left {duration(seconds_left)}"]
        rows = fitted([(part, len(part)) for part in parts], (self._columns or sys.maxsize) - len(INDENT))
        self._print(f"\n{INDENT}".join("  ".join(row) for row in rows))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._print(evaluation_summary(record))

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            print(text, file=self._stream, flush=True)
        except (OSError, ValueError):
            self._stream = None


class LiveDisplay(Display):
    """Lines that stay in place: where the run is, and its latest figures, in as many rows as the terminal's width asks
    for (a change of it counts from the next redraw). Notes scroll above them."""

    def __init__(self, num_steps: int, console: Any) -> None:
        super().__init__(num_steps)
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._step = 0
        self._phase = "starting"
        self._latest: Mapping[str, Any] | None = None
        self._accuracy: Mapping[str, Any] | None = None
        self._seconds_left = 0.0

    def start(self) -> None:
        super().start()
        self._live.start()
        self._draw()

    def stop(self) -> None:
        self._phase = ""
        self._draw()
        self._live.stop()
        super().stop()

    def note(self, text: str, is_alarm: bool = False) -> None:
        self._console.print(text, style="bold red" if is_alarm else None, markup=False, highlight=False)

    def progress(self, phase: str, done: int, total: int) -> None:
        self._phase = f"{phase} {done}/{total}"
        self._draw()

    def step(self, record: Mapping[str, Any], seconds_left: float) -> None:
        self._step, self._latest, self._seconds_left = record["step"], record, seconds_left
        self._draw()

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._accuracy = record
        self.note(evaluation_summary(record))
        self._draw()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.table import Table

        width = self._console.width
        values = [("held-out", f"{self._accuracy['accuracy']:.3f}")] if self._accuracy else []
        values += figures(self._latest) if self._latest else []
        rows = fitted([(pair, max(*map(len, pair), FIGURE_COLUMNS)) for pair in values], width)
        tables = []
        for row in rows:
            table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
            for name, _ in row:
                table.add_column(name, justify="right", no_wrap=True, min_width=FIGURE_COLUMNS)
            table.add_row(*(text for _, text in row))
            tables.append(table)
        self._live.update(Group(self._head(width), *tables))

    def _head(self, width: int) -> Any:
        """Where the run is, on one line; a narrow terminal shortens the bar, then cuts the phase."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        texts = [f"step {self._step}/{self.num_steps}"]
        texts += [f"left {duration(self._seconds_left)}"] if self._latest else []
        texts += [self._phase] if self._phase else []
        bar_width = min(BAR_COLUMNS, width - sum(len(text) + 2 for text in texts))
        head = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        bar = [ProgressBar(total=self.num_steps, completed=self._step, width=bar_width)] if bar_width >= 4 else []
        for _ in (*texts, *bar):
            head.add_column(no_wrap=True)
        head.add_row(texts[0], *bar, *texts[1:])
        return head


def fitted(items: Sequence[tuple[T, int]], columns: int) -> list[list[T]]:
    """Items of given widths in as few rows as hold them side by side, two blanks between; an item wider than
    ``columns`` has a row of its own."""
    rows: list[list[T]] = []
    used = columns
    for item, width in items:
        if used + 2 + width > columns:
            rows.append([])
            used = -2
        rows[-1].append(item)
        used += 2 + width
    return rows


def figures(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of what matters most about a step."""
    mean_size = record.get("group_size_mean")  # of a step whose prompts have sizes of their own
    return [
        ("G", str(record["group_size"]) if mean_size is None else f"{mean_size:.1f}"),
        ("reward", f"{record['reward_mean']:.3f}"),
        ("correct", f"{record['outcome_mean']:.0%}"),
        ("stragglers", f"{record['straggler_rate']:.0%}"),
        ("length", f"{record['length_mean']:.0f}"),
        ("cut", f"{record['clipped_ratio']:.0%}"),
        ("tok/s", f"{record['tokens_per_second']:.0f}"),
        ("idle", f"{record['idle_fraction']:.0%}"),
        ("s/step", f"{record['step_seconds']:.1f}"),
    ]


def step_summary(record: Mapping[str, Any]) -> list[str]:
    """The figures of a step as words."""
    return [*(f"{name} {value}" for name, value in figures(record)), *(["(no update)"] if record["is_skipped"] else [])]


def evaluation_summary(record: Mapping[str, Any]) -> str:
    return (
        f"held-out accuracy after step {record['step']}: {record['accuracy']:.3f} +- {record['accuracy_stderr']:.3f} "
        f"({record['num_problems']} problems, mean length {record['length_mean']:.0f})"
    )


def duration(seconds: float) -> str:
    """3725 -> 1h02m."""
    minutes, whole = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{whole:02d}s" if minutes else f"{whole}s"
