"""The training loop. Read :meth:`Trainer.fit`, then :meth:`Trainer._train_step`; every name there is one file.

prompts -> engine.generate -> groups -> scores (while generation goes on) -> advantages -> packed micro-batches
        -> policy loss -> optimizer (in place) -> engine.reset() -> controller.observe(lengths) -> next group size
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from sagc_fast.config import TrainConfig
from sagc_fast.errors import SagcError
from sagc_fast.profiling import STEP, ranged
from sagc_fast.tasks.base import make_task
from sagc_fast.tasks.scoring import ScoringPool
from sagc_fast.train import accounting, parts
from sagc_fast.train.alarms import Alarms
from sagc_fast.train.boards import open_boards
from sagc_fast.train.checkpoint import Checkpoint, CheckpointStore
from sagc_fast.train.display import make_display
from sagc_fast.train.distributed import ALONE, connected
from sagc_fast.train.draw import PromptSource
from sagc_fast.train.evaluate import evaluate
from sagc_fast.train.files import writing
from sagc_fast.train.metrics import MetricsWriter
from sagc_fast.train.optimizer import PolicyOptimizer
from sagc_fast.train.prompt_budget import PromptBudget
from sagc_fast.train.prompt_history import PromptHistory
from sagc_fast.train.run_directory import RunDirectory
from sagc_fast.train.sampling import Rollout, Sampler
from sagc_fast.train.signals import StopRequest
from sagc_fast.train.state import TrainState
from sagc_fast.train.update import PolicyUpdater, UpdateResult
from sagc_fast.types import SamplingParams

logger = logging.getLogger(__name__)


class Trainer:
    """Trains one policy and leaves a self-describing run directory. Under torchrun, several processes do it together.

    >>> Trainer(TrainConfig.from_yaml("run.yaml", overrides=["steps=10"])).fit()        # doctest: +SKIP

    Args:
        config: everything the run depends on.
        resume: continue the run in ``config.run_dir`` from its newest checkpoint; without one, start it.
        force: resume although fields have changed on which the steps depend.
        stream: where the display writes; default stdout.
    """

    def __init__(
        self, config: TrainConfig, *, resume: bool = False, force: bool = False, stream: TextIO | None = None
    ) -> None:
        self.config = config
        self.resume, self.force = resume, force
        self.display = make_display(config.metrics.display, config.steps, stream)
        self.stop = StopRequest()
        self.processes = ALONE

    def fit(self) -> dict[str, Any]:
        """Train to ``config.steps``; returns a summary (steps, seconds, held-out accuracy before and after).

        SIGTERM or SIGINT ends it early with a checkpoint. Raises SagcError for everything a user can mend.
        """
        with self._session():
            self._evaluate_if_due()
            while self.state.step < self.config.steps and not self._is_stopping():
                self._train_step()
                self._evaluate_if_due()
                self._checkpoint_if_due()
            self._checkpoint_if_due()  # a signal may have come after the step's own
        return self.summary()

    @ranged(STEP)
    def _train_step(self) -> None:
        """One optimizer step, from the choice of the group size to what the controller learns from it.

        The controller chooses from past steps alone, and learns from every group of the first sampling round, before
        dynamic sampling drops any: which groups survive depends on their rewards and lengths, and an estimate of the
        straggler rate from survivors would be biased.
        """
        started, cpu_started = time.perf_counter(), time.process_time()
        step = self.state.step + 1
        group_size = self.processes.from_first(self.controller.decide())
        num_prompts = self.processes.from_first(self.prompt_budget.num_prompts(group_size))
        sizes = self.controller.decide_groups if self.config.controller.kind == "prompt_aware" else group_size

        rollout = self.sampler.sample(self.state.position, num_prompts, sizes, self._show("rollout"))
        self._show("update")(0, len(rollout.kept))
        update = self.updater.update(step, rollout.kept)
        self.engine.reset()

        lengths = [g.group.lengths for g in rollout.first_round]
        self.controller.observe(
            lengths,
            num_clipped=sum(c.is_truncated for g in rollout.first_round for c in g.group.completions),
            problem_ids=[g.problem.length_key for g in rollout.first_round],
            seconds=rollout.rollout_seconds + update.seconds,
            num_steps=rollout.stats.num_steps,
        )
        self.prompt_budget.observe(lengths)

        self.state.step = step
        self.state.position = rollout.next_position
        self.state.num_updates = self.optimizer.num_updates
        cpu_seconds = time.process_time() - cpu_started
        self._record(group_size, rollout, update, time.perf_counter() - started, cpu_seconds)
        self._stop_if_not_finite(rollout, update)

    # ---- recording -----------------------------------------------------------------------------------------------

    def _record(
        self, group_size: int, rollout: Rollout, update: UpdateResult, seconds: float, cpu_seconds: float
    ) -> None:
        """Write the step's lines, look for alarms, show the step."""
        checkpoint_seconds, self._checkpoint_seconds = self._checkpoint_seconds, 0.0
        self.state.time_seconds += seconds + checkpoint_seconds
        if not self.processes.is_first:
            return
        record = {
            "event": "step",
            "step": self.state.step,
            "time_seconds": self.state.time_seconds,
            "controller": self.config.controller.kind,
            "group_size": group_size,
            **accounting.controller_figures(self.controller.gauges(), self.config.controller),
            **accounting.group_size_figures(rollout.first_round, self.config.controller.kind),
            **accounting.straggler_figures(rollout.first_round, self.config.controller.tau),
            **accounting.completion_figures(rollout),
            **accounting.rollout_figures(rollout),
            **accounting.update_figures(update, rollout),
            "checkpoint_seconds": checkpoint_seconds,
            "step_seconds": seconds + checkpoint_seconds,
            "cpu_seconds": cpu_seconds,
        }
        self.metrics.write("metrics.jsonl", record)
        self.metrics.show(record, "train", accounting.histograms(rollout))
        trace = accounting.length_trace(self.state.step, group_size, rollout.first_round, self.params.max_new_tokens)
        self.metrics.write("lengths.jsonl", trace)
        if self._is_due(self.config.metrics.timeline_every, first=1):
            self.metrics.write("timeline.jsonl", accounting.timeline(self.state.step, rollout))
        self.alarms.check(record, update.num_informative_groups, accounting.example_error(rollout))
        self._recent_seconds.append(record["step_seconds"])
        left = (self.config.steps - self.state.step) * sum(self._recent_seconds) / len(self._recent_seconds)
        self.display.step(record, left)

    def _stop_if_not_finite(self, rollout: Rollout, update: UpdateResult) -> None:
        """Note a loss or gradient that was not finite; raise SagcError after too many in a row."""
        if not update.bad_groups:
            self.state.num_bad_in_row = 0
            return
        self.state.num_bad_in_row += 1
        path = Path(self.config.run_dir) / "nonfinite" / f"step-{self.state.step:06d}.json"
        if self.processes.is_first:
            with writing(str(path), self.store.what_remains):
                parts.dump_groups(path, self.state.step, [rollout.kept[i] for i in update.bad_groups])
        logger.warning("step %d: loss or gradient not finite, update skipped; see %s", self.state.step, path)
        if self.state.num_bad_in_row >= self.config.update.max_bad_steps:
            raise SagcError(
                f"The loss or gradient was not finite in {self.state.num_bad_in_row} steps in a row (see {path}); "
                "lower optimizer.learning_rate, or resume from the newest checkpoint with model.dtype fp32."
            )

    def _evaluate_if_due(self) -> None:
        options = self.config.evaluation
        if not self._is_evaluation_due() or self._is_stopping():
            return
        record = evaluate(
            self.engine,
            self.source,
            self.task.size("heldout"),
            self.pool,
            options,
            self.params.max_new_tokens,
            self.state.step,
            self._show("evaluation"),
            self.processes,
            lambda: self.stop.is_set,
        )
        if record is None:  # stopped in its middle: the run that resumes here repeats it
            return
        if self.processes.is_first:
            self.metrics.write("metrics.jsonl", record)
            self.metrics.show(record, "heldout")
            self.display.evaluation(record)
        state, accuracy = self.state, record["accuracy"]
        state.evaluated_step, state.last_accuracy = state.step, accuracy
        if self._saved_step == state.step:  # the checkpoint was made when a signal cut the evaluation off
            self._saved_step = None
        if state.step == 0:
            state.first_accuracy = accuracy
        if state.best_accuracy is None or accuracy > state.best_accuracy:
            state.best_step, state.best_accuracy = state.step, accuracy

    def _is_evaluation_due(self) -> bool:
        options = self.config.evaluation
        is_due = options.num_problems > 0 and self._is_due(options.every, first=0)
        return is_due and self.state.evaluated_step != self.state.step

    def _checkpoint_if_due(self) -> None:
        is_new_best = self.config.checkpoint.keep_best and self.state.best_step == self.state.step
        every = self.config.checkpoint.every
        if self._saved_step == self.state.step:
            return
        if not (self._is_due(every, first=None) or is_new_best or self._is_stopping()):
            return
        started = time.perf_counter()
        length_histories = self.processes.gather(self.engine.lengths.state())
        if self.processes.is_first:
            self._save_checkpoint(length_histories)
        self.processes.from_first(None)  # nobody goes on, or ends, before it is there
        self._saved_step = self.state.step
        self._checkpoint_seconds = time.perf_counter() - started

    def _save_checkpoint(self, length_histories: list[dict[str, Any]]) -> None:
        self._show("checkpoint")(0, 1)
        self.state.controller = self.controller.state_dict()
        self.state.prompt_budget = self.prompt_budget.state_dict()
        self.state.alarms = self.alarms.state_dict()
        self.state.prompt_history = self.prompt_history.state_dict()
        self.state.files = self.metrics.sync()
        self.store.save(
            self.state.step,
            lambda folder: parts.save_tensors(folder, self.engine, self.optimizer, length_histories),
            self.state.to_dict(),
            self.state.best_step if self.config.checkpoint.keep_best else None,
        )

    def _is_stopping(self) -> bool:
        """True in all processes once a signal has reached any of them."""
        return any(self.processes.gather(self.stop.is_set))

    def _is_due(self, every: int, first: int | None) -> bool:
        step = self.state.step
        return step in (first, self.config.steps) or (every > 0 and step > 0 and step % every == 0)

    def _show(self, phase: str):
        return lambda done, total: self.display.progress(phase, done, total)

    def summary(self) -> dict[str, Any]:
        """What the run came to, plain values."""
        run_dir = self.config.run_dir
        several = f"torchrun --nproc-per-node={self.processes.size} -m " if self.processes.size > 1 else ""
        program = f"{several}{'sagc_fast' if several else 'sagc-fast'}"
        return {
            "run_dir": run_dir,
            "steps": self.state.step,
            "time_seconds": self.state.time_seconds,
            "accuracy_before": self.state.first_accuracy,
            "accuracy_after": self.state.last_accuracy,
            "is_interrupted": self.state.step < self.config.steps or self._is_evaluation_due(),
            "resume_command": f"{program} train --resume --run-dir {shlex.quote(run_dir)}",
        }

    # ---- opening and closing -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        """Everything that must be opened before the loop and closed after it, whatever happens."""
        config = self.config
        with contextlib.ExitStack() as stack:
            stack.enter_context(parts.warnings_in_the_log())
            stack.enter_context(parts.reproducible_torch(config.model.device, config.threads))
            stack.enter_context(self.stop)
            self.processes = stack.enter_context(connected(config.model.device))
            if not self.processes.is_first:  # the first one writes and speaks for all
                stack.enter_context(parts.silenced())
                self.display = make_display("off", config.steps, None)
            self.display.start()
            stack.callback(self.display.stop)
            self.store = CheckpointStore(Path(config.run_dir) / "checkpoints", config.checkpoint.keep_last)
            is_resumed, checkpoint = self.processes.from_first(
                self._find_checkpoint(stack) if self.processes.is_first else None
            )
            self.state = TrainState() if checkpoint is None else TrainState.from_dict(checkpoint.state)
            self._build(checkpoint, stack)
            if self.processes.is_first:
                if not is_resumed:  # last, so that a mistake in the configuration leaves no folder behind
                    self._open_directory(stack)
                self.metrics = stack.enter_context(
                    MetricsWriter(
                        Path(config.run_dir),
                        self.state.files,
                        open_boards(config, self.state.step),
                        self.store.what_remains,
                        self.state.is_done,
                    )
                )
                self._say_where_we_are(checkpoint)
            yield

    def _find_checkpoint(self, stack: contextlib.ExitStack) -> tuple[bool, Checkpoint | None]:
        """Whether the run directory holds a run to be continued (it is opened then), and where it stands."""
        is_resumed = RunDirectory.is_to_be_resumed(self.config.run_dir, self.resume)
        if is_resumed:
            self._open_directory(stack)
        return is_resumed, self.store.latest() if is_resumed else None

    def _open_directory(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(RunDirectory(self.config, self.resume, self.force, self.processes.size))

    def _build(self, checkpoint: Checkpoint | None, stack: contextlib.ExitStack) -> None:
        """The parts, and their state when there is a checkpoint."""
        config, state = self.config, self.state
        self.task = make_task(config.task, seed=config.seed)
        self.engine = parts.build_engine(config, checkpoint, self.processes)
        self.engine.policy_version = state.step
        self.optimizer = PolicyOptimizer(self.engine.model, config.optimizer)
        if checkpoint is not None:
            parts.load_optimizer(checkpoint, self.optimizer)
        self.params = SamplingParams(
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens or self.task.max_new_tokens,
            seed=config.seed,
        )
        self.controller = parts.build_controller(config.controller, config.seed, self.params.max_new_tokens)
        if state.controller:
            self.controller.load_state_dict(state.controller)
        self.prompt_budget = PromptBudget(
            config.controller.hold,
            config.rollout.prompts_per_step,
            config.controller.max_group_size,
            state.prompt_budget,
        )
        self.alarms = Alarms(config.update.logprob_diff_alarm, state.alarms)
        self.updater = PolicyUpdater(
            self.engine.model,
            parts.build_reference(config),
            self.optimizer,
            config.algorithm,
            config.update,
            max_length=self.params.max_new_tokens,
            temperature=config.rollout.temperature,
            seed=config.seed,
            processes=self.processes,
        )
        self.pool = stack.enter_context(
            ScoringPool(self.task.scorer_spec, config.reward.workers, config.reward.timeout_seconds)
        )
        context = self.engine.model.config.max_position_embeddings
        self.source = PromptSource(self.task, self.engine.tokenizer, max_prompt_tokens=context - 1)
        filters = config.algorithm.filters
        self.prompt_history = PromptHistory(filters.skip_after, filters.skip_times, state.prompt_history)
        self.sampler = Sampler(
            self.engine, self.source, self.pool, self.params, filters, self.prompt_history, self.processes
        )
        self._saved_step = None if checkpoint is None else checkpoint.step
        self._checkpoint_seconds = 0.0
        self._recent_seconds: deque[float] = deque(maxlen=20)

    def _say_where_we_are(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None and self.state.step >= self.config.steps:
            logger.warning("the run is complete at step %d; raise steps to train longer", self.state.step)
        elif checkpoint is not None:
            logger.warning("continuing after step %d from %s", self.state.step, checkpoint.path)
        elif self.resume:
            logger.warning("no checkpoint in %s yet; starting from the first step", self.config.run_dir)
