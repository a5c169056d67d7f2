"""A whole engine call and a whole update on a device that is not the CPU: nothing mixes the two, numbers are the same.

Runs without a GPU (see pretend_device.py). What it cannot see are the Triton kernels, which have tests of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from made_up_groups import made_up_groups
from pretend_device import PRETENDED, MixedDevices, OnDevice, pretended_device, to_device

from sagc_fast import RolloutEngine, SamplingParams, TrainConfig, ops
from sagc_fast.model import lora
from sagc_fast.model.loader import save_model
from sagc_fast.rollout.uploads import uploaded
from sagc_fast.train.optimizer import PolicyOptimizer
from sagc_fast.train.update import PolicyUpdater

PROMPTS = [list(range(20)), [5, 6, 7], [1] * 33]


@pytest.fixture(autouse=True)
def fused_optimizer_everywhere(monkeypatch) -> None:
    """The optimizer's fused step, as on a GPU; torch lists the devices that have one."""
    import torch.optim.optimizer as optimizer

    known = optimizer._get_fused_kernels_supported_devices()
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: [*known, PRETENDED.type])


def test_a_mixture_of_devices_is_an_error_and_values_are_counted() -> None:
    with pretended_device() as to_host:
        x = torch.arange(3.0).to(PRETENDED)
        assert isinstance(x + 1, OnDevice)
        assert (x * 2).cpu().tolist() == [0.0, 2.0, 4.0]
        assert float(x.sum()) == 3.0
        assert sum(to_host.values()) == 2
        with pytest.raises(MixedDevices, match=r"device .3,., cpu .3,."):
            x + torch.ones(3)
        with pytest.raises(MixedDevices):
            torch.cat([x, torch.ones(3)])
        with pytest.raises(MixedDevices, match="numpy"):
            x.numpy()


PLAIN = {"max_new_tokens": 6, "seed": 3, "ignore_eos": True}
CALLS = {
    "llama": ("llama", PLAIN, {}),
    "qwen2": ("qwen2", PLAIN, {}),
    "qwen3": ("qwen3", PLAIN, {}),
    "filters": ("llama", {**PLAIN, "top_k": 20, "top_p": 0.9, "min_p": 0.01}, {}),
    "greedy": ("llama", {**PLAIN, "temperature": 0.0}, {}),
    "short_of_memory": ("llama", {**PLAIN, "max_new_tokens": 24}, {"kv_budget_gb": 0.00004}),
    "narrow_cache": ("llama", PLAIN, {"kv_dtype": "bf16"}),
    "chunks": ("llama", PLAIN, {"max_batch_tokens": 12}),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_engine_call_keeps_to_its_device_and_draws_the_same_tokens(name: str, tiny_model) -> None:
    family, params, options = CALLS[name]
    options = {"kv_budget_gb": 0.01, "speculation": "off", **options}
    sizes, params = [3, 2, 4], SamplingParams(**params)

    def tokens(model: torch.nn.Module) -> tuple[list[list[int]], int]:
        engine = RolloutEngine(model, **options)
        groups = engine.generate(PROMPTS, sizes, params)
        assert options["kv_budget_gb"] > 0.001 or engine.stats.num_preemptions > 0
        return [c.token_ids for group in groups for c in group.completions], engine.stats.num_steps

    with ops.use_backend("torch"):
        wanted, _ = tokens(tiny_model(family))
    with pretended_device() as to_host:
        found, num_steps = tokens(to_device(tiny_model(family)).requires_grad_(False))
    assert found == wanted
    assert 0 < to_host["aten._to_copy.default"] <= num_steps, "more than one copy to the host per step"


def test_arrays_are_uploaded_in_one_copy() -> None:
    arrays = [
        np.arange(3),
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, 1:],
        np.empty(0),
        np.ones((2, 1), np.float32),
    ]
    with pretended_device() as to_host:
        found = [tensor.cpu() for tensor in uploaded(arrays, PRETENDED)]
    assert to_host.total() == len(arrays)
    for tensor, array in zip(found, arrays, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array.copy()))
        assert tensor.dtype == torch.from_numpy(array).dtype


UPDATES = {
    "grpo": {"algo": {"name": "grpo"}},
    "dapo_split_in_micro_batches": {"algo": {"name": "dapo"}, "update": {"micro_batch_tokens": 60}},
    "gspo": {"algo": {"name": "gspo"}},
    "reference_and_entropy": {"algo": {"name": "grpo", "kl_beta": 0.1, "entropy_coef": 0.01}},
    "recomputed": {"algo": {"name": "grpo"}, "update": {"old_logprobs": "recompute", "checkpoint_activations": True}},
}


def _updated(
    make_model: Callable[[], torch.nn.Module], reference: torch.nn.Module | None, options: dict, steps: int = 2
) -> list[torch.Tensor]:
    """The parameters after one update and one more, in between a new model and optimizer as a resumed run has them."""
    config = TrainConfig.from_dict(
        {"model": {"path": "none"}, "task": {"name": "addition"}, "optimizer": {"learning_rate": 1e-2}, **options},
        where="the test",
    )
    weights: list[torch.Tensor] = []
    state: dict[str, torch.Tensor] = {}
    for step in range(1, steps + 1):
        model = make_model()
        with torch.no_grad():
            for parameter, saved in zip(model.parameters(), weights, strict=False):
                parameter.copy_(saved)
        optimizer = PolicyOptimizer(model, config.optimizer)
        if step == 2:
            optimizer.load_state_tensors(state, 1)
        updater = PolicyUpdater(
            model, reference, optimizer, config.algorithm, config.update, max_length=16, temperature=1.0, seed=0
        )
        result = updater.update(step, made_up_groups(PROMPTS, 3, growth=3))
        assert result.num_updates == 1
        assert result.metrics.means()["num_tokens"] > 0
        state = {name: tensor.cpu().clone() for name, tensor in optimizer.state_tensors().items()}
        weights = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    return weights


@pytest.mark.parametrize(("name", "dtype"), [*((name, "fp32") for name in UPDATES), ("grpo", "bf16")])
def test_an_update_keeps_to_its_device_and_resumes_there(name: str, dtype: str, tiny_model) -> None:
    def make() -> torch.nn.Module:
        return tiny_model("qwen3", dtype=dtype)

    with ops.use_backend("torch"):
        wanted = _updated(make, make().requires_grad_(False), UPDATES[name])
    with pretended_device():
        found = _updated(lambda: to_device(make()), to_device(make()).requires_grad_(False), UPDATES[name])
    for one, other in zip(found, wanted, strict=True):  # sums of another order, which Adam's first steps magnify
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-3, atol=2e-3 if dtype == "fp32" else 1e-2)


def test_adapters_keep_to_the_device(tiny_model, tmp_path: Path) -> None:
    save_model(tiny_model("llama"), tmp_path)
    with pretended_device():
        model = to_device(tiny_model("llama"))
        adapters = lora.attach(model, tmp_path, lora.LoraSpec(2, 4.0, 0.0, ("q_proj", "down_proj"), False), 0)
        adapters.merge()
        RolloutEngine(model, kv_budget_gb=0.01).generate(PROMPTS, 2, replace(SamplingParams(), max_new_tokens=3))
        _updated(lambda: model, None, {"algo": {"name": "grpo"}}, steps=1)
