"""Numbers and names as a reader wants to see them, safe to stand in HTML; a number and its unit stay on one line."""

from __future__ import annotations

from html import escape

__all__ = ["compact", "duration", "escape", "format_value", "percent", "sentence_list"]


NBSP = "\N{NO-BREAK SPACE}"


def percent(value: float | None) -> str:
    """A share of one as a percentage, with a decimal only where it matters."""
    if value is None:
        return "–"
    scaled = 100 * value
    return f"{scaled:.1f}%" if abs(scaled) < 10 and scaled != 0 else f"{scaled:.0f}%"


def compact(value: float | None) -> str:
    """Three significant digits, thousands separated, nothing in exponent form that a reader would have to decode."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    if abs(value) >= 1:
        return f"{value:.3g}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def duration(seconds: float | None) -> str:
    """Seconds in the two largest units that say something."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f}{NBSP}s" if seconds < 10 else f"{seconds:.0f}{NBSP}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{NBSP}min {rest:02d}{NBSP}s"
    return f"{minutes // 60}{NBSP}h {minutes % 60:02d}{NBSP}min"


def format_value(value: float | None, style: str) -> str:
    """``style`` is "percent", "seconds" or "number"."""
    return {"percent": percent, "seconds": duration, "number": compact}[style](value)


def sentence_list(items: list[str]) -> str:
    """a, b and c"""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
