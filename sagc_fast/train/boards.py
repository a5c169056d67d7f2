"""Where a run's numbers are shown while it goes on: TensorBoard event files, Weights & Biases. Neither can stop a run.

A board takes scalars and histograms of a step. The first failure of a board is logged, and the run goes on without it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sagc_fast.config import TrainConfig

logger = logging.getLogger(__name__)


class Board(Protocol):
    """One place to show numbers."""

    name: str

    def write(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """Show the numbers of ``step``. A step that is done again after a resume replaces or follows its first time."""

    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``folder``; what they hold of steps after ``step`` is hidden."""

    name = "TensorBoard"

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        import numpy as np

        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        for name, values in histograms.items():
            self._writer.add_histogram(name, np.asarray(values, dtype=np.float64), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in the project ``project``; its id is kept in the run directory, so that a resumed run continues it.

    Steps are a metric of their own: W&B's internal counter only goes up, and a resumed run does some steps again.
    """

    name = "Weights & Biases"

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        identity = folder / "wandb_id"
        if not identity.exists():
            identity.write_text(uuid.uuid4().hex, encoding="utf-8")
        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            name=folder.resolve().name,
            id=identity.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )
        self._run.define_metric("optimizer_step")
        self._run.define_metric("*", step_metric="optimizer_step")

    def write(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        shown = {name: self._wandb.Histogram(list(values)) for name, values in histograms.items()}
        self._run.log({"optimizer_step": step, **scalars, **shown})

    def close(self) -> None:
        self._run.finish()


def open_boards(config: TrainConfig, step: int) -> list[Board]:
    """The boards that the run asks for, continuing after ``step``; one that cannot be opened is named in the log with
    the remedy."""
    folder, options = Path(config.run_dir), config.metrics
    wanted = []
    if options.tensorboard:
        wanted.append(("TensorBoard", "tensorboard", lambda: TensorBoard(folder / "tensorboard", step)))
    if options.wandb_project:
        settings = asdict(config)
        wanted.append(("Weights & Biases", "wandb", lambda: WeightsAndBiases(folder, options.wandb_project, settings)))
    boards: list[Board] = []
    for name, package, make in wanted:
        try:
            boards.append(make())
        except ImportError:
            logger.warning("%s is not installed (pip install %s); going on without it", name, package)
        except Exception as error:  # no key, no network, no room: whatever it is, training does not depend on it
            logger.warning("%s cannot be used (%s); going on without it", name, error)
    return boards


class Boards:
    """All boards of a run as one; a board that fails is dropped, said once."""

    def __init__(self, boards: Sequence[Board] = ()) -> None:
        self._boards = list(boards)

    def write(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Scalars and histograms (empty ones are left out) of one step on every board."""
        filled = {name: values for name, values in (histograms or {}).items() if len(values)}
        for board in list(self._boards):
            try:
                board.write(step, scalars, filled)
            except Exception as error:
                logger.warning("%s cannot be written (%s); going on without it", board.name, error)
                self._boards.remove(board)

    def close(self) -> None:
        for board in self._boards:
            try:
                board.close()
            except Exception as error:
                logger.warning("%s did not close (%s)", board.name, error)
