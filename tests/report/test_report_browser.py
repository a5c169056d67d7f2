"""The page in a real browser: no script error, nothing wider than the screen, readings equal to the metrics file.

Chromium runs headless and prints the document after a probe script has moved the pointer about. ``.ci/run`` installs
it; without a browser these tests are skipped, and the rest of the page's tests, which need none, remain.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from sagc_fast.report import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome on the PATH")

PROBE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const tip = document.getElementById("tip");
  const at = (node, x, y) => node.dispatchEvent(new PointerEvent("pointermove",
      { clientX: x, clientY: y, bubbles: true, pointerType: "mouse" }));
  const out = { width: document.documentElement.scrollWidth, screen: innerWidth, crosses: [], bars: [],
                toggles: document.querySelectorAll(".show").length };
  for (const plot of document.querySelectorAll(".plot")) {
    const box = plot.querySelector(".canvas").getBoundingClientRect();
    at(plot, box.left + 0.5 * box.width, box.top + 0.5 * box.height);
    out.crosses.push({ readouts: JSON.parse(plot.dataset.readouts), style: plot.dataset.style,
                       lines: tip.hidden ? [] : [...tip.children].map((node) => node.textContent) });
    plot.dispatchEvent(new PointerEvent("pointerleave", { pointerType: "mouse" }));
  }
  for (const bar of [...document.querySelectorAll(".bars rect[data-row]")].slice(0, 5)) {
    at(bar, 5, 5);
    out.bars.push([...tip.children].map((node) => node.textContent));
  }
  out.panels = [...document.querySelectorAll(".tabs")].map((tabs) => {
    const heights = () => [...tabs.querySelectorAll(".bars")].map((bars) => bars.getBoundingClientRect().height);
    const inSight = () => {
      const seen = heights().flatMap((height, i) => (height > 50 ? [i] : []));
      return seen.length === 1 ? seen[0] : seen;
    };
    const pick = (input) => { input.checked = true; return inSight(); };
    return [inSight(), ...[...tabs.querySelectorAll("input")].map(pick)];
  });
  for (const box of document.querySelectorAll(".show")) box.click();
  out.hidden = document.querySelectorAll("[data-of].off").length;
  const result = document.createElement("pre");
  result.id = "probe-result";
  result.textContent = JSON.stringify(out);
  document.body.append(result);
}, 50));
</script>
"""


def browse(page: Path, width: int, tmp_path: Path, *flags: str) -> tuple[dict, str]:
    """(what the probe found, the browser's console) of the page in a window of ``width`` CSS pixels."""
    probed = tmp_path / f"probed-{width}.html"
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    # A window is never narrower than about 500 pixels; a frame is.
    frame = tmp_path / f"frame-{width}.html"
    frame.write_text(
        f"<!doctype html><iframe id=f src={probed.name} style='width:{width}px;height:900px;border:0'></iframe>"
        "<pre id=out></pre><script>const f = document.getElementById('f'); const timer = setInterval(() => {"
        "const found = f.contentDocument && f.contentDocument.getElementById('probe-result');"
        "if (found) { clearInterval(timer); document.getElementById('out').textContent = found.textContent; } }, 20);"
        "</script>",
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000",
            "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", *flags, frame.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.S)
    assert found is not None
    assert found[1], f"the probe did not finish; the browser said: {done.stderr[-2000:]}"
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(unescape(found[1])), console


@pytest.fixture
def runs(make_run):
    return [make_run("sagc"), make_run("fixed-16", "fixed", seed=1)]


@pytest.fixture
def page(runs, tmp_path):
    return write_report(runs, tmp_path / "report.html")


def test_the_browser_reports_script_errors(page, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text(encoding="utf-8").replace("</body>", "<script>missing()</script></body>"))
    assert "missing is not defined" in browse(broken, 800, tmp_path)[1]


@pytest.mark.parametrize("width", [320, 800, 1300])
def test_the_page_fits_every_screen_without_a_script_error(page, width, tmp_path):
    found, console = browse(page, width, tmp_path)
    assert console == ""
    assert found["screen"] == width
    assert found["width"] <= width
    assert found["toggles"] == 2
    assert found["hidden"] > 0


def test_of_many_rollouts_the_last_is_in_sight_and_every_tab_shows_its_own(runs, tmp_path):
    """One run records nine rollouts, of which the page keeps as many as it has tabs for."""
    path = runs[0] / "timeline.jsonl"
    record = json.loads(path.read_text().splitlines()[0])
    path.write_text("".join(json.dumps(record | {"step": step}) + "\n" for step in range(1, 10)))
    found, _ = browse(write_report(runs, tmp_path / "many.html"), 1000, tmp_path)
    at_first, *by_tab = found["panels"][0]
    assert at_first == 6
    assert by_tab == list(range(7))


def test_readings_under_the_pointer_are_those_of_the_metrics_file(page, runs, tmp_path):
    found, _ = browse(page, 1000, tmp_path)
    by_run = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    compared = 0
    for cross in found["crosses"]:
        heading, *lines = cross["lines"]
        if not heading.startswith("optimizer step "):
            continue
        step = int(heading.removeprefix("optimizer step ").replace(",", ""))
        for line in lines:
            label, value = line.split(": ", 1)
            readout = next(r for r in cross["readouts"] if r["label"] == label)
            event = {"steps": "step", "evals": "eval"}[readout["source"]]
            recorded = next(r for r in by_run[readout["run"]] if r["event"] == event and r["step"] == step)
            for key in readout["y"].split("."):
                recorded = recorded[int(key) if isinstance(recorded, list) else key]
            shown, unit = re.fullmatch(r"([-\d.,]+)(%| s)?", value).groups()
            percent = unit == "%"
            tolerance = 0.051 if "." in shown and percent else 0.51 if percent or "," in shown else 0.051
            expected = recorded * (100 if percent else 1)
            assert float(shown.replace(",", "")) == pytest.approx(expected, rel=0.02, abs=min(tolerance, abs(expected)))
            compared += 1
    assert compared >= 30


def test_a_bar_of_the_timeline_shows_its_completion(page, runs, tmp_path):
    found, _ = browse(page, 1000, tmp_path)
    texts = {
        row["text"]
        for run in runs
        for line in (run / "timeline.jsonl").read_text().splitlines()
        for row in json.loads(line)["rows"]
    }
    assert len(found["bars"]) == 5
    for heading, text in found["bars"]:
        assert re.match(r"group \d+, sample \d+: \d+ tokens, reward [01]", heading)
        assert any(whole.startswith(text.rstrip("…. ")[:40]) for whole in texts)
