"""Stand-ins for peers, and records as the benches make them."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sagc_fast.bench.models import SHAPES
from sagc_fast.bench.record import metric, new_record, result

FAKE_PEER = """
import json, os, sys
settings = json.loads(sys.stdin.readline())
mode = os.environ.get("FAKE_PEER", "right")
if mode == "no start":
    sys.exit("RuntimeError: the engine has no such model")
print(json.dumps({"load_seconds": 0.1, "load_rss_bytes": 1, "versions": {"fake": "1.0"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if mode == "dies":
        os.kill(os.getpid(), 9)
    lengths = request.get("lengths", [])
    if mode == "short":
        lengths = [[n - 1 for n in group] for group in lengths]
    answer = {"lengths": lengths, "wall_seconds": 2.0, "cpu_seconds": 1.0, "peak_rss_bytes": 10**6, "steps": 5,
              "row_steps": sum(map(sum, lengths)), "kv_bytes": 1000, "settings": settings,
              "output_tokens": 100, "seconds": {"rollout": 0.5, "update": 0.25}}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def broken_python(tmp_path: Path) -> Callable[[str], Path]:
    """``broken_python("dies")``: an "interpreter" that has every module and, whatever script it is given, runs the
    stand-in above in one of its ways to fail."""

    def make(mode: str) -> Path:
        script = tmp_path / "fake_peer.py"
        script.write_text(FAKE_PEER)
        python = tmp_path / f"python {mode}"
        program = f'[ "$1" = -c ] && exit 0\nFAKE_PEER="{mode}" exec "{sys.executable}" -S "{script}"\n'
        python.write_text(f"#!/bin/sh\n{program}")
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        return python

    return make


@pytest.fixture
def fake_python(broken_python: Callable[[str], Path]) -> Path:
    """The same, and it does what it is asked."""
    return broken_python("right")


@pytest.fixture
def make_record() -> Callable[..., dict[str, Any]]:
    """``make_record([1.0, 1.1], label="a", gemm=1e11)``: a record with one primary and one secondary metric."""

    def make(values: list[float], label: str | None = None, gemm: float = 1e11, better: str = "higher") -> dict:
        record = new_record("rollout", {"model": "S"}, 1, label)
        record["ceilings"] = {"gemm_flops": {"fp32": {"per_wall_second": 1.0, "per_cpu_second": gemm}}}
        metrics = {"speed": metric(values, "tokens/s", better, True), "size": metric([1.0], "MB", "lower")}
        record["results"] = [result("sagc_fast", metrics)]
        return record

    return make


@pytest.fixture
def thin_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """S with one thin layer, in a cache of its own, and few ceilings."""
    monkeypatch.setenv("SAGC_BENCH_CACHE", str(tmp_path / "cache"))
    thin = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    monkeypatch.setitem(SHAPES, "S", SHAPES["S"] | thin | {"head_dim": 8})
    monkeypatch.setattr("sagc_fast.bench.ceilings.READ_BYTES", 2**16)
