"""The display: a live table on a terminal, plain lines elsewhere, and never in the way of the run."""

from __future__ import annotations

import io
import logging
import re

import pytest

from sagc_fast.train.display import Display, LiveDisplay, PlainDisplay, duration, make_display

RECORD = {
    "step": 3, "group_size": 8, "reward_mean": 0.5, "outcome_mean": 0.25, "straggler_rate": 0.1, "length_mean": 41.0,
    "clipped_ratio": 0.0, "tokens_per_second": 1234.0, "idle_fraction": 0.3, "step_seconds": 2.0, "is_skipped": False,
}  # fmt: skip
EVAL = {"step": 2, "accuracy": 0.5, "accuracy_stderr": 0.04, "num_problems": 128, "length_mean": 40.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(display: Display) -> None:
    display.start()
    display.evaluation(EVAL)
    display.progress("rollout", 2, 8)
    display.step(RECORD, 95.0)
    logging.getLogger("sagc_fast.train").warning("look [here]")
    display.stop()
    logging.getLogger("sagc_fast.train").warning("too late")


def test_redirected_output_is_one_plain_line_per_step():
    out = io.StringIO()
    show(make_display("auto", 10, out))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("held-out accuracy after step 2: 0.500 +- 0.040")
    assert lines[1].startswith("step 3/10  G 8  reward 0.500  correct 25%  stragglers 10%")
    assert lines[1].endswith("left 1m35s")
    assert lines[2:] == ["look [here]"]
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    ("columns", "term", "kind"),
    [
        ("120", "xterm", LiveDisplay),
        ("40", "xterm", LiveDisplay),
        ("20", "xterm", PlainDisplay),
        ("120", "dumb", PlainDisplay),
    ],
)
def test_a_tiny_or_dumb_terminal_gets_plain_lines(monkeypatch, columns, term, kind):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", term)
    assert type(make_display("auto", 10, Terminal())) is kind


@pytest.mark.parametrize("columns", [20, 30, 40, 80, 100, 200])
@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_no_width_breaks_a_figure_or_loses_one(monkeypatch, columns, term):
    """At 80 columns a step's line was cut in the middle of words by the terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", term)
    out = Terminal()
    display = make_display("auto", 10, out)
    display.start()
    display.progress("rollout", 2, 8)
    display.step(RECORD, 95.0)
    display.stop()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert max(map(len, re.split(r"[\r\n]+", text))) <= columns
    for name in ("step 3/10", "left 1m35s", "reward", "0.500", "stragglers", "10%", "1234", "idle", "30%"):
        assert name in text


def test_the_live_table_shows_the_figures(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    show(make_display("live", 10, out))
    for text in ("step 3/10", "stragglers", "1234", "held-out", "look [here]", "left 1m35s"):
        assert text in out.getvalue()


def test_off_shows_nothing():
    out = io.StringIO()
    show(make_display("off", 10, out))
    assert out.getvalue() == ""


def test_a_stream_that_has_gone_does_not_stop_the_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    display = PlainDisplay(10, Gone())
    show(display)
    closed = io.StringIO()
    closed.close()
    show(PlainDisplay(10, closed))


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0s"), (59.4, "59s"), (95, "1m35s"), (3725, "1h02m")])
def test_durations(seconds, text):
    assert duration(seconds) == text
