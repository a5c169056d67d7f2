"""Memory seen from outside: the peak of a process of its own, and what release() gives back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sagc_fast import ops
from sagc_fast.ops.backend import native_module

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

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024

imported = peak()
torch.set_num_threads(1)
dtype, shape, prompts, group_size, length = sys.argv[1], *map(json.loads, sys.argv[2:])
model = random_model(ModelConfig(family="llama", max_position_embeddings=2048, eos_token_ids=(), **shape), 0, dtype)
engine = RolloutEngine(model, threads=1, kv_budget_gb=0.05, max_batch_tokens=1024)
params = SamplingParams(max_new_tokens=length, ignore_eos=True)
engine.generate([[index] + [7] * 499 for index in range(prompts)], group_size, params)
weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
used = engine.stats.kv_blocks_peak * engine.bytes_per_block()
figures = {"peak": peak(), "imported": imported, "weights": weights, "kv_used": used}
print(json.dumps(figures | {"preemptions": engine.stats.num_preemptions}))
"""
SHAPES = {
    # 8M parameters, 48 completions that fill the budget.
    "model S": (
        {"vocab_size": 4096, "hidden_size": 288, "intermediate_size": 768, "num_layers": 6, "num_heads": 6,
         "num_kv_heads": 6, "head_dim": 48},
        12, 4, 40,
    ),
    # The vocabulary of Qwen2.5 and 128 rows that fork at once: the logits and the copies of blocks show.
    "wide vocabulary": (
        {"vocab_size": 151_936, "hidden_size": 192, "intermediate_size": 512, "num_layers": 8, "num_heads": 4,
         "num_kv_heads": 4, "head_dim": 48, "tie_word_embeddings": True},
        4, 32, 2,
    ),
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(("shape", "dtype"), [("model S", "fp32"), ("model S", "bf16"), ("wide vocabulary", "fp32")])
def test_the_peak_is_weights_and_the_kv_budget_and_300_mb(shape: str, dtype: str) -> None:
    """300 MB with torch's CPU build, whose import takes 230 of them; that of a CUDA build takes 510 by itself.

    Plain torch may take 100 MB more: it holds fp32 logits (32 MB) and the temporaries of every operation, and in bf16
    oneDNN keeps a kernel for each number of rows (23 MB, by the peak with ONEDNN_PRIMITIVE_CACHE_CAPACITY=0)."""
    command = [sys.executable, "-c", PEAK_PROGRAM, dtype, *map(json.dumps, SHAPES[shape])]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    has_decoder = native_module() is not None and ops.has_decoder("cpu", torch.float32, torch.float32)
    temporaries = 0 if has_decoder else 100e6
    budget = 50e6
    print(shape, dtype, {name: round(value / 1e6, 1) for name, value in figures.items()})
    assert 0.6 * budget < figures["kv_used"] <= budget
    assert figures["peak"] <= figures["weights"] + budget + temporaries + max(300e6, figures["imported"] + 70e6)


TOKENIZER_PROGRAM = """
import ctypes, itertools, json, string, sys
from pathlib import Path
from sagc_fast.model.loader import load_tokenizer

folder = Path(sys.argv[1])
texts = list(string.ascii_lowercase)
merges = [(a, b) for a, b in itertools.product(texts, texts)]
merges += [(a + b, c) for (a, b), c in itertools.product(merges, texts)]
merges += [(a + b, c) for (a, b), c in itertools.product(merges[676:1876], texts)]
texts += [a + b for a, b in merges]
model = {"type": "BPE", "vocab": {text: index for index, text in enumerate(texts)}, "merges": merges}
(folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
(folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
del texts, merges, model
libc = ctypes.CDLL(None)
libc.malloc_trim(0)  # what making the vocabulary left behind

def resident_mb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024

tokenizer = load_tokenizer(folder)
before = resident_mb()
libc.malloc_trim(0)
print(len(tokenizer), before - resident_mb())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_loaded_tokenizer_leaves_no_freed_memory_behind(tmp_path: Path) -> None:
    """What stays is part of the peak of every rollout of this process."""
    command = [sys.executable, "-c", TOKENIZER_PROGRAM, str(tmp_path)]
    size, returned_mb = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(size) == 26 + 26**2 + 26**3 + 1200 * 26
    assert float(returned_mb) < 5
