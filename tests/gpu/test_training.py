"""Updates on a GPU: the CPU's gradients, the same bits twice, and an optimizer that goes on from its saved state."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from made_up_groups import made_up_groups

from sagc_fast import TrainConfig, ops
from sagc_fast.train.optimizer import PolicyOptimizer
from sagc_fast.train.trainer import Trainer
from sagc_fast.train.update import PolicyUpdater

pytestmark = pytest.mark.gpu


def _config(algorithm: str) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "model": {"path": "none"},
            "task": {"name": "addition"},
            "algo": {"name": algorithm},
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
            "update": {"micro_batch_tokens": 96},
        },
        where="the test",
    )


def _update(model: torch.nn.Module, optimizer: PolicyOptimizer, algorithm: str = "grpo", step: int = 1) -> float:
    """The norm of the gradient."""
    config = _config(algorithm)
    updater = PolicyUpdater(
        model, None, optimizer, config.algorithm, config.update, max_length=64, temperature=1.0, seed=0
    )
    result = updater.update(step, made_up_groups([list(range(20)), [5, 6, 7], [1] * 40], 4, growth=9))
    assert result.num_updates == 1
    return result.grad_norms[0]


def _optimizer(model: torch.nn.Module) -> PolicyOptimizer:
    return PolicyOptimizer(model, _config("grpo").optimizer)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_gradients_are_those_of_the_cpu(family: str, algorithm: str, tiny_model, device: torch.device) -> None:
    gradients = []
    for place in (torch.device("cpu"), device):
        model = tiny_model(family).to(place)
        optimizer = _optimizer(model)
        kept: list[torch.Tensor] = []
        plain = optimizer.step

        def step(optimizer=optimizer, plain=plain, kept=kept) -> float:
            kept += [gradient.detach().cpu().clone() for gradient in optimizer.gradients()]
            return plain()

        optimizer.step = step
        if place.type == "cpu":
            with ops.use_backend("torch"):
                _update(model, optimizer, algorithm)
        else:
            _update(model, optimizer, algorithm)
        gradients.append(kept)
    for found, wanted in zip(*gradients[::-1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()) + 1e-7)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_update_repeats_to_the_bit(dtype: str, tiny_model, device: torch.device) -> None:
    after = []
    for _ in range(2):
        model = tiny_model("llama", dtype=dtype).to(device)
        _update(model, _optimizer(model))
        after.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *after))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_optimizer_goes_on_from_its_saved_state(dtype: str, tiny_model, device: torch.device) -> None:
    """As load_state_tensors is used: tensors from a file, on the CPU. torch's fused step wants its count on the GPU."""
    model = tiny_model("llama", dtype=dtype).to(device)
    optimizer = _optimizer(model)
    _update(model, optimizer)
    resumed = tiny_model("llama", dtype=dtype).to(device)
    resumed.load_state_dict(model.state_dict())
    other = _optimizer(resumed)
    other.load_state_tensors({name: x.cpu() for name, x in optimizer.state_tensors().items()}, optimizer.num_updates)
    _update(model, optimizer, step=2), _update(resumed, other, step=2)
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


def test_a_run_trains_stops_and_resumes(tmp_path: Path, device: torch.device) -> None:
    def run(steps: int, resume: bool) -> list[dict]:
        config = TrainConfig.from_dict(
            {
                "model": {"path": "addition", "device": device.type},
                "task": {"name": "addition", "max_new_tokens": 24},
                "rollout": {"prompts_per_step": 3, "kv_budget_gb": 0.1},
                "controller": {"kind": "fixed", "group_size": 4},
                "evaluation": {"num_problems": 0},
                "checkpoint": {"every": 1},
                "metrics": {"display": "off"},
                "steps": steps,
                "run_dir": str(tmp_path / "run"),
            },
            where="the test",
        )
        Trainer(config, resume=resume, stream=io.StringIO()).fit()
        return [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]

    run(2, resume=False)
    records = [record for record in run(3, resume=True) if record["event"] == "step"]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["logprob_diff_mean"] < 1e-2 for record in records if record.get("logprob_diff_mean") is not None)
