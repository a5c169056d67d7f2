"""Compare our fp32 logits with transformers' on a model folder; ends with one JSON line.

usage: python bench/check_smollm2.py [models/SmolLM2-135M-Instruct] [--gguf FILE]

With --gguf the other side is transformers' own reading of that file, which checks the conversion as well.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sagc_fast.model.loader import load_model, load_tokenizer

TOLERANCE = 1e-4
TEXTS = (
    "The capital of France is Paris. 12345 + 678 = 13023, isn't it?\n\n  def f(x):\n\treturn x ** 2  # naïve café",
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was a very small language model. " * 20,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--gguf", metavar="FILE")
    args = parser.parse_args()
    source = {"gguf_file": Path(args.gguf).name} if args.gguf else {}
    their_folder = Path(args.gguf).parent if args.gguf else args.folder
    theirs = AutoModelForCausalLM.from_pretrained(their_folder, dtype=torch.float32, **source).eval()
    their_tokenizer = AutoTokenizer.from_pretrained(their_folder, **source)
    ours, tokenizer = load_model(args.folder), load_tokenizer(args.folder)
    worst, same_ids = 0.0, True
    for text in TEXTS:
        ids = tokenizer.encode(text)
        same_ids &= ids == their_tokenizer.encode(text) and tokenizer.decode(ids) == text
        with torch.inference_mode():
            expected = theirs(torch.tensor([ids])).logits[0]
            worst = max(worst, float((ours.forward_dense(torch.tensor(ids)) - expected).abs().max()))
    passed = worst <= TOLERANCE and same_ids
    print(json.dumps({"max_logit_difference": worst, "same_token_ids": same_ids, "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
