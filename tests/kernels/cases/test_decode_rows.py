"""Decode rows on the device: the Triton kernels against plain torch, and a burst of the engine through both."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from sagc_fast import RolloutEngine, SamplingParams, ops
from sagc_fast.ops import DecodeRows, decode_rows
from sagc_fast.rollout.decode_graphs import DecodeGraphs
from sagc_fast.rollout.device import CudaDevice
from sagc_fast.rollout.stand_in_device import StandInDevice

PAGE = 4


def moved(rows: DecodeRows, device: torch.device) -> DecodeRows:
    return replace(rows, **{field.name: getattr(rows, field.name).clone().to(device) for field in fields(rows)})


def assert_equal(found: DecodeRows, wanted: DecodeRows) -> None:
    for field in fields(DecodeRows):
        torch.testing.assert_close(
            getattr(found, field.name).cpu(), getattr(wanted, field.name), rtol=0, atol=0, equal_nan=True,
            msg=lambda text, name=field.name: f"{name}: {text}",
        )  # fmt: skip


@pytest.mark.parametrize("num_rows", [1, 8, 64, 131])
def test_rows_move_as_in_plain_torch(num_rows: int, device: torch.device, random_decode_rows) -> None:
    wanted = random_decode_rows(num_rows, PAGE)
    found = moved(wanted, device)
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        tokens = torch.randint(0, 8, (num_rows,), generator=generator)
        logprobs = torch.randn(num_rows, generator=generator)
        logprobs[::17] = float("nan")
        decode_rows.place_rows(wanted, PAGE, scratch_slot=1000)
        decode_rows.advance_rows(wanted, tokens, logprobs)
        with ops.use_backend("triton"):
            ops.place_rows(found, PAGE, scratch_slot=1000)
            ops.advance_rows(found, tokens.to(device), logprobs.to(device))
        assert_equal(found, wanted)


def test_a_captured_burst_draws_the_tokens_of_plain_torch(tiny_model, device: torch.device, monkeypatch) -> None:
    """On a GPU a CUDA graph; here the stand-in's, with every interpreted launch on its tape."""
    stand_in = StandInDevice("late")
    if device.type == "cpu":
        from triton.runtime.interpreter import InterpretedFunction

        launch = InterpretedFunction.run
        monkeypatch.setattr(
            InterpretedFunction, "run", lambda *args, **kwargs: stand_in.launch(launch, *args, **kwargs)
        )
    prompts, params = [list(range(17)), [5]], SamplingParams(max_new_tokens=3, seed=3, ignore_eos=True)

    def tokens(backend: str) -> list[list[int]]:
        with ops.use_backend(backend):
            engine = RolloutEngine(tiny_model("qwen3", num_layers=1).to(device), kv_budget_gb=0.001, speculation="off")
            if backend == "triton":
                engine._graphs = DecodeGraphs(stand_in if device.type == "cpu" else CudaDevice(device))
            groups = engine.generate(prompts, group_size=[2, 1], params=params)
        assert (engine.stats.num_graph_replays > 0) == (backend == "triton")
        return [completion.token_ids for group in groups for completion in group.completions]

    assert tokens("triton") == tokens("torch")
