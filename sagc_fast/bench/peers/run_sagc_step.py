"""One GRPO step of this package: groups of forced lengths, rewards from the ids, one update in place."""

from __future__ import annotations

import time
from typing import Any

from peer_worker import Run, serve
from phases import timed


def load(settings: dict[str, Any]) -> Run:
    import torch

    from sagc_fast import RolloutEngine, SamplingParams, TrainConfig
    from sagc_fast.tasks.base import Problem, Score
    from sagc_fast.train import update
    from sagc_fast.train.optimizer import PolicyOptimizer
    from sagc_fast.train.sampling import ScoredGroup

    torch.set_num_threads(settings["threads"])
    engine = RolloutEngine.from_pretrained(
        settings["model"], dtype=settings.get("dtype", "fp32"), threads=settings["threads"]
    )
    config = TrainConfig.from_dict(
        {
            "model": {"path": settings["model"]},
            "task": {"name": "addition"},
            "algo": {"name": "grpo"},
            "optimizer": {"learning_rate": settings["learning_rate"], "warmup_steps": 0},
        },
        where="bench step",
    )
    optimizer = PolicyOptimizer(engine.model, config.optimizer)
    updater = update.PolicyUpdater(
        engine.model, None, optimizer, config.algorithm, config.update,
        max_length=settings["max_length"], temperature=1.0, seed=0,
    )  # fmt: skip
    step, seconds = 0, {}
    updater._hidden = timed(updater._hidden, seconds, "forward")
    update.linear_policy_loss = timed(update.linear_policy_loss, seconds, "forward")
    torch.Tensor.backward = timed(torch.Tensor.backward, seconds, "backward")
    optimizer.step = timed(optimizer.step, seconds, "optimizer")

    def run(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal step
        step += 1
        seconds.clear()
        last = time.process_time()
        params = [
            [SamplingParams(max_new_tokens=length, ignore_eos=True, seed=request["seed"]) for length in group]
            for group in request["lengths"]
        ]
        groups = engine.generate(request["prompts"], [len(group) for group in request["lengths"]], params)
        seconds["rollout"], last = time.process_time() - last, time.process_time()
        scored = [
            ScoredGroup(g, Problem(prompt=""), [Score(sum(c.token_ids) % 17 / 17, False) for c in g.completions])
            for g in groups
        ]
        result = updater.update(step, scored)
        if result.num_updates != 1:
            raise RuntimeError(f"the update was skipped: {result}")
        engine.reset()
        seconds["update"] = time.process_time() - last
        return {
            "lengths": [group.lengths for group in groups],
            "output_tokens": sum(map(sum, request["lengths"])),
            "update_tokens": result.num_tokens,
            "seconds": dict(seconds),
        }

    return run


if __name__ == "__main__":
    serve(load, ("sagc_fast", "torch"))
