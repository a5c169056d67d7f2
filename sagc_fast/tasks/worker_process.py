"""One scoring worker as the pool sees it: start, send without blocking, read answers, kill with all it started."""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from sagc_fast.tasks.base import ScorerSpec

_PROGRAM = Path(__file__).with_name("worker_main.py")
_MAX_LINE = 64 * 1024
"""Bytes without a line end after which the answers of a worker are not to be trusted."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class WorkerProcess:
    """A child process in a session of its own (a terminal's Ctrl-C does not reach it; killing it takes its children
    along). All methods return at once.

    ``batch`` holds the items it was sent and has not answered, oldest first: the first one is being scored.
    """

    def __init__(self, spec: ScorerSpec, memory_limit_mb: int | None) -> None:
        request_read, request_write = os.pipe()
        answer_read, answer_write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(request_read), str(answer_write)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(request_read, answer_write),
            start_new_session=True,
            env={**os.environ, **_ONE_THREAD, "PYTHONHASHSEED": "0"},  # the same set order in every worker
        )
        os.close(request_read)
        os.close(answer_write)
        os.set_blocking(request_write, False)
        os.set_blocking(answer_read, False)
        self.request_fd, self.answer_fd = request_write, answer_read
        self.batch: deque[Any] = deque()
        self.num_answered = 0
        self.is_ready = False
        self.deadline = float("inf")
        self.unsent = b""
        self._received = b""
        self._queue(
            pickle.dumps(
                {
                    "target": spec.target,
                    "kwargs": dict(spec.kwargs),
                    "sys_path": _search_path(spec),
                    "memory_limit_mb": memory_limit_mb,
                    "parent_pid": os.getpid(),
                }
            )
        )

    def send(self, items: list[Any]) -> None:
        """Hand over a batch of items with ``ticket``, ``problem_bytes`` and ``text``."""
        self.batch.extend(items)
        self._queue(pickle.dumps([(item.ticket, item.problem_bytes, item.text) for item in items]))

    def flush(self) -> None:
        """Write as much as the pipe takes; a worker that is gone is noticed by its answers."""
        try:
            while self.unsent:
                self.unsent = self.unsent[os.write(self.request_fd, self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent = b""

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Answers that have arrived, and whether the worker can go on (False: it is gone or talks nonsense)."""
        is_open = True
        try:
            while chunk := os.read(self.answer_fd, 65536):
                self._received += chunk
            is_open = False
        except BlockingIOError:
            pass
        *lines, self._received = self._received.split(b"\n")
        answers = []
        for line in lines:
            try:
                answer = json.loads(line)
            except ValueError:
                return answers, False
            if not isinstance(answer, dict):
                return answers, False
            answers.append(answer)
        return answers, is_open and len(self._received) < _MAX_LINE

    def has_exited(self) -> bool:
        """True when the process is dead, though something it started may still hold its pipes. Does not reap it, so
        its id stays reserved until :meth:`kill`."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def kill(self, grace_seconds: float = 0.0) -> str:
        """End it and everything in its session, free its pipes, and say how it ended. ``grace_seconds`` is what a
        process that has just closed its pipes gets to die by itself, so that its own end can be told."""
        deadline = time.monotonic() + grace_seconds
        while not (has_died := self.has_exited()) and time.monotonic() < deadline:
            time.sleep(0.002)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()
        code = self.process.wait()
        os.close(self.request_fd)
        os.close(self.answer_fd)
        if not has_died:
            return "broke its connection and was ended"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"

    def _queue(self, payload: bytes) -> None:
        self.unsent += struct.pack("<I", len(payload)) + payload
        self.flush()


def _search_path(spec: ScorerSpec) -> list[str]:
    """The training process's module path; for a user's own reward the current directory stands first."""
    path = [entry or os.getcwd() for entry in sys.path]
    if spec.target.startswith("sagc_fast."):
        return path
    return [os.getcwd(), *path]
