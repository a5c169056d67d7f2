"""Two sets of benchmark records: what really changed, and what is noise.

A metric counts as changed when three things agree: the bootstrap interval of the ratio of medians excludes 1, an exact
rank test is significant after Holm's correction over all metrics compared, and the interval lies beyond the machine's
own drift, read off the ceilings that both sides measured beside their figures.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sagc_fast.bench.record import read_history
from sagc_fast.bench.stats import CONFIDENCE, RatioInterval, holm, rank_sum_p, ratio_interval, smallest_p
from sagc_fast.errors import ConfigError

Verdict = Literal["faster", "slower", "better", "worse", "no difference", "too few runs"]
RATES = ("s", "ms", "us", "/s")


@dataclass(frozen=True, slots=True)
class Change:
    """One metric of one result, B against A."""

    bench: str
    settings: dict[str, Any]
    name: str
    metric: str
    unit: str
    better: str
    is_primary: bool
    before: float
    after: float
    num_before: int
    num_after: int
    ratio: float
    """after / before, of medians."""
    low: float
    high: float
    p_value: float
    drift: float
    """How much the machine itself changed between the two, as a factor >= 1 (from the ceilings; 1 without them)."""
    verdict: Verdict

    @property
    def worsening(self) -> float:
        """How much worse B is, as a share: 0.05 is 5% slower; negative when it is better."""
        factor = self.ratio if self.better == "lower" else 1 / self.ratio
        return factor - 1


def select(name: str, history: Path | None) -> list[dict[str, Any]]:
    """Records of a history file, or those of ``history`` whose label is ``name`` or whose commit begins with it."""
    if Path(name).is_file():
        return read_history(Path(name))
    if history is None:
        raise ConfigError(f"{name!r} is no file; give two history files, or labels or commits with --history FILE.")
    records = read_history(history)
    found = [
        record
        for record in records
        if name == record.get("label") or (record.get("commit") or "").startswith(name.rstrip("+"))
    ]
    if not found:
        known = sorted({str(record.get("label") or record.get("commit")) for record in records})
        raise ConfigError(
            f"{history} holds no record labelled {name!r} or of that commit; it holds {', '.join(known)}."
        )
    return found


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]], is_all: bool = False) -> list[Change]:
    """Changes of every metric that both sides measured with the same settings; primary ones alone unless ``is_all``.

    Runs of several records of one side are pooled. Raises ConfigError when the two have nothing in common.
    """
    old, new = _pool(before), _pool(after)
    shared = [key for key in old if key in new and (is_all or old[key]["primary"])]
    if not shared:
        raise ConfigError(
            "The two have no benchmark with the same settings in common; measure both with the same command."
        )
    values = [(key, old[key]["values"], new[key]["values"]) for key in shared]
    p_values = [rank_sum_p(a, b) for _, a, b in values]
    significant = holm(p_values)
    changes = []
    for (key, a, b), p_value, is_significant in zip(values, p_values, significant, strict=True):
        interval = ratio_interval(b, a)
        drift = _drift(old[key]["ceilings"], new[key]["ceilings"])
        bench, settings, name, metric = key
        changes.append(
            Change(
                bench, json.loads(settings), name, metric, old[key]["unit"], old[key]["better"], old[key]["primary"],
                float(np.median(a)), float(np.median(b)), len(a), len(b),
                interval.ratio, interval.low, interval.high, p_value, drift,
                _verdict(interval, is_significant, drift, old[key], len(a), len(b)),
            )
        )  # fmt: skip
    return changes


def to_dict(change: Change) -> dict[str, Any]:
    return {**asdict(change), "worsening": change.worsening}


def parse_share(text: str) -> float:
    """``5%`` or ``0.05`` -> 0.05; ConfigError for anything else."""
    try:
        share = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf:
        raise ConfigError(f"--fail-if-slower is {text!r}; it must be a share such as 5% or 0.05.")
    return share


def _verdict(
    interval: RatioInterval, is_significant: bool, drift: float, metric: dict[str, Any], num_a: int, num_b: int
) -> Verdict:
    if smallest_p(num_a, num_b) > 1 - CONFIDENCE:
        return "too few runs"
    if not (is_significant and interval.excludes(margin=drift)):
        return "no difference"
    is_gain = (interval.ratio > 1) == (metric["better"] == "higher")
    is_speed = metric["unit"].endswith(RATES)
    return ("faster" if is_gain else "slower") if is_speed else ("better" if is_gain else "worse")


def _pool(records: list[dict[str, Any]]) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    """(bench, settings, result, metric) -> its runs in all records, with the ceilings of each record."""
    pooled: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for record in records:
        settings = json.dumps(record["settings"], sort_keys=True)
        for entry in record["results"]:
            for name, metric in entry["metrics"].items():
                key = (record["bench"], settings, entry["name"], name)
                kept = pooled.setdefault(
                    key, {**{k: metric[k] for k in ("unit", "better", "primary")}, "values": [], "ceilings": []}
                )
                kept["values"] += metric["values"]
                kept["ceilings"].append(_ceiling_rates(record.get("ceilings") or {}))
    return pooled


def _ceiling_rates(ceilings: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a nested record that are rates: {"read_bytes/per_cpu_second": 2.1e10, ...}."""
    found = {}
    for name, value in ceilings.items():
        if isinstance(value, dict):
            found |= _ceiling_rates(value, f"{prefix}{name}/")
        elif name == "per_cpu_second":  # the wall's would show the neighbours, who come and go within a record
            found[prefix + name] = float(value)
    return found


def _drift(before: list[dict[str, float]], after: list[dict[str, float]]) -> float:
    """The largest factor, up or down, between the medians of a ceiling on the two sides."""
    factors = [1.0]
    for name in set().union(*before) & set().union(*after):
        a, b = (np.median([rates[name] for rates in side if name in rates]) for side in (before, after))
        factors.append(max(a / b, b / a))
    return float(max(factors))
