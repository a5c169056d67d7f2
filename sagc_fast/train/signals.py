"""SIGTERM and Ctrl-C: the first asks the loop to stop after the current step, or an evaluation to stop where it is; a
later one ends the process at once.

One request may arrive twice: `timeout` signals its child and then the child's whole group, a terminal and a launcher
may both pass Ctrl-C on. What comes within a second of the first is the same request.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

logger = logging.getLogger(__name__)


class StopRequest:
    """While entered (in the main thread; elsewhere it does nothing), ``is_set`` tells whether a signal has come."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)
    SAME_REQUEST_SECONDS = 1.0

    def __init__(self) -> None:
        self.is_set = False
        self._came = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in self.SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            if time.monotonic() - self._came > self.SAME_REQUEST_SECONDS:
                os._exit(128 + number)
            return
        self.is_set, self._came = True, time.monotonic()
        name = signal.Signals(number).name
        logger.warning("%s: saving a checkpoint after the current step; a second one exits at once", name)
