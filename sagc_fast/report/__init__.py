"""One self-contained HTML page about one or several training runs; needs neither torch nor a network."""

from __future__ import annotations

from sagc_fast.report.page import write_report

__all__ = ["write_report"]
