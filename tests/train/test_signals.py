"""Signals: the first asks, the second ends the process at once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import time
from sagc_fast.train.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.is_set:
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_repeat_of_the_request_is_ignored_and_a_later_signal_exits_at_once(number):
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(number)  # the same request once more, as from `timeout`
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.2)
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number
