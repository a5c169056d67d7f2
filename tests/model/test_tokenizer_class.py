"""Loading a tokenizer without its model's configuration class gives the very tokenizer that transformers gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from sagc_fast.model.loader import load_tokenizer

TEXT = "def add(a, b):\n    return a + b  # 12 + 34 = 46, \u00e9t\u00e9"
CLASSES = ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer", None)


def tokenizer_folder(folder: Path, model_type: str, name: str | None) -> Path:
    """A byte-level vocabulary of 300 and the two configurations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 512}))
    named = {"eos_token": "<|endoftext|>"} | ({"tokenizer_class": name} if name else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", CLASSES)
def test_the_tokenizer_is_that_of_transformers(tmp_path: Path, model_type: str, name: str | None) -> None:
    folder = tokenizer_folder(tmp_path, model_type, name)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert ours.special_tokens_map == theirs.special_tokens_map


def test_a_named_class_brings_no_configuration_class_into_memory(tmp_path: Path) -> None:
    """Nor sympy, which comes with one; in transformers 5.17 AutoTokenizer's own import brings that already."""
    folder = tokenizer_folder(tmp_path, "llama", "PreTrainedTokenizerFast")
    program = (
        "import sys; from transformers import AutoTokenizer; has_sympy = 'sympy' in sys.modules; "
        "from sagc_fast.model.loader import load_tokenizer; load_tokenizer(sys.argv[1]); "
        "print('transformers.models.llama.configuration_llama' in sys.modules, 'sympy' in sys.modules, has_sympy)"
    )
    output = subprocess.run([sys.executable, "-c", program, str(folder)], check=True, capture_output=True, text=True)
    has_configuration, has_sympy, had_sympy = output.stdout.split()
    assert has_configuration == "False"
    assert has_sympy == had_sympy
