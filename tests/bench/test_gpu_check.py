"""The driver of bench/gpu_check.sh: parts are isolated, ended in time and summed up; a rehearsal of the cheap ones."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]

GOOD = """
from gpu.report import part, row
with part() as outcome:
    row("speed", 5.0, "GB/s", ceiling=10.0, target="gap", ratio=0.01)
    row("more", None, beside="not there")
"""
FAILING = """
from gpu.report import part, row
with part() as outcome:
    with outcome.section("one"):
        raise ValueError("no such thing")
    row("behind it", 2.0)
"""
HANGING = """
import subprocess, sys, time
from gpu.report import part, row
with part():
    row("before", 1.0, target="decode", ratio=1.5)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    time.sleep(600)
"""
DYING = "import os; os.kill(os.getpid(), 9)"


@pytest.fixture
def driver(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from gpu import driver

    return driver


@pytest.fixture
def parts(driver: ModuleType, tmp_path: Path, monkeypatch):
    """Stand-ins as modules, and the environment to run them in."""
    for name, source in {"good": GOOD, "failing": FAILING, "hanging": HANGING, "dying": DYING}.items():
        (tmp_path / f"stand_in_{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT / 'bench'}")

    def make(*names: str, limit: float = 60.0) -> list:
        return [driver.Part(name, (f"stand_in_{name}",), limit) for name in names]

    return make


def test_a_part_that_fails_or_dies_hides_no_other(driver: ModuleType, parts, tmp_path: Path, capsys) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    out.mkdir()
    kept = []

    def keep(records: list) -> None:
        driver.write_results(records, work, out, False, 3.0)
        kept.append(json.loads((out / "gpu_check.json").read_text())["parts"])

    stages = [(part,) for part in parts("failing", "dying", "good")]
    records = driver.run(stages, work, 300.0, dict(os.environ), keep)
    assert [[part["part"] for part in parts] for parts in kept] == [
        ["failing"], ["failing", "dying"], ["failing", "dying", "good"],
    ]  # fmt: skip
    failing, dying, good = records
    assert [r["status"] for r in records] == ["failed", "failed", "ok"]
    assert failing["error"] == "one: no such thing (exit 1)"
    assert [row["what"] for row in failing["rows"]] == ["one", "behind it"]
    assert "failed: ValueError: no such thing" in failing["rows"][0]["beside"]
    assert dying["error"].endswith("(signal 9)")
    assert good["rows"][0]["share"] == 0.5
    assert driver.summarize(driver.write_results(records, work, out, False, 3.0), out) == 2
    said = capsys.readouterr().out.splitlines()
    brief = json.loads(said[-1])
    assert brief["failed"] == ["failing", "dying"]
    assert brief["targets"]["gap"] == "met"
    assert brief["targets"]["prefill"] == "not measured"
    assert (out / "gpu_check.txt").read_text().strip() in "\n".join(said)
    assert "no such thing" in (out / "logs.txt").read_text()
    assert sorted(path.name for path in out.iterdir()) == ["gpu_check.json", "gpu_check.txt", "logs.txt"]


def test_the_parts_of_a_stage_run_at_the_same_time(driver: ModuleType, parts, tmp_path: Path) -> None:
    """One waits for the other's file, and would wait until its limit if it ran first."""
    waiting = "import pathlib, time\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.05)\n"
    (tmp_path / "stand_in_waiting.py").write_text(waiting.format(str(tmp_path / "token")))
    (tmp_path / "stand_in_giving.py").write_text(f"open({str(tmp_path / 'token')!r}, 'w').close()\n")
    records = driver.run([parts("waiting", "giving")], tmp_path / "work", 300.0, dict(os.environ))
    assert [(r["part"], r["status"]) for r in records] == [("waiting", "ok"), ("giving", "ok")]


def test_a_large_profile_stays_behind(driver: ModuleType, tmp_path: Path, monkeypatch) -> None:
    from gpu import report

    results, work = tmp_path / "results", tmp_path / "work"
    results.mkdir(), work.mkdir()
    monkeypatch.setenv(report.RESULTS_VARIABLE, str(results))
    monkeypatch.setattr(report, "MOST_RESULT_BYTES", 4)
    (work / "small").write_text("1234")
    (work / "large").write_text("12345")
    assert report.keep_file(work / "small") == "small"
    assert "too large" in report.keep_file(work / "large")
    assert [path.name for path in results.iterdir()] == ["small"]


def test_a_part_that_hangs_is_ended_with_its_children_and_keeps_its_rows(
    driver: ModuleType, parts, tmp_path: Path
) -> None:
    (part,) = parts("hanging", limit=6.0)
    record = driver.run_part(part, tmp_path / "out", 6.0, dict(os.environ))
    assert record["status"] == "out of time"
    assert record["error"].startswith("ended after 6 s, in ")
    assert "stand_in_hanging.py" in record["error"]
    assert [row["what"] for row in record["rows"]] == ["before"]
    log = (tmp_path / "out/logs/hanging.txt").read_text()
    child = int(next(line for line in log.splitlines() if line.startswith("child ")).split()[1])
    assert _is_gone(child)
    (missed,) = [t for t in driver.targets_of([record], False) if t["name"] == "decode"]
    assert (missed["status"], missed["measured"]) == ("missed", 1.5)
    assert {t["status"] for t in driver.targets_of([record], True)} == {"not measured"}


def _is_gone(pid: int) -> bool:
    """Whether a killed process ends; the kernel takes its time on a busy machine."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_what_the_budget_does_not_cover_is_left_out_aloud(driver: ModuleType, parts, tmp_path: Path) -> None:
    records = driver.run([parts("good", "dying")], tmp_path / "out", 1.0, dict(os.environ))
    assert [r["status"] for r in records] == ["left out", "left out"]
    assert "budget of 1 s" in driver.render(
        {"parts": records, "targets": driver.targets_of(records, False), "failed": ["good", "dying"], "seconds": 0.0,
         "is_rehearsal": False}
    )  # fmt: skip


def test_every_part_is_a_module_with_a_limit_and_all_fit_a_command_of_ten_minutes(driver: ModuleType) -> None:
    for part in (part for stage in driver.STAGES for part in stage):
        assert (ROOT / "bench" / f"{part.arguments[0].replace('.', '/')}.py").is_file()
        assert 0 < part.expected_seconds <= part.limit_seconds
    # With every part at its limit nothing is left out, and what stands around the stages has its seconds too.
    assert sum(max(part.limit_seconds for part in stage) for stage in driver.STAGES) <= driver.BUDGET_SECONDS <= 460


def test_a_part_gets_what_earlier_ones_left_and_no_later_one_pays(driver: ModuleType, tmp_path, monkeypatch) -> None:
    given = []

    def run_part(part, work, limit_seconds, environment) -> dict:
        given.append((part.name, round(limit_seconds)))
        return {"part": part.name, "status": "ok", "seconds": 0.0, "rows": []}

    monkeypatch.setattr(driver, "run_part", run_part)
    stages = [[driver.Part(name, (), limit)] for name, limit in (("one", 30), ("two", 40), ("three", 50))]
    driver.run(stages, tmp_path, 120.0, {})  # nothing is used, so all of the first one's 30 s are left for the second
    assert given == [("one", 30), ("two", 70), ("three", 100)]
    given.clear()
    driver.run(stages, tmp_path, 100.0, {})
    assert given == [("one", 30), ("two", 50), ("three", 100)]
    assert driver.limit_of(stages[1][0], left_seconds=25.0, spare_seconds=-65.0) == 25.0


def test_a_slow_first_look_for_a_gpu_shortens_the_budget(driver: ModuleType, tmp_path, monkeypatch) -> None:
    clock, budgets = [0.0], []

    def look() -> tuple[bool, dict]:
        clock[0] += 80.0
        return True, {}

    def run(stages, work, budget_seconds, environment, keep) -> list:
        budgets.append(budget_seconds)
        return []

    monkeypatch.setattr(driver, "look_for_gpu", look)
    monkeypatch.setattr(driver, "run", run)
    monkeypatch.setattr(driver.time, "monotonic", lambda: clock[0])
    assert driver.main(["--out", str(tmp_path)]) == 0
    assert driver.main(["--out", str(tmp_path), "--budget", "90"]) == 0
    assert budgets == [driver.BUDGET_SECONDS - 60.0, 90.0]


@pytest.fixture
def torchs_flash(monkeypatch) -> Iterator[list]:
    """torch's variable-length attention taken down, with flash-attn not installed."""
    varlen, calls = pytest.importorskip("torch.nn.attention.varlen"), []

    def varlen_attn(q, k, v, *arguments, **options):
        calls.append((arguments, options))
        return q

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # not to be imported, installed or not
    yield calls
    sys.modules.pop("sagc_fast.ops.flash", None)
    sys.modules["sagc_fast.ops"].__dict__.pop("flash", None)


def test_torchs_copy_of_flash_attn_is_the_peer_and_no_backend(torchs_flash: list, monkeypatch) -> None:
    import torch
    from gpu import kernels

    from sagc_fast.ops import backend

    monkeypatch.setattr(kernels, "REHEARSAL", False)
    monkeypatch.setattr(kernels, "DEVICE", torch.device("cpu"))
    kernels.flash_peer.cache_clear()
    backend.flash_module.cache_clear()
    peer, name = kernels.flash_peer()
    kernels.flash_peer.cache_clear()
    assert name == "torch's flash-attn"
    assert "flash_attn" not in sys.modules, "what stood in for it is gone"
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert backend.flash_module() is None
    layout = kernels.packed_layout([(4, (2, 3))])
    q, k = torch.randn(9, 4, 8), torch.randn(9, 2, 8)
    kernels._flash(peer, q, k, k, layout)
    ((arguments, options),) = torchs_flash
    cu_query, cu_key, *longest = arguments
    assert cu_query.tolist() == [0, 4, 6, 9]
    assert cu_key.tolist() == [0, 4, 10, 17]
    assert longest == [4, 7]
    assert options == {"scale": 8**-0.5, "window_size": (-1, 0)}


@pytest.fixture
def tool(tmp_path: Path, monkeypatch) -> Iterator[Callable[[str], list[dict]]]:
    """``tool("sleep 60")``: the rows of the part ``nsight`` with an ncu that does this, beside a profiler that ran."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from gpu import nsight, report

    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv(report.ROWS_VARIABLE, str(tmp_path / "rows.jsonl"))
    monkeypatch.setenv(report.OUT_VARIABLE, str(tmp_path))
    monkeypatch.setenv(report.LIMIT_VARIABLE, str(nsight.RESERVE_SECONDS + 6.0))
    monkeypatch.setattr(nsight, "is_rehearsal", lambda: False)
    plain = nsight._profile
    monkeypatch.setattr(nsight, "_profile", lambda tool, *rest: "" if tool == "torch" else plain(tool, *rest))
    monkeypatch.setattr(nsight, "keep_file", lambda path: path.name)

    def run(script: str) -> list[dict]:
        (folder / "ncu").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "ncu").chmod(0o755)
        with pytest.raises(SystemExit) if script != "exit 0" else nullcontext():
            nsight.main()
        return report.read_rows(tmp_path / "rows.jsonl")

    yield run
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize(("script", "said"), [("sleep 60", "was ended after"), ("exit 3", "ended with 3")])
def test_a_profiler_that_fails_leaves_its_command_and_a_word_why(tool, script: str, said: str) -> None:
    rows = {row["what"]: row for row in tool(script)}
    assert rows["torch.profiler"]["value"] == "ran"
    assert rows["nsys, command"]["value"] == "not installed"
    assert "nsys profile --trace=cuda,nvtx,osrt" in rows["nsys, command"]["beside"]
    assert "ncu --set full" in rows["ncu, command"]["beside"]
    assert said in rows["ncu"]["beside"]


def test_what_stands_in_the_table_is_what_the_command_prints(monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from gpu import nsight

    from sagc_fast.cli import main

    for name in nsight.REPORTS:
        assert main(["profile", "--tool", name, "--print", "--out", "there", "--", *nsight.GENERATE]) == 0
        assert capsys.readouterr().out.strip() == nsight.command_of(name, "there")


def test_busy_time_is_the_union_of_the_kernels(driver: ModuleType) -> None:
    from gpu.profiled import union_seconds

    assert union_seconds([]) == 0
    assert union_seconds([(0, 10), (5, 20), (40, 50), (41, 42)]) == pytest.approx(30e-9)


class SlowHost:
    """A host that takes ``launch`` seconds to queue a kernel, and a device that runs what is queued in turn."""

    launch = 40e-6

    def __init__(self) -> None:
        self.now = self.device_free = 0.0
        owner = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = max(owner.now, owner.device_free)

            def elapsed_time(self, other: Event) -> float:
                return 1e3 * (other.at - self.at)

        self.Event = Event

    def run(self, seconds: float) -> None:
        self.now += self.launch
        self.device_free = max(self.now, self.device_free) + seconds

    def _sleep(self, cycles: int) -> None:
        self.run(cycles / 1.98e9)

    def synchronize(self) -> None:
        self.now = max(self.now, self.device_free)

    def perf_counter(self) -> float:
        return self.now


def test_a_slow_host_is_not_timed_as_the_device(driver: ModuleType, monkeypatch) -> None:
    """Four kernels of 5 us that take the host 160 us to launch; the flush before them takes 60 us."""
    from gpu import device

    host = SlowHost()
    monkeypatch.setattr(device, "REHEARSAL", False)
    monkeypatch.setattr(device, "synchronize", host.synchronize)
    monkeypatch.setattr(device, "time", host)
    monkeypatch.setattr(device, "_flush", SimpleNamespace(zero_=lambda: host.run(60e-6)))
    monkeypatch.setattr(device.torch, "cuda", host)
    assert device.kernel_seconds(lambda: [host.run(5e-6) for _ in range(4)]) == pytest.approx(20e-6)


def test_without_a_gpu_the_check_says_what_to_do(tmp_path: Path) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = subprocess.run(
        [str(ROOT / "bench/gpu_check.sh"), "--out", str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2
    assert "--rehearse" in done.stderr


def test_a_rehearsal_of_cheap_parts_goes_through(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    command = [str(ROOT / "bench/gpu_check.sh"), "--rehearse", "--only", "machine", "rollout", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("[")
    assert "REHEARSAL ON CPU, NO GPU FIGURES" in done.stdout
    brief = json.loads(done.stdout.splitlines()[-1])
    assert brief["failed"] == []
    assert set(brief["targets"].values()) == {"not measured"}
    whole = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [part["part"] for part in whole["parts"]] == ["machine", "rollout 3B"]
    figures = [row["what"] for row in whole["parts"][1]["rows"]]
    # What the targets need comes before the modes that are only shown beside.
    assert figures.index("transformers.generate 4 x 2") < figures.index("rollout 4 x 2, graphs off, sharing on")
    assert len([what for what in figures if what.startswith("rollout ")]) == 8
    assert any(what.startswith("decode step, ") for what in figures)
    assert any(what.startswith("transformers.generate") for what in figures)
