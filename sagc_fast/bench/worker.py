"""One engine in a process of its own, asked for one run at a time (the other end: peers/peer_worker.py)."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from sagc_fast.errors import SagcError

START_TIMEOUT_SECONDS = 1200.0
"""Some peers compile for minutes on a busy machine."""
RUN_TIMEOUT_SECONDS = 3600.0
NOISE = ("warning", "traceback", "^", "during handling")


class PeerError(SagcError):
    """A peer that did not start, died, hung or did other work than it was asked for; the message is one sentence."""


class Worker:
    """A started engine. Use as a context manager; leaving ends the process."""

    def __init__(self, name: str, python: str | Path, script: Path, settings: dict[str, Any]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed in __exit__)
        threads = str(settings["threads"])
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads burn the CPU seconds that are measured
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        try:
            self._process = subprocess.Popen(
                [str(python), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                env=environment,
            )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise PeerError(f"{name} did not start: {error.strerror} ({python}).") from error
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.facts = self._ask(settings, START_TIMEOUT_SECONDS)
            """What the engine says of itself: versions, load_seconds, load_rss_bytes."""
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """One timed run: what the script answers, with wall_seconds, cpu_seconds and peak_rss_bytes."""
        return self._ask(request, RUN_TIMEOUT_SECONDS)

    def rollout(self, prompts: list[list[int]], lengths: list[list[int]], seed: int) -> dict[str, Any]:
        """One timed rollout; PeerError when the lengths that came out are not those forced."""
        answer = self.run({"prompts": prompts, "lengths": lengths, "seed": seed})
        made = answer.pop("lengths", None)
        if made != lengths:
            wrong = next((pair for pair in zip(_flat(made), _flat(lengths), strict=False) if pair[0] != pair[1]), None)
            detail = f"{wrong[0]} tokens where {wrong[1]} were forced" if wrong else "another number of completions"
            raise PeerError(f"{self.name} returned {detail}; its figures would not be comparable.")
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            stream.close()

    def _ask(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._died() from None
        try:
            line = self._answers.get(timeout=timeout_seconds)
        except queue.Empty:
            raise PeerError(f"{self.name} gave no answer within {timeout_seconds:.0f} s.") from None
        if not line:
            raise self._died()
        return json.loads(line)

    def _read(self) -> None:
        try:
            for line in self._process.stdout:
                self._answers.put(line)
        except ValueError:  # closed while reading: the worker is being ended
            pass
        self._answers.put("")

    def _died(self) -> PeerError:
        status = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        said = [line for line in lines if not line.lower().startswith(NOISE)]
        reason = said[-1][:300] if said else "it wrote nothing"
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return PeerError(f"{self.name} ended with {how}: {reason.rstrip('.')}.")


def _flat(lengths: Any) -> list[int]:
    return [length for group in lengths or () for length in group]
