"""What bench/results_study.py runs: models, algorithms, controllers, seeds, and where each run's figures are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import studies
from studies import ROOT

if TYPE_CHECKING:
    from sagc_fast import TrainConfig

DATA = ROOT / "docs/runs/results"
MODELS = ("addition", "smollm2", "addition_large")
PRETRAINED = "smollm2"
ALGORITHMS = ("grpo", "dapo")
FIXED, ADAPTIVE = ("G4", "G8", "G16"), ("sagc", "prompt_aware")
CONTROLLERS = (*FIXED, *ADAPTIVE)
SEEDS = {"smollm2": (0, 1), "addition": (0, 1, 2), "addition_large": (0, 1, 2)}
OURS, TRL = "sagc_fast", "trl"
EQUAL_STEPS = {"smollm2": 20, "addition": 30, "addition_large": 20}
"""Optimizer steps at which the cells are compared."""
LONGER = {"addition": {"G4": 4, "G8": 2, "G16": 1, "sagc": 2, "prompt_aware": 2}}
"""Times those steps that a cell runs in all, so that cells with cheap steps can be compared at the tokens and seconds
of dear ones; 1 where nothing is said."""
TRL_STEPS = {"smollm2": 2, "addition": 30, "addition_large": 20}
"""Steps through TRL's trainer; two are enough to know what a step costs, not what is learnt."""
STEP_FIELDS = (
    "group_size", "reward_mean", "straggler_rate", "length_mean", "idle_fraction", "num_groups_kept",
    "num_groups_sampled",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    model: str
    algorithm: str
    controller: str
    seed: int
    trainer: str = OURS

    @property
    def name(self) -> str:
        return "-".join(map(str, (self.model, *self.key.values())))

    @property
    def key(self) -> dict[str, Any]:
        names = ("trainer", "algorithm", "controller", "seed")
        return {name: getattr(self, name) for name in names}

    @property
    def steps(self) -> int:
        if self.trainer == TRL:
            return TRL_STEPS[self.model]
        return EQUAL_STEPS[self.model] * LONGER.get(self.model, {}).get(self.controller, 1)

    @property
    def is_done(self) -> bool:
        return next(studies.rows_of(self.file, self.key), None) is not None

    @property
    def file(self) -> Path:
        return DATA / f"{self.model}.csv"

    @property
    def heldout_file(self) -> Path:
        return DATA / f"{self.model}_heldout.csv"

    def config(self, work: Path) -> TrainConfig:
        from sagc_fast import TrainConfig

        fixed = self.controller in FIXED
        kind = [f"controller.kind={'fixed' if fixed else self.controller}"]
        size = [f"controller.group_size={self.controller[1:]}"] if fixed else []
        rest = [
            f"algo.name={self.algorithm}",
            f"seed={self.seed}",
            f"steps={self.steps}",
            f"run_dir={work / self.name}",
        ]
        if self.model == "addition_large":
            rest.append(f"model.path={work / 'policies' / self.model}")
        return TrainConfig.from_yaml(ROOT / f"configs/results/{self.model}.yaml", overrides=[*kind, *size, *rest])


def cells() -> list[Cell]:
    """Every run in the order of running: one seed of everything, then the other seeds, those of dear runs last."""
    first = [cell for model in MODELS for cell in (*_ours(model, 0), *_through_trl(model, 0))]
    small = [model for model in MODELS if model != PRETRAINED]
    cheap = [cell for model in small for seed in SEEDS[model][1:] for cell in _ours(model, seed)]
    through_trl = [cell for seed in SEEDS["addition"][1:] for cell in _through_trl("addition", seed)]
    dear = [cell for seed in SEEDS[PRETRAINED][1:] for cell in _ours(PRETRAINED, seed)]
    return first + cheap + dear + through_trl


def _ours(model: str, seed: int) -> list[Cell]:
    return [Cell(model, algorithm, controller, seed) for algorithm in ALGORITHMS for controller in CONTROLLERS]


def _through_trl(model: str, seed: int) -> list[Cell]:
    """One seed of everything, the other seeds with GRPO."""
    algorithms = ALGORITHMS if seed == 0 else ALGORITHMS[:1]
    return [Cell(model, algorithm, controller, seed, TRL) for algorithm in algorithms for controller in FIXED]
