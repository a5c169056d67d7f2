"""Scorers that behave in every way a scorer can. Imported by scoring workers, never by the tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import time

from sagc_fast.tasks.base import Score

_SEEN: list[str] = []
_HOARD: list[bytearray] = []


def echo(completion, problem):
    """The number that the completion is."""
    return float(completion)


def by_answer(completion, problem, *, bonus=0.0):
    is_correct = completion == problem.answer
    return Score(bonus + is_correct, is_correct)


def zoo(completion, problem):  # one branch per misbehaviour, so that a batch can hold them all
    match completion:
        case "raise":
            raise ValueError("no such luck " * 1000)
        case "exit":
            sys.exit(0)
        case "unprintable":
            raise UnprintableError
        case "recurse":
            return zoo_recursion(0)
        case "hang":
            while True:
                time.sleep(3600)
        case "hang in C":
            return eval("9**9**9**9")
        case "deaf":  # to every signal that can be ignored
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            while True:
                pass
        case "nan":
            return float("nan")
        case "inf":
            return Score(float("-inf"), False)
        case "none":
            return None
        case "text":
            return "1.0"
        case "list":
            return [1.0]
        case "bad outcome":
            return Score(1.0, "yes")
        case "print":
            for stream in (sys.stdout, sys.stderr):
                stream.write("x" * 2**20)
                stream.flush()
            os.write(1, b"y" * 2**20)
            os.write(2, b"z" * 2**20)
        case "read":
            return float(len(sys.stdin.read()))
        case "memory":
            return float(len(bytearray(2**40)))
        case "leak":
            _HOARD.append(bytearray(64 * 2**20))
        case "die":
            os._exit(3)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "fork":
            os.fork()
        case "orphan":  # leaves a process that keeps the worker's pipes open
            if os.fork() == 0:
                time.sleep(3600)
        case "orphan and die":
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(4)
        case "close":
            os.closerange(3, 256)
        case "forge":  # writes to every pipe it can find
            for fd in range(3, 64):
                with contextlib.suppress(OSError):
                    os.write(fd, b'{"ticket": 0, "reward": 1.0, "outcome": true}\ngarbage\n')
        case "pid":
            return float(os.getpid())
        case "report":
            return Score(0.0, False, "cannot judge this")
    return 0.5


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


def zoo_recursion(depth):
    return zoo_recursion(depth + 1)


def remembers(completion, problem):
    """Its process id; dies at "first only" when it is not its process's first, through no fault of that completion."""
    _SEEN.append(completion)
    if completion == "first only" and len(_SEEN) > 1:
        os._exit(1)
    return float(os.getpid())


def spoils(completion, problem):
    """Changes its problem: the next completion must not see it."""
    problem.meta["times"] = problem.meta.get("times", 0) + 1
    return float(problem.meta["times"])


def draws(completion, problem):
    return random.random() + hash(completion) % 1000


def environment(completion, problem):
    return float("torch" in sys.modules or "numpy" in sys.modules)


def pid(completion, problem):
    return float(os.getpid())


def sleeps(completion, problem):
    time.sleep(float(completion))
    return 1.0


not_a_function = 3


def takes_one(completion):
    return 1.0
