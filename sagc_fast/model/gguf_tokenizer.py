"""A Hugging Face fast tokenizer from the vocabulary, merges and pre-tokenizer name in a GGUF file.

A GGUF file names its pre-tokenizer instead of describing it; PRE_TOKENIZERS holds the descriptions of those this
package knows. All are byte-level BPE (``tokenizer.ggml.model`` is ``gpt2``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagc_fast.errors import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from sagc_fast.model.gguf import GGUFMetadata

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "qwen2": _WORDS.format(digits=""),
    "llama-bpe": _WORDS.format(digits="{1,3}"),
}
"""Pre-tokenizer name -> pattern of its words; None is GPT-2's, built into the library."""
_CONTROL, _USER_DEFINED = 3, 4
"""``tokenizer.ggml.token_type`` of special and of added ordinary tokens."""


def write_tokenizer(metadata: GGUFMetadata, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into ``folder``. Raises ModelLoadError for an unknown kind."""
    tokens = metadata.get_global("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError(
            f"{metadata.path} has no tokenizer (tokenizer.ggml.tokens); use another file of the model."
        )
    _tokenizer(metadata, tokens).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.get("context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get_global("tokenizer.chat_template"),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = metadata.get_global(f"tokenizer.ggml.{theirs}_token_id")
        config[f"{ours}_token"] = None if token_id is None else tokens[token_id]
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _tokenizer(metadata: GGUFMetadata, tokens: list[str]) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = metadata.get_global("tokenizer.ggml.model")
    name = metadata.get_global("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or name not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{metadata.path} has a tokenizer of model {kind!r} with pre-tokenizer {name!r}; supported is model 'gpt2' "
            f"with {', '.join(PRE_TOKENIZERS)}."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get_global("tokenizer.ggml.merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name == "llama-bpe"))
    pattern = PRE_TOKENIZERS[name]
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    if name == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get_global("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, y in zip(tokens, types, strict=False) if y == _CONTROL]
    )
    tokenizer.add_tokens(
        [
            AddedToken(t, special=False, normalized=False)
            for t, y in zip(tokens, types, strict=False)
            if y == _USER_DEFINED
        ]
    )
    _prepend_bos(tokenizer, metadata, tokens, default=name == "llama-bpe")
    return tokenizer


def _prepend_bos(tokenizer: Tokenizer, metadata: GGUFMetadata, tokens: list[str], default: bool) -> None:
    """Encoding starts with the beginning-of-sequence token where the file (or its pre-tokenizer's custom) says so."""
    from tokenizers import processors

    bos = metadata.get_global("tokenizer.ggml.bos_token_id")
    if bos is None or not metadata.get_global("tokenizer.ggml.add_bos_token", default):
        return
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{tokens[bos]} $A",
                pair=f"{tokens[bos]} $A {tokens[bos]}:1 $B:1",
                special_tokens=[(tokens[bos], bos)],
            ),
        ]
    )
