"""Several processes train like one: same completions, same loss and gradient, one run directory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_update import captured_gradient, scored_groups
from train_tiny import tiny_values

from sagc_fast.config import TrainConfig
from sagc_fast.model.loader import load_model
from sagc_fast.train.distributed import Processes, connected, local_device
from sagc_fast.train.trainer import Trainer

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}


def torchrun(config: Path) -> str:
    """Train with two processes as a user does; what they wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "sagc_fast"]
    train = ["train", "--config", str(config)]
    result = subprocess.run([*command, *train], capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def in_two_processes(call: Callable[[], None]) -> None:
    """``call`` in two processes as torchrun starts them, forked from this one, which has imported everything."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                os.environ.update(address, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
                torch.set_num_threads(1)  # the parent's OpenMP threads have not come along, and would be waited for
                call()
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]


def forked(config: TrainConfig, **options: bool) -> None:
    in_two_processes(lambda: Trainer(config, **options).fit())


def records(run_dir: Path, event: str = "step") -> list[dict]:
    lines = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def test_two_processes_do_what_one_does(policy, tmp_path):
    """KL to a reference, recomputed log-probs, minibatches, dynamic sampling and a group size per step, all at once."""
    sections = {
        "algo": {"name": "dapo", "kl_beta": 0.05, "max_refill_factor": 2},
        "update": {"old_logprobs": "recompute", "num_minibatches": 2, "micro_batch_tokens": 64},
        "rollout": {"prompts_per_step": 5},
        "controller": {"candidates": [16, 20]},
        "checkpoint": {"every": 0, "keep_best": False},
        "steps": 2,
    }
    one, two = (tiny_values(policy, tmp_path / name, **sections) for name in ("one", "two"))
    Trainer(TrainConfig.from_dict(one)).fit()
    config = tmp_path / "two.yaml"
    config.write_text(json.dumps(two))
    out = torchrun(config)
    assert out.count("done; for a page") == 1, "one process speaks"

    same = (
        "group_size", "reward_mean", "outcome_mean", "length_mean", "num_groups_kept", "num_groups_sampled",
        "num_output_tokens", "straggler_rate", "clipped_ratio", "is_skipped",
    )  # fmt: skip
    close = ("loss", "grad_norm", "kl", "entropy", "logprob_diff_mean", "logprob_diff_max", "clip_high_fraction")
    first = [records(tmp_path / name)[0] for name in ("one", "two")]
    assert {k: first[0][k] for k in same} == {k: first[1][k] for k in same}
    assert first[0]["num_groups_kept"] > 1
    for name in close:
        assert first[1][name] == pytest.approx(first[0][name], rel=2e-4, abs=2e-6), name
    lengths = [json.loads((tmp_path / n / "lengths.jsonl").read_text().splitlines()[0]) for n in ("one", "two")]
    assert lengths[0] == lengths[1], "the completions are the same whoever samples them"
    assert records(tmp_path / "one", "eval")[0]["accuracy"] == records(tmp_path / "two", "eval")[0]["accuracy"]
    weights = [load_file(tmp_path / n / "checkpoints" / "step-000002" / "model.safetensors") for n in ("one", "two")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-3, atol=1e-3)


ALGORITHMS = (
    {"name": "grpo", "kl_beta": 0.1, "entropy_coef": 0.01},
    {"name": "dapo"},
    {"name": "gspo"},
    {"name": "cispo", "mask_truncated": True},
    {"name": "reinforce_pp"},
)


def test_loss_and_gradient_of_two_processes_are_those_of_one(policy, tmp_path):
    """To the rounding of fp32 sums in another order: 1e-6 of the gradient's norm, whatever the token budget."""
    groups = scored_groups(load_model(policy))

    def measure(processes: Processes) -> list[tuple[float, torch.Tensor]]:
        found = []
        for algorithm in ALGORITHMS:
            for budget in (4096, 16):
                gradient, result = captured_gradient(
                    policy, groups, algorithm, processes=processes, micro_batch_tokens=budget
                )
                found.append((result.losses[0], torch.cat([g.flatten().double() for g in gradient.values()])))
        return found

    def save() -> None:
        with connected("cpu") as processes:
            torch.save(measure(processes), tmp_path / f"{processes.rank}.pt")

    in_two_processes(save)
    alone = measure(Processes())
    both = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for place, (loss, gradient) in enumerate(alone):
        whole = alone[place // 2 * 2]
        for other_loss, other in (both[0][place], whole):
            assert other_loss == pytest.approx(loss, rel=1e-6, abs=1e-7)
            assert (other - gradient).norm() < 1e-6 * gradient.norm()
        assert torch.equal(both[0][place][1], both[1][place][1]), "the same bits in both"


def test_a_signal_to_one_of_two_processes_leaves_one_checkpoint(policy, tmp_path):
    """As a scheduler stops a job: whichever process is told, both end with status 0 after the step, rank 0 writes."""
    values = tiny_values(
        policy, tmp_path / "run", steps=10_000, evaluation={"num_problems": 0},
        checkpoint={"every": 0, "keep_best": False},
    )  # fmt: skip
    config = TrainConfig.from_dict(values)

    def train() -> None:
        trainer = Trainer(config)
        if os.environ["RANK"] == "1":
            step = trainer._train_step

            def interrupted() -> None:
                step()
                if trainer.state.step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)

            trainer._train_step = interrupted
        summary = trainer.fit()
        assert summary["is_interrupted"]
        assert summary["steps"] == 2
        assert summary["resume_command"].startswith("torchrun --nproc-per-node=2 -m sagc_fast train --resume")

    in_two_processes(train)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2]


def test_two_processes_resume_to_the_bit(policy, tmp_path):
    values = tiny_values(policy, tmp_path / "straight", rollout={"prompts_per_step": 3}, algo={"name": "grpo"})
    straight = TrainConfig.from_dict(values)
    forked(straight)
    broken = straight.with_overrides([f"run_dir={tmp_path / 'broken'}"])
    forked(broken.with_overrides(["steps=2", "evaluation.every=2"]))
    forked(broken, resume=True)
    last = [tmp_path / name / "checkpoints" / "step-000004" for name in ("straight", "broken")]
    for file in ("model.safetensors", "optimizer.safetensors", "length_history.json", "length_history-1.json"):
        assert (last[0] / file).read_bytes() == (last[1] / file).read_bytes(), file


def test_shares_are_dealt_and_collected_in_order():
    for size in (1, 2, 3):
        for count in (0, 1, 2, 5, 6):
            processes = [Processes(rank, size) for rank in range(size)]
            shares = [[10 * i for i in p.share(count)] for p in processes]
            assert processes[0].dealt(shares) == [10 * i for i in range(count)]


def test_a_lone_process_talks_to_nobody():
    alone = Processes()
    tensor = torch.ones(2)
    alone.sum_([tensor])
    assert alone.gather(3) == [3]
    assert alone.from_first("x") == "x"
    assert alone.is_first
    assert tensor.tolist() == [1, 1]
    assert local_device("cpu") == "cpu"
