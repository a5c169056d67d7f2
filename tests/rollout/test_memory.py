"""Memory seen from outside: the peak of a process of its own, and what release() gives back."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json
import torch
from sagc_fast import RolloutEngine, SamplingParams
from sagc_fast.model.config import ModelConfig
from sagc_fast.model.loader import random_model

def resident_mb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024

torch.set_num_threads(1)
config = ModelConfig(
    family="llama", vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=8, num_kv_heads=8,
    head_dim=128, max_position_embeddings=2048, eos_token_ids=(),
)
engine = RolloutEngine(random_model(config, seed=0), threads=1, max_batch_tokens=512)
params = SamplingParams(max_new_tokens=2)
engine.generate([[1, 2, 3]], 2, params)  # what torch and the engine keep for good
engine.release()
figures = {"before": resident_mb()}
prompts = [[index % 64, index // 64] + [7] * 1022 for index in range(8)]
first = engine.generate(prompts, 1, params)
figures["cache"] = engine.stats.kv_blocks_peak * engine.bytes_per_block() / 2**20
figures["during"] = resident_mb()
engine.release()
figures["after"] = resident_mb()
again = engine.generate(prompts, 1, params)
figures["is_same"] = [g.completions for g in first] == [g.completions for g in again]
print(json.dumps(figures))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_release_returns_the_memory_to_the_system() -> None:
    output = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    figures = json.loads(output)
    assert figures["cache"] > 120
    assert figures["during"] - figures["before"] > 0.9 * figures["cache"]
    assert figures["during"] - figures["after"] > 0.9 * figures["cache"]
    assert figures["is_same"]


PEAK_PROGRAM = """
import json, sys
import torch
from sagc_fast import RolloutEngine, SamplingParams
from sagc_fast.model.config import ModelConfig
from sagc_fast.model.loader import random_model

torch.set_num_threads(1)
config = ModelConfig(
    family="llama", vocab_size=4096, hidden_size=288, intermediate_size=768, num_layers=6, num_heads=6, num_kv_heads=6,
    head_dim=48, max_position_embeddings=2048, eos_token_ids=(),
)
model = random_model(config, seed=0, dtype=sys.argv[1])
engine = RolloutEngine(model, threads=1, kv_budget_gb=0.05, max_batch_tokens=1024)
prompts = [[index] + [7] * 499 for index in range(12)]
engine.generate(prompts, 4, SamplingParams(max_new_tokens=40, ignore_eos=True))
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024
weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
used = engine.stats.kv_blocks_peak * engine.bytes_per_block()
print(json.dumps({"peak": peak, "weights": weights, "kv_used": used, "preemptions": engine.stats.num_preemptions}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_peak_is_weights_and_the_kv_budget_and_300_mb(dtype: str) -> None:
    command = [sys.executable, "-c", PEAK_PROGRAM, dtype]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    budget = 50e6
    print(dtype, {name: round(value / 1e6, 1) for name, value in figures.items()})
    assert 0.8 * budget < figures["kv_used"] <= budget
    assert figures["peak"] <= figures["weights"] + budget + 300e6
