"""The check's text table, and its targets beside what was measured. Standard library only."""

from __future__ import annotations

from typing import Any

REHEARSAL = "REHEARSAL ON CPU, NO GPU FIGURES"
TARGETS = {
    "decode": ("decode step, 128 rows, 3B: at most 1.25 x the bytes bound", 1.25, "most"),
    "prefill": ("prefill, 3B: at least 55% of the measured bf16 matrix rate", 0.55, "least"),
    "attention": ("training attention: at least 0.8 x flash-attn's speed", 0.8, "least"),
    "generate": ("rollout: at least 8 x transformers.generate on the long tail", 8.0, "least"),
    "gap": ("host gap of a decode step: below 5%", 0.05, "most"),
}


def targets_of(records: list[dict[str, Any]], is_rehearsal: bool) -> list[dict[str, Any]]:
    """Each target with the worst ratio that was measured for it, and whether it is met."""
    found = []
    for name, (sentence, bound, side) in TARGETS.items():
        rows = [row for record in records for row in record["rows"] if row.get("target") == name and "ratio" in row]
        worst = (max if side == "most" else min)((row["ratio"] for row in rows), default=None)
        if worst is None or is_rehearsal:
            status = "not measured"
        else:
            status = "met" if (worst <= bound if side == "most" else worst >= bound) else "missed"
        found.append({"name": name, "target": sentence, "bound": bound, "measured": worst, "status": status})
    return found


def render(whole: dict[str, Any]) -> str:
    """Part by part its rows, then the targets, then what did not go through."""
    lines = []
    if whole["is_rehearsal"]:
        lines.append(REHEARSAL)
    for record in whole["parts"]:
        mark = "" if record["status"] == "ok" else f"  {record['status'].upper()}: {record['error']}"
        lines.append(f"== {record['part']} ({record['seconds']:.0f} s){mark}")
        lines += [_line(row) for row in record["rows"]]
    lines.append("== targets (the worst of what was measured)")
    for target in whole["targets"]:
        measured = "-" if target["measured"] is None else f"{target['measured']:.3g}"
        lines.append(f"  {target['status']:<13}{measured:>8}  {target['target']}")
    failed = whole["failed"]
    total = len(whole["parts"])
    lines.append(f"{total - len(failed)} of {total} parts went through in {whole['seconds']:.0f} s" + (
        f"; not: {', '.join(failed)}" if failed else ""
    ))  # fmt: skip
    if whole["is_rehearsal"]:
        lines.append(REHEARSAL)
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    value = row["value"]
    shown = "-" if value is None else value if isinstance(value, str) else f"{value:,.4g}"
    figure = f"{shown} {row['unit']}".rstrip()
    share = f"{row['share']:.0%}" if "share" in row else ""
    return f"  {row['what']:<58}{figure:>18}{share:>6}  {row.get('beside', '')}".rstrip()
