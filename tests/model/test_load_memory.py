"""Loading holds the weights once. In a process of its own, since a peak is never taken back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sagc_fast.model.config import ModelConfig
from sagc_fast.model.loader import random_model, save_model

LOAD = """
import sys
import torch
from sagc_fast.model.loader import load_model

def peak_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

load_model(sys.argv[2])
before = peak_bytes()
model = load_model(sys.argv[1])
print(peak_bytes() - before, sum(p.nbytes for p in model.parameters()))
"""


def config(vocab_size: int, hidden_size: int) -> ModelConfig:
    return ModelConfig.from_hf_dict(
        {
            "model_type": "llama", "vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 2048,
            "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
            "rope_theta": 1e4, "max_position_embeddings": 128, "tie_word_embeddings": True, "hidden_act": "silu",
        }
    )  # fmt: skip


def test_the_peak_of_loading_is_the_model_and_one_tensor(tmp_path: Path) -> None:
    """The mapped file used to count a second time: all of its pages stayed until the last tensor was read."""
    for name, made in (("small", config(64, 64)), ("large", config(8192, 512))):
        save_model(random_model(made), tmp_path / name)
    arguments = [sys.executable, "-c", LOAD, str(tmp_path / "large"), str(tmp_path / "small")]
    answer = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    grown, weights = map(int, answer.split())
    assert weights > 100e6
    assert grown < 1.3 * weights
