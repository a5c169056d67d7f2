"""How far decode, prefill, other batches and the trainer differ in log-probs, and what a narrower KV cache would cost.

    python bench/bench_parity.py models/SmolLM2-135M-Instruct [--tokens 1024]

The text is this repository's documentation and sums. One to two minutes on one thread; the last line is JSON. Tables:
docs/rollout.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from sagc_fast.bench.parity import KV_FORMATS, kv_deviation, ladder
from sagc_fast.model.loader import load_model, load_tokenizer

DOCUMENTS = Path(__file__).parents[1] / "docs"
PATHS = {"fp32": ("fp32", "fp32"), "bf16": ("bf16", "bf16"), "fp32, KV fp16": ("fp32", "fp16"),
         "fp32, KV bf16": ("fp32", "bf16")}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=1024, help="length of the text for the KV formats (1024)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(args.folder)
    prose = (DOCUMENTS / "algorithms.md").read_text(encoding="utf-8")
    sums = " ".join(f"{a}+{b}={a + b}." for a, b in zip(range(17, 900, 37), range(940, 10, -29), strict=False))
    half = args.tokens // 2
    text = [*tokenizer.encode(prose)[:half], *tokenizer.encode(sums)[: args.tokens - half]]
    prompts = [text[start : start + length] for start, length in ((0, 90), (200, 33), (half, 16))]
    result: dict[str, dict] = {"ladder": {}, "kv": {}}
    for name, (dtype, kv_dtype) in PATHS.items():
        found = result["ladder"][name] = ladder(load_model(args.folder, dtype), prompts, kv_dtype)
        print(f"{name:14}", ", ".join(f"{other} {value:.1e}" for other, value in found.items()), flush=True)
    model = load_model(args.folder, "fp32")
    for name, (rounded, share) in KV_FORMATS.items():
        found = result["kv"][name] = kv_deviation(model, text, rounded)
        print(f"{name:38} {share}", ", ".join(f"{key} {value:.1e}" for key, value in found.items()), flush=True)
    print(json.dumps({"bench": "parity", "tokens": len(text), **result}))


if __name__ == "__main__":
    main()
