"""The program of a scoring worker: loads one scorer, then answers completions one after another.

Run by file, never imported: standard library only, so it starts in some 50 ms whatever the training process has
loaded. Requests come as pickled frames (from the trusted side), answers go back as JSON lines on a pipe of their own
(the scorer may run model output, so nothing it could write is ever unpickled). Standard input, output and error are the
null device: whatever a scorer prints is gone and cannot block.

Lines: ``{"ready": seconds}`` or ``{"load_error": sentence}`` once, then ``{"ticket", "reward", "outcome"}`` or
``{"ticket", "kind", "detail"}`` per completion.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import json
import math
import numbers
import os
import pickle
import random
import struct
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

MAX_DETAIL = 200
"""Characters of an exception's text that are passed on; one line of the log."""


class LoadError(Exception):
    """The scorer cannot be used; the text is one sentence for the user."""


def main(request_fd: int, answer_fd: int) -> None:
    for fd in (request_fd, answer_fd):
        os.set_inheritable(fd, False)
    requests = os.fdopen(request_fd, "rb")
    setup = pickle.loads(_read_frame(requests) or os._exit(0))
    _die_with(setup["parent_pid"])
    _limit_memory(setup["memory_limit_mb"])
    sys.path[:] = setup["sys_path"]
    started = time.monotonic()
    own_pid = os.getpid()
    try:
        scorer = load_scorer(setup["target"], setup["kwargs"])
    except BaseException as error:
        _answer(answer_fd, load_error=str(error) if isinstance(error, LoadError) else _describe(error))
        os._exit(1)
    _answer(answer_fd, ready=time.monotonic() - started)
    while True:
        frame = _read_frame(requests)
        if frame is None:  # the pool closed, or its process is gone
            os._exit(0)
        for ticket, problem_bytes, text in pickle.loads(frame):
            answer = score_one(scorer, problem_bytes, text, setup["kwargs"])
            if os.getpid() != own_pid:  # a process forked by the scorer came back here: it has no say
                os._exit(1)
            _answer(answer_fd, ticket=ticket, **answer)
            if answer.get("kind") == "memory":
                os._exit(1)  # what leaked is still held: the next completion gets a fresh process


def load_scorer(target: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Import ``module:function``; LoadError says what is missing and what to do."""
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name.isidentifier():
        raise LoadError(f"The reward {target!r} is not of the form module:function; write for example rewards:score.")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise LoadError(
                f"The reward {target!r} names module {module_name!r}, which is neither installed nor in the current "
                f"directory {os.getcwd()}; start from the folder that holds it or set PYTHONPATH."
            ) from error
        remedy = "pip install sagc_fast[tasks]" if module_name.startswith("sagc_fast.") else "install it"
        raise LoadError(
            f"Module {module_name!r} of the reward {target!r} needs the module {error.name!r}, which is not installed "
            f"here; {remedy}."
        ) from error
    except BaseException as error:
        raise LoadError(
            f"Module {module_name!r} of the reward {target!r} fails when imported: {_describe(error)}; "
            f"try python -c 'import {module_name}'."
        ) from error
    scorer = getattr(module, function_name, None)
    if not callable(scorer):
        names = [name for name, value in vars(module).items() if not name.startswith("_") and callable(value)]
        near = difflib.get_close_matches(function_name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "define it at module level."
        what = "has no function" if scorer is None else "holds something that cannot be called under the name"
        raise LoadError(f"Module {module_name!r} of the reward {target!r} {what} {function_name!r}; {hint}")
    try:
        inspect.signature(scorer).bind("", None, **kwargs)
    except TypeError as error:
        raise LoadError(
            f"The reward {target!r} cannot be called as {function_name}(completion, problem, **kwargs): {error}; "
            "make it take the completion's text and the Problem."
        ) from error
    except ValueError:  # no signature to be had (a C function): calling it will tell
        pass
    import_ahead(module, function_name)
    return scorer


def import_ahead(module: Any, function_name: str) -> None:
    """Make the imports that stand inside the scorer, and inside functions of its module that it names, so that a heavy
    one (torch: seconds) does not run against the time limit of the first completion. One that fails is left to the
    function."""
    try:
        with open(module.__file__, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, TypeError, AttributeError):  # no source to read
        return
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    bodies = {node.name: node for node in tree.body if isinstance(node, definitions)}
    wanted: dict[str, None] = {}
    names = [function_name]
    while names:
        for node in ast.walk(bodies.pop(names.pop(), ast.Module([], []))):
            if isinstance(node, ast.Name):
                names.append(node.id)
            elif isinstance(node, ast.Import):
                wanted.update(dict.fromkeys(alias.name for alias in node.names))
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                wanted[node.module] = None
    for name in wanted:
        with contextlib.suppress(BaseException):
            import_module(name)


def score_one(scorer: Callable[..., Any], problem_bytes: bytes, text: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Call the scorer on a fresh copy of the problem, whatever happens inside."""
    random.seed(0)  # a scorer that draws numbers draws the same whichever worker it is in
    try:
        return _checked(scorer(text, pickle.loads(problem_bytes), **kwargs))
    except MemoryError:
        return {"kind": "memory", "detail": "ran out of the worker's memory limit"}
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: they belong to this completion
        return {"kind": "raise", "detail": _describe(error)}


def _checked(result: Any) -> dict[str, Any]:
    reported = getattr(result, "error", None)
    if isinstance(reported, str):
        return {"kind": "reported", "detail": reported[:MAX_DETAIL]}
    is_score = hasattr(result, "reward") and hasattr(result, "outcome")
    reward = _number(result.reward if is_score else result)
    outcome = result.outcome if is_score else None
    if reward is None:
        return {"kind": "type", "detail": f"returned {_shown(result)} instead of a number or a Score"}
    if is_score and type(outcome).__name__ not in ("bool", "bool_"):
        return {"kind": "type", "detail": f"returned the outcome {_shown(outcome)} instead of true or false"}
    if not math.isfinite(reward):
        return {"kind": "nonfinite", "detail": f"returned the reward {reward}"}
    return {"reward": reward, "outcome": bool(outcome) if is_score else reward >= 1.0}


def _number(value: Any) -> float | None:
    """Real numbers, numpy scalars and zero-dimensional arrays as float; None for the rest."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) else None


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80} ({type(value).__name__})"
    except Exception:
        return type(value).__name__


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}"[:MAX_DETAIL]


def _answer(fd: int, **fields: Any) -> None:
    os.write(fd, json.dumps(fields).encode() + b"\n")


def _read_frame(stream: Any) -> bytes | None:
    header = stream.read(4)
    if len(header) < 4:
        return None
    (length,) = struct.unpack("<I", header)
    payload = stream.read(length)
    return payload if len(payload) == length else None


def _die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the pool's process dies, even in the middle of a hanging scorer.
    Elsewhere than on Linux the closed request pipe ends an idle worker."""
    if sys.platform == "linux":
        import ctypes
        import signal

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the request was in place
        os._exit(0)


def _limit_memory(limit_mb: int | None) -> None:
    try:
        import resource
    except ImportError:  # not a Unix
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if limit_mb is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            limit = limit_mb * 2**20 if hard == resource.RLIM_INFINITY else min(limit_mb * 2**20, hard)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
