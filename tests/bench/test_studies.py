"""The studies under bench/: what they share, and that the pages show what is stored."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import results_grid  # noqa: E402
import results_tables  # noqa: E402
import studies  # noqa: E402


def test_the_tables_of_the_results_are_those_of_the_stored_runs():
    page = (ROOT / "docs/results.md").read_text()
    assert results_tables.with_tables(page) == page, "run python bench/results_study.py --draw-only"


def test_the_tables_of_the_learning_study_are_those_of_the_stored_runs():
    import learning_study

    page = (ROOT / "docs/learning.md").read_text()
    assert learning_study.with_tables(page, learning_study.complete_seeds()) == page


def test_every_run_has_its_own_name_and_one_seed_of_everything_comes_first():
    cells = results_grid.cells()
    assert len({cell.name for cell in cells}) == len(cells)
    seeds = [cell.seed for cell in cells]
    assert seeds.index(1) == seeds.count(0)


@pytest.mark.parametrize("model", results_grid.MODELS)
@pytest.mark.parametrize("controller", results_grid.CONTROLLERS)
def test_a_cell_changes_nothing_but_algorithm_controller_steps_and_seed(model, controller, tmp_path):
    from sagc_fast.config import TrainConfig, changed_fields

    config = results_grid.Cell(model, "dapo", controller, 2).config(tmp_path)
    base = TrainConfig.from_yaml(ROOT / f"configs/results/{model}.yaml")
    allowed = {"algo.name", "controller.kind", "controller.group_size", "seed", "steps", "run_dir", "model.path"}
    assert set(changed_fields(base, config)) <= allowed
    assert config.controller.kind == (controller if controller in results_grid.ADAPTIVE else "fixed")


def run_with(tokens_per_step: float, rewards: list[float], accuracies: dict[int, float], monkeypatch) -> None:
    """A stored run of any cell."""
    run = {"tokens": tokens_per_step * np.arange(1, len(rewards) + 1), "reward_mean": np.array(rewards)}
    run["smooth"] = studies.running_mean(run["reward_mean"])
    monkeypatch.setattr(results_tables, "run_of", lambda cell: run)
    heldout = np.array(list(accuracies), dtype=float), np.array(list(accuracies.values()))
    monkeypatch.setattr(results_tables, "heldout_of", lambda cell: heldout)


def test_a_budget_is_read_off_between_evaluations(monkeypatch):
    run_with(100, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5], {0: 0.2, 2: 0.4, 6: 0.8}, monkeypatch)
    cell = results_grid.Cell("addition", "grpo", "G4", 0)
    steps, reward, heldout = results_tables.at_budget(cell, "tokens", 400)
    assert (steps, heldout) == (4, pytest.approx(0.6))
    assert reward == pytest.approx(np.mean([0.0, 0.1, 0.2, 0.3]))
    steps, _, heldout = results_tables.at_budget(cell, "tokens", 399.0)
    assert steps == 3, "a step that does not fit whole does not count"
    assert heldout == pytest.approx(0.4 + 0.4 * 199 / 400)
    assert results_tables.at_budget(cell, "tokens", 600)[2] == pytest.approx(0.8)


def test_a_run_that_is_stored_is_read_back_and_others_are_not(tmp_path):
    records = [
        {"event": "eval", "step": 0, "accuracy": 0.5, "length_mean": 3.0},
        {"event": "step", "step": 1, "reward_mean": 0.25, "num_output_tokens": 10, "cpu_seconds": 0.5},
        {"event": "step", "step": 2, "reward_mean": 0.75, "num_output_tokens": 20, "cpu_seconds": 0.25},
    ]
    steps, evaluations = studies.split_records(records, ["reward_mean"])
    assert evaluations == [{"step": 0, "accuracy": 0.5, "length_mean": 3.0}]
    for seed in (0, 1):
        studies.append(tmp_path / "runs.csv", {"seed": seed}, steps)
    run = studies.columns(tmp_path / "runs.csv", {"seed": 1})
    assert run["tokens"].tolist() == [10, 30]
    assert run["cpu_seconds"].tolist() == [0.5, 0.75]
    assert run["smooth"].tolist() == [0.25, 0.5]
    assert studies.columns(tmp_path / "runs.csv", {"seed": 2}) == {}


def test_a_page_without_its_marks_is_refused():
    assert (
        studies.with_body("a <!--x--> old <!--y--> b", ("<!--x-->", "<!--y-->"), "new") == "a <!--x-->\nnew\n<!--y--> b"
    )
    with pytest.raises(SystemExit, match="lacks the marks"):
        studies.with_body("a <!--x--> old", ("<!--x-->", "<!--y-->"), "new")
