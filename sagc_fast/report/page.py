"""Puts the sections into one HTML file that needs nothing beside itself."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from sagc_fast.errors import ConfigError
from sagc_fast.report import overview, sections
from sagc_fast.report.data import RunData, load_runs
from sagc_fast.report.text import escape
from sagc_fast.report.timeline import run_style, tag

# Nothing may be fetched, whatever a completion's text contains.
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_report(run_dirs: Sequence[Path | str], out: Path | str) -> Path:
    """Write one self-contained page about the runs and return its path.

    The file appears under its name only when it is complete. Raises ConfigError for a folder that is no run directory,
    for runs without a single step, and when the file cannot be written.
    """
    out = Path(out)
    page = render_page(load_runs([Path(folder) for folder in run_dirs]))
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(page, encoding="utf-8", errors="replace")
        os.replace(aside, out)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise ConfigError(f"{out} cannot be written ({error.strerror}); choose another place with --out.") from None
    return out


def render_page(runs: Sequence[RunData]) -> str:
    """The whole document."""
    makers = (
        sections.summary_section,
        sections.learning_section,
        sections.straggler_section,
        sections.length_section,
        sections.time_section,
        sections.rollout_section,
        sections.health_section,
        sections.details_section,
    )
    body = "".join(make(runs) for make in makers)
    names = ", ".join(run.name for run in runs)
    title = f"Training report: {names}"
    assets = files("sagc_fast.report") / "assets"
    style = (assets / "report.css").read_text(encoding="utf-8")
    script = (assets / "report.js").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{style}</style></head><body>'
        f"<header><p>sagc_fast · training report</p><h1>{escape(names)}</h1>"
        f"<p>{escape(overview.context_line(runs))}</p>{_contents()}</header>"
        f"{_legend(runs)}<main>{body}</main>"
        '<div id="tip" role="status" hidden></div>'
        f'<script type="application/json" id="report-data">{embedded_json(runs)}</script><script>{script}</script>'
        "</body></html>\n"
    )


def embedded_json(runs: Sequence[RunData]) -> str:
    """Every number behind the figures, exactly as the run files hold them; safe inside a script element."""
    data: dict[str, Any] = {
        "runs": [
            {"name": run.name, "tag": run.tag, "controller": run.controller, "steps": run.steps, "evals": run.evals}
            for run in runs
        ]
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _contents() -> str:
    links = (
        ("summary", "Summary"),
        ("learning", "Learning"),
        ("stragglers", "Stragglers"),
        ("lengths", "Lengths"),
        ("time", "Time"),
        ("rollouts", "Rollouts"),
        ("health", "Optimisation"),
        ("details", "Details"),
    )
    return f'<nav aria-label="Sections">{"".join(f"""<a href="#{a}">{title}</a>""" for a, title in links)}</nav>'


def _legend(runs: Sequence[RunData]) -> str:
    """Which letter and colour is which run; with several runs each can be switched off."""
    if len(runs) == 1:
        return ""
    entries = "".join(
        f'<label><input type="checkbox" class="show" data-run="{i}" checked>{tag(run, i)}'
        f'<svg class="dash" aria-hidden="true" viewBox="0 0 30 6"><path class="line {run_style(i)}" d="M0 3H30"/></svg>'
        f"{escape(run.name)}</label>"
        for i, run in enumerate(runs)
    )
    return f'<div class="legend" role="group" aria-label="Runs shown">{entries}</div>'
