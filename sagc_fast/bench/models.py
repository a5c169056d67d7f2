"""The models that benchmarks run on: two shapes with random weights, made once, and any folder of the user's.

Speed does not depend on what the weights say, as lengths are forced. The folders are Hugging Face ones, so that every
peer reads the same files.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagc_fast.bench.workload import END_ID, Workload
from sagc_fast.errors import ConfigError, ModelLoadError

SHAPES: dict[str, dict[str, Any]] = {
    # 8.3M parameters: what fits into caches; dispatch and attention show.
    "S": {
        "family": "llama", "vocab_size": 4096, "hidden_size": 288, "intermediate_size": 768, "num_layers": 6,
        "num_heads": 6, "num_kv_heads": 6, "head_dim": 48, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "eos_token_ids": (2,), "pad_token_id": 3,
    },
    # The shape of Qwen2.5-0.5B: reading the weights shows.
    "M": {
        "family": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_layers": 24,
        "num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "has_qkv_bias": True, "eos_token_ids": (2,), "pad_token_id": 3,
    },
}  # fmt: skip
FETCHED = {"smollm2": "models/SmolLM2-135M-Instruct"}
"""Names of models that `sagc-fast fetch NAME` brings."""
WORKLOADS = {
    "S": Workload(),
    "smollm2": Workload(),
    "M": Workload(mean_length=32.0, max_length=128),
}
"""Other folders take S's."""
QUICK = Workload(num_prompts=4, group_size=4, mean_length=16.0, max_length=48)


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths of a model, read from its configuration, and what a step of it costs."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int

    @property
    def weight_elements(self) -> int:
        """Elements that a step reads: every matrix and the head; of the embedding table it takes a few rows."""
        return sum(n * k * count for (n, k), count in self.products())

    def products(self) -> list[tuple[tuple[int, int], int]]:
        """((N, K), count) of the dense products of a forward pass, head included."""
        query, pair = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        per_layer = ((query + pair, self.width), (self.width, query), (2 * self.hidden, self.width))
        shapes = [(shape, self.layers) for shape in (*per_layer, (self.width, self.hidden))]
        return [*shapes, ((self.vocab, self.width), 1)]

    def layer_flops_per_token(self) -> float:
        """Dense products of one token through the layers, head apart."""
        return sum(2.0 * n * k * count for (n, k), count in self.products()[:-1])

    def head_flops_per_row(self) -> float:
        return 2.0 * self.vocab * self.width

    def attention_flops(self, contexts: float) -> float:
        """Scores and weighted sums; ``contexts`` is the number of (query token, position) pairs."""
        return 4.0 * contexts * self.layers * self.heads * self.head_dim


def shape_of(folder: Path) -> Shape:
    """Raises ModelLoadError for a folder that is no model."""
    from sagc_fast.model.loader import load_config

    c = load_config(folder)
    return Shape(
        c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size, c.vocab_size
    )


def cache_folder() -> Path:
    """Where made models and exports are kept: ``SAGC_BENCH_CACHE``, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SAGC_BENCH_CACHE") or Path(base) / "sagc_fast" / "bench")


def model_folder(name: str, dtype: str) -> Path:
    """Folder for ``S``, ``M``, ``smollm2`` or a path. Shapes are made on first use, in the dtype asked for."""
    if name in SHAPES:
        return _made(name, dtype)
    folder = Path(FETCHED.get(name, name))
    if not (folder / "config.json").exists():
        remedy = f"run `sagc-fast fetch {name}` first" if name in FETCHED else "give S, M, smollm2 or a model folder"
        raise ModelLoadError(f"--model {name}: {folder} holds no config.json; {remedy}.")
    vocab = json.loads((folder / "config.json").read_text()).get("vocab_size", 0)
    if not isinstance(vocab, int) or vocab < END_ID:
        raise ConfigError(f"--model {name} has a vocabulary of {vocab}; the workload's prompts need {END_ID:,} ids.")
    return folder


def _made(name: str, dtype: str) -> Path:
    """Written beside its place and renamed, so that an interrupted write never looks like a model."""
    from sagc_fast.model.config import ModelConfig
    from sagc_fast.model.loader import random_model, save_model

    folder = cache_folder() / f"{name}-{dtype}"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_model(random_model(ModelConfig(**SHAPES[name]), seed=0, dtype=dtype), aside)
        aside.chmod(0o755)
        aside.rename(folder)
    except OSError as error:
        if not (folder / "config.json").exists():  # another process may have been faster
            raise ModelLoadError(f"The benchmark's model {folder} could not be written: {error}.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder
