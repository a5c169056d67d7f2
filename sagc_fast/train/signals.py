"""SIGTERM and Ctrl-C: the first asks the loop to stop after the current step, the second ends the process at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

logger = logging.getLogger(__name__)


class StopRequest:
    """While entered (in the main thread; elsewhere it does nothing), ``is_set`` tells whether a signal has come."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.is_set = False
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
            os._exit(128 + number)
        self.is_set = True
        name = signal.Signals(number).name
        logger.warning("%s: saving a checkpoint after the current step; a second one exits at once", name)
