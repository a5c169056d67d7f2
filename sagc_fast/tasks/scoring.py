"""Scores completions in killable worker processes, while generation goes on.

A scorer may run model output, hang in C code, eat memory or take its process down. Whatever it does costs the one
completion it was looking at: that one gets ``Score(0.0, False, error=...)``, is counted by kind and named in the log
once per kind. Scores do not depend on the number of workers: each completion is scored on a fresh copy of its problem,
and one that dies or runs out of memory in a used process is tried once more in a fresh one.

This protects the run, not the machine: a worker has the user's rights.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from sagc_fast.errors import ConfigError, RewardError
from sagc_fast.tasks.base import Problem, Score, ScorerSpec
from sagc_fast.tasks.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

ERROR_KINDS: dict[str, str] = {
    "raise": "raised an exception",
    "timeout": "ran over its time limit",
    "crash": "took its worker process down",
    "memory": "ran out of memory",
    "nonfinite": "returned NaN or infinity",
    "type": "returned something that is not a reward",
    "reported": "reported an error itself",
}

MAX_BATCH = 64
"""Completions handed to a worker at once: enough to make the pipe's cost vanish, few enough to spread over workers."""
POLL_SECONDS = 0.2
"""How often a busy worker is looked at for having died without closing its pipe (something it started holds it)."""
MAX_FAILED_STARTS = 3
"""Workers in a row that do not come up before the pool gives up."""


@dataclass(slots=True)
class _Item:
    ticket: int
    problem_id: int
    problem_bytes: bytes
    text: str
    is_retry: bool = False


class ScoringPool:
    """A fixed number of workers, each with the scorer loaded, fed and watched by one thread.

    >>> with ScoringPool(task.scorer_spec, workers=2) as pool:        # doctest: +SKIP
    ...     tickets = pool.submit_many(problem, [c.text for c in group.completions])
    ...     scores = pool.results(tickets)
    """

    def __init__(
        self,
        spec: ScorerSpec,
        workers: int = 1,
        timeout_seconds: float = 5.0,
        *,
        memory_limit_mb: int | None = 4096,
        startup_seconds: float = 120.0,
    ) -> None:
        """Start the workers and wait for the first to have the scorer loaded.

        Args:
            timeout_seconds: wall-clock limit of one completion; the worker is then killed and replaced.
            memory_limit_mb: limit on a worker's address space (which exceeds the memory it uses); None is no limit.
            startup_seconds: limit on loading the scorer.

        Raises:
            RewardError: the scorer cannot be loaded; names module, function and remedy.
            ConfigError: a setting out of range.
        """
        _check_settings(workers, timeout_seconds, memory_limit_mb, startup_seconds)
        _pickled(dict(spec.kwargs), f"The keyword arguments of the reward {spec.target!r}")
        self.spec = spec
        self.timeout_seconds = timeout_seconds
        self.errors: Counter[str] = Counter()
        """Failed completions by kind since the pool was made."""
        self._memory_limit_mb = memory_limit_mb
        self._startup_seconds = startup_seconds
        self._num_workers = workers
        self._num_failed_starts = 0
        self._changed = threading.Condition()
        self._waiting: deque[_Item] = deque()
        self._retries: deque[_Item] = deque()
        self._scores: dict[int, Score | None] = {}
        self._next_ticket = 0
        self._is_up = False
        self._is_closing = False
        self._failure: RewardError | None = None
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        # The workers are started by this thread, because the kernel ties their life to the thread that started them.
        self._thread = threading.Thread(target=self._watch, name="scoring-pool", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_up or self._failure)
        if self._failure:
            self.close()
            raise self._failure

    def submit(self, problem: Problem, text: str) -> int:
        """Queue one completion; returns its ticket at once."""
        return self.submit_many(problem, [text])[0]

    def submit_many(self, problem: Problem, texts: Sequence[str]) -> list[int]:
        """Queue the completions of one problem; returns their tickets at once, in order.

        Raises RewardError when the problem holds something that cannot be pickled, or after :meth:`close`.
        """
        problem_bytes = _pickled(problem, f"Problem {problem.problem_id}")
        with self._changed:
            if self._is_closing:
                raise RewardError("The scoring pool is closed; make a new one to score more completions.")
            tickets = list(range(self._next_ticket, self._next_ticket + len(texts)))
            self._next_ticket += len(texts)
            self._scores.update(dict.fromkeys(tickets))
            self._waiting.extend(
                _Item(ticket, problem.problem_id, problem_bytes, text)
                for ticket, text in zip(tickets, texts, strict=True)
            )
        self._wake()
        return tickets

    def result(self, ticket: int) -> Score:
        """Wait for one score. A ticket can be asked for once.

        Raises RewardError when the pool is closed meanwhile or can no longer start workers; KeyError for a ticket that
        was never given or already taken.
        """
        with self._changed:
            if ticket not in self._scores:
                raise KeyError(ticket)
            self._changed.wait_for(lambda: self._scores[ticket] is not None or self._failure or self._is_closing)
            score = self._scores.pop(ticket)
        if score is not None:
            return score
        raise self._failure or RewardError(
            "The scoring pool was closed before the completion was scored; score it again."
        )

    def results(self, tickets: Iterable[int]) -> list[Score]:
        """Wait for several scores, in the order of ``tickets``."""
        return [self.result(ticket) for ticket in tickets]

    @property
    def num_pending(self) -> int:
        """Completions submitted and not scored yet."""
        with self._changed:
            return sum(score is None for score in self._scores.values())

    def close(self) -> None:
        """Kill the workers and end the thread. May be called again."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._wake()
        self._thread.join()

    def __enter__(self) -> ScoringPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the watching thread ---

    def _watch(self) -> None:
        try:
            while not self._is_closing and self._failure is None:
                self._start_missing()
                self._hand_out()
                self._selector.select(self._seconds_to_wait())
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                for worker in list(self._workers):
                    self._look_after(worker)
        except Exception as error:  # a fault of ours must not leave anyone waiting
            logger.exception("the scoring pool failed")
            self._fail(f"The scoring pool failed ({type(error).__name__}: {error}); please report this.")
        finally:
            for worker in list(self._workers):
                self._drop(worker)
            self._selector.close()
            with self._changed:
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_write = -1

    def _start_missing(self) -> None:
        while len(self._workers) < self._num_workers:
            worker = WorkerProcess(self.spec, self._memory_limit_mb)
            worker.deadline = time.monotonic() + self._startup_seconds
            self._workers.append(worker)
            self._selector.register(worker.answer_fd, selectors.EVENT_READ)

    def _hand_out(self) -> None:
        idle = [worker for worker in self._workers if worker.is_ready and not worker.batch]
        for worker in idle:
            if items := self._next_items(worker):
                worker.send(items)
                worker.deadline = time.monotonic() + self.timeout_seconds
        is_fresh_coming = any(not worker.is_ready or not worker.num_answered for worker in self._workers)
        used = next((worker for worker in idle if not worker.batch), None)
        if self._retries and not is_fresh_coming and used is not None:
            self._drop(used)
        for worker in self._workers:
            self._listen(worker)

    def _next_items(self, worker: WorkerProcess) -> list[_Item]:
        if self._retries and not worker.num_answered:  # a second try needs a process that has seen nothing
            return [self._retries.popleft()]
        with self._changed:
            share = min(MAX_BATCH, math.ceil(len(self._waiting) / self._num_workers))
            return [self._waiting.popleft() for _ in range(share)]

    def _listen(self, worker: WorkerProcess) -> None:
        """Wait for room in the request pipe only while something is left to be written."""
        registered = worker.request_fd in self._selector.get_map()
        if worker.unsent and not registered:
            self._selector.register(worker.request_fd, selectors.EVENT_WRITE)
        elif registered and not worker.unsent:
            self._selector.unregister(worker.request_fd)

    def _seconds_to_wait(self) -> float | None:
        busy = [worker for worker in self._workers if worker.batch or not worker.is_ready]
        if not busy:
            return 0.0 if self._waiting or self._retries else None
        left = min(worker.deadline for worker in busy) - time.monotonic()
        return max(0.0, min(left, POLL_SECONDS))

    def _look_after(self, worker: WorkerProcess) -> None:
        worker.flush()
        # Asked before reading: what a dead process has written is complete.
        has_exited = worker.has_exited()
        answers, is_well = worker.receive()
        for answer in answers:
            is_well = self._take(worker, answer) and is_well
        if self._failure or worker not in self._workers:
            return
        if not is_well or has_exited:
            self._lost(worker)
        elif time.monotonic() >= worker.deadline:
            self._overran(worker)

    def _take(self, worker: WorkerProcess, answer: dict[str, Any]) -> bool:
        """Accept one line of a worker; False when it makes no sense or was the worker's last."""
        if not worker.is_ready:
            if "load_error" in answer:
                self._fail(str(answer["load_error"]))
                return False
            worker.is_ready = "ready" in answer
            worker.deadline = math.inf
            self._num_failed_starts = 0
            with self._changed:
                self._is_up = True
                self._changed.notify_all()
            return worker.is_ready
        if not worker.batch or answer.get("ticket") != worker.batch[0].ticket:
            return False
        score = _score_of(answer)
        if score is None:
            return False
        if answer.get("kind") == "memory" and worker.num_answered and not worker.batch[0].is_retry:
            return False  # earlier completions may have used the memory up: counts as lost, and is tried again
        worker.num_answered += 1
        worker.deadline = time.monotonic() + self.timeout_seconds if len(worker.batch) > 1 else math.inf
        self._deliver(worker.batch.popleft(), score)
        return True

    def _lost(self, worker: WorkerProcess) -> None:
        """A worker died, or has to go: its current completion pays, unless an earlier one may be to blame."""
        was_ready, batch, num_answered = worker.is_ready, worker.batch, worker.num_answered
        how = self._drop(worker, grace_seconds=0.1)
        if not was_ready:
            self._num_failed_starts += 1
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                self._fail(
                    f"The scoring worker for {self.spec.target!r} {how} while loading it, {MAX_FAILED_STARTS} times in "
                    f"a row; try it by hand, or raise its memory limit ({self._memory_limit_mb} MB)."
                )
            return
        if not batch:
            return
        item = batch.popleft()
        if num_answered and not item.is_retry:
            item.is_retry = True
            self._retries.append(item)
        else:
            self._deliver(item, Score(0.0, False, f"crash: its process {how}"))
        self._put_back(batch)

    def _overran(self, worker: WorkerProcess) -> None:
        if not worker.is_ready:
            self._fail(
                f"Loading the reward {self.spec.target!r} takes more than {self._startup_seconds:g} seconds; "
                "make its import lighter or raise the start-up limit."
            )
            return
        batch = worker.batch
        self._drop(worker)
        self._deliver(batch.popleft(), Score(0.0, False, f"timeout: over {self.timeout_seconds:g} seconds"))
        self._put_back(batch)

    def _drop(self, worker: WorkerProcess, grace_seconds: float = 0.0) -> str:
        for fd in (worker.answer_fd, worker.request_fd):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        self._workers.remove(worker)
        return worker.kill(grace_seconds)

    def _put_back(self, items: Iterable[_Item]) -> None:
        with self._changed:
            self._waiting.extendleft(reversed(list(items)))

    def _deliver(self, item: _Item, score: Score) -> None:
        if score.error is not None:
            kind, _, detail = score.error.partition(": ")
            self.errors[kind] += 1
            if self.errors[kind] == 1:
                logger.warning(
                    "the reward %s %s on problem %d (%s); it counts as 0, further cases are only counted",
                    self.spec.target, ERROR_KINDS[kind], item.problem_id, detail,
                )  # fmt: skip
        with self._changed:
            if item.ticket in self._scores:
                self._scores[item.ticket] = score
            self._changed.notify_all()

    def _fail(self, sentence: str) -> None:
        with self._changed:
            self._failure = RewardError(sentence)
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            if self._wake_write >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"x")


def _score_of(answer: dict[str, Any]) -> Score | None:
    """The score in a worker's line; None when it is not one (the scorer wrote to the pipe)."""
    if answer.get("kind") in ERROR_KINDS:
        return Score(0.0, False, f"{answer['kind']}: {answer.get('detail')}")
    reward, outcome = answer.get("reward"), answer.get("outcome")
    is_number = isinstance(reward, (int, float)) and not isinstance(reward, bool) and math.isfinite(reward)
    return Score(float(reward), outcome) if is_number and isinstance(outcome, bool) else None


def _pickled(value: Any, what: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise RewardError(f"{what} cannot be sent to the scoring workers ({error}); keep to plain data.") from error


def _check_settings(workers: int, timeout: float, memory_limit_mb: int | None, startup: float) -> None:
    checks = (
        (isinstance(workers, int) and workers >= 1, "workers", workers, "an integer of at least 1"),
        (0 < timeout < math.inf, "timeout_seconds", timeout, "a positive number of seconds"),
        (memory_limit_mb is None or memory_limit_mb >= 64, "memory_limit_mb", memory_limit_mb, "at least 64, or null"),
        (0 < startup < math.inf, "startup_seconds", startup, "a positive number of seconds"),
    )
    for ok, name, value, wanted in checks:
        if not ok:
            raise ConfigError(f"The scoring pool's {name} is {value!r}; it must be {wanted}.")
