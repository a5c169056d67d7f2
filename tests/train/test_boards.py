"""TensorBoard and Weights & Biases: what they get, and that nothing they do stops a run."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from sagc_fast.config import TrainConfig
from sagc_fast.train.boards import open_boards
from sagc_fast.train.metrics import MetricsWriter

RECORD = {"step": 1, "loss": 0.5, "arms": {"4": {"mean": 0.1}}, "x": None, "event": "step"}


def config_of(folder, **metrics):
    settings = {"tensorboard": False, **metrics}
    return TrainConfig.from_dict(
        {"model": {"path": "addition"}, "task": {"name": "addition"}, "run_dir": str(folder), "metrics": settings}
    )


class FakeWandb(SimpleNamespace):
    """The part of the wandb package that is used, recording what it is told."""

    def __init__(self, **changes):
        super().__init__(logged=[], started=[], finished=0, metrics=[], **changes)

    def init(self, **arguments):
        self.started.append(arguments)
        return self

    def define_metric(self, name, **arguments):
        self.metrics.append((name, arguments))

    def Histogram(self, values):  # noqa: N802 (wandb's name)
        return ("histogram", values)

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished += 1


def test_tensorboard_gets_scalars_and_histograms(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, {}, open_boards(config_of(tmp_path, tensorboard=True), 0)) as writer:
        for step in (1, 2):
            writer.show(RECORD | {"step": step}, "t", {"lengths": [1.0, 2.0, 40.0], "rewards": []})
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["t/arms/4/mean", "t/loss"]
    assert [(e.step, e.value) for e in events.Scalars("t/loss")] == [(1, 0.5), (2, 0.5)]
    assert events.Tags()["histograms"] == ["t/lengths"]
    assert [(e.step, e.histogram_value.max) for e in events.Histograms("t/lengths")] == [(1, 40.0), (2, 40.0)]


def test_weights_and_biases_gets_them_too_and_a_resumed_run_continues_its_id(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for _ in range(2):
        with MetricsWriter(tmp_path, {}, open_boards(config_of(tmp_path, wandb_project="sums"), 0)) as writer:
            writer.show(RECORD, "t", {"lengths": [1.0, 2.0]})
    first, second = wandb.started
    assert first["project"] == "sums"
    assert first["config"]["task"]["name"] == "addition"
    assert (first["id"], first["resume"]) == (second["id"], "allow")
    assert wandb.logged[0] == {
        "optimizer_step": 1, "t/loss": 0.5, "t/arms/4/mean": 0.1, "t/lengths": ("histogram", [1.0, 2.0])
    }  # fmt: skip
    assert ("*", {"step_metric": "optimizer_step"}) in wandb.metrics
    assert wandb.finished == 2


@pytest.mark.parametrize(
    ("module", "settings", "remedy"),
    [
        ("torch.utils.tensorboard", {"tensorboard": True}, "pip install tensorboard"),
        ("wandb", {"wandb_project": "sums"}, "pip install wandb"),
    ],
)
def test_what_is_not_installed_is_named_and_the_run_goes_on(tmp_path, monkeypatch, caplog, module, settings, remedy):
    monkeypatch.setitem(sys.modules, module, None)
    with MetricsWriter(tmp_path, {}, open_boards(config_of(tmp_path, **settings), 0)) as writer:
        writer.show(RECORD, "train")
    assert remedy in caplog.text


def test_a_board_that_fails_is_dropped_once_and_the_others_stay(tmp_path, monkeypatch, caplog):
    def fail(values):
        raise ConnectionError("no route")

    wandb = FakeWandb(log=fail)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    boards = open_boards(config_of(tmp_path, tensorboard=True, wandb_project="sums"), 0)
    with MetricsWriter(tmp_path, {}, boards) as writer:
        for step in (1, 2):
            writer.show(RECORD | {"step": step}, "t")
    assert caplog.text.count("no route") == 1
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_board_that_cannot_be_opened_costs_itself_only(tmp_path, monkeypatch, caplog):
    def refuse(**arguments):
        raise RuntimeError("api key not configured")

    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(init=refuse))
    assert open_boards(config_of(tmp_path, wandb_project="sums"), 0) == []
    assert "api key not configured" in caplog.text
