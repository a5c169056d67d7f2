"""Model folders in Hugging Face's layout, in and out; random models for tests and for training from nothing."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sagc_fast.errors import BackendError, ConfigError, ModelLoadError
from sagc_fast.model.config import ModelConfig, as_token_ids
from sagc_fast.model.transformer import Transformer
from sagc_fast.model.weights import WeightSlot, weight_slots

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 4 * 2**30
"""Weights beyond this are written as several files."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
COMPANION_FILES = (
    *TOKENIZER_FILES,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What :func:`save_model` copies from its ``source`` folder."""
_STORED_DTYPES = ("F64", "F32", "F16", "BF16")
_MAX_NAMES = 4
"""Names listed in an error about many tensors."""


def parse_dtype(name: str) -> torch.dtype:
    """torch dtype of ``fp32``, ``bf16`` or ``fp16``; ConfigError for anything else."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; use one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def load_config(folder: str | Path) -> ModelConfig:
    """The configuration of a model folder; end-of-sequence ids of ``generation_config.json`` are added to its own."""
    folder = model_path(folder)
    config = ModelConfig.from_hf_dict(_read_json(folder / "config.json"))
    if (folder / "generation_config.json").exists():
        more = as_token_ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
        config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
    return config


def load_model(folder: str | Path, dtype: str = "fp32", device: str | torch.device = "cpu") -> Transformer:
    """Load a Hugging Face folder (``config.json`` and one or several safetensors files) of a supported family.

    Names, shapes and completeness are checked before any weight is read; tensors are then copied one at a time into
    their place, so the peak is the model plus one tensor. Raises ModelLoadError in one sentence for a missing or
    damaged file, an unsupported configuration, and missing, extra or misshapen tensors. A LoRA adapter's folder gives
    its base with the adapter merged in. Raises BackendError for a device that is not there.
    """
    _check_device(device)
    folder, torch_dtype = model_path(folder), parse_dtype(dtype)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        from sagc_fast.model.lora import load_adapted

        return load_adapted(folder, dtype, device)
    config = load_config(folder)
    with ExitStack() as stack:
        tensors = open_weights(folder, stack)
        slots = list(weight_slots(config))
        _check_names(folder, config, {slot.name for slot in slots}, set(tensors))
        for slot in slots:
            _check_tensor(tensors[slot.name][0], slot, tensors[slot.name][1])
        model = Transformer(config, torch_dtype, device)
        for slot in slots:
            _copy_tensor(tensors[slot.name][1], slot, model)
    return model


def _copy_tensor(path: Path, slot: WeightSlot, model: Transformer) -> None:
    """The file is mapped, and pages that were read stay with the process as long as the mapping does; hence one of its
    own for each tensor. Otherwise the peak would be the model twice."""
    try:
        with safe_open(path, framework="pt") as file:
            slot.view(model).copy_(file.get_tensor(slot.name))
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None


def _check_device(device: str | torch.device) -> None:
    if str(device).partition(":")[0] not in ("cpu", "cuda"):
        raise BackendError(f"Device {device!r} is not one that models run on; use 'cpu' or 'cuda'.")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"Device {device!r} was asked for and torch sees no CUDA device here; use device='cpu'.")


def save_model(
    model: Transformer,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    source: str | Path | None = None,
) -> None:
    """Write ``config.json``, safetensors and, when given, the tokenizer, so that transformers and we can load them.

    ``source`` is a model folder whose tokenizer and generation files are copied along. Files are written straight into
    ``folder``; a caller who needs all or nothing writes aside and renames.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if source is not None and Path(source).resolve() != folder.resolve():
        for name in COMPANION_FILES:
            if (Path(source) / name).exists():
                shutil.copyfile(Path(source) / name, folder / name)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    fields = model.config.to_hf_dict(str(model.dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    _write_weights(model, folder)


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, without the network. Raises ModelLoadError when there is none or when it has ids
    that the model's vocabulary lacks."""
    from transformers import AutoTokenizer

    folder = model_path(folder)
    if not folder.exists():
        raise _not_there(folder)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ModelLoadError(
            f"Model folder {folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy the tokenizer files "
            "of the original model into it, or pass token ids and no text."
        )
    hint = _class_hint(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, config=hint)
    except Exception as error:  # the library raises nearly anything for a damaged file
        raise ModelLoadError(f"The tokenizer in {folder} does not load: {_one_line(error)}.") from error
    _return_freed_memory()
    if (folder / "config.json").exists():
        vocab_size = _read_json(folder / "config.json").get("vocab_size")
        if isinstance(vocab_size, int) and len(tokenizer) > vocab_size:
            raise ModelLoadError(
                f"The tokenizer in {folder} has {len(tokenizer)} tokens but the model only {vocab_size} embeddings; "
                "use the tokenizer the model was trained with."
            )
    return tokenizer


def _class_hint(folder: Path) -> PreTrainedConfig | None:
    """What AutoTokenizer reads of a model's configuration when the tokenizer names its own class; else None, and it
    reads the whole. A model's full configuration class imports torch.distributed and sympy, 52 MB that stay."""
    from transformers import PreTrainedConfig

    if not all((folder / name).exists() for name in ("config.json", "tokenizer_config.json")):
        return None
    model, tokenizer = _read_json(folder / "config.json"), _read_json(folder / "tokenizer_config.json")
    if not tokenizer.get("tokenizer_class") or "auto_map" in tokenizer or "auto_map" in model:
        return None
    config = PreTrainedConfig(name_or_path=str(folder))
    config.model_type = model.get("model_type", "")
    return config


def _return_freed_memory() -> None:
    """Give freed heap back to the system. Parsing a vocabulary of 49,152 leaves 30 MB of it behind, in pieces that
    glibc keeps until it is asked and that tensors, which are mapped apart, never use again."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def random_model(config: ModelConfig, seed: int = 0, dtype: str = "fp32") -> Transformer:
    """Fresh weights, the same for the same seed: matrices normal with variance 1 / fan-in, norms 1, biases 0."""
    model = Transformer(config, parse_dtype(dtype))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.dim() == 2:
                scale = parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(scale))
            else:
                parameter.fill_(1.0 if name.endswith("norm") else 0.0)
    return model


def model_path(folder: str | os.PathLike[str]) -> Path:
    """The path of a model folder. Raises ModelLoadError for what is none, such as None or an empty text."""
    if not isinstance(folder, (str, os.PathLike)) or not str(folder):
        raise ModelLoadError(f"The model folder is {folder!r:.80}; give the path of a Hugging Face folder.")
    return Path(folder)


def _not_there(folder: Path) -> ModelLoadError:
    return ModelLoadError(f"Model folder {folder} is not there; check the path or fetch the model first.")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise _not_there(path.parent)
    if not path.exists():
        raise ModelLoadError(
            f"Model folder {path.parent} has no {path.name}; it must be a Hugging Face folder with config.json, "
            "safetensors and tokenizer files."
        )
    try:
        value = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{path} is not readable JSON: {_one_line(error)}.") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__}; it must be a JSON object.")
    return value


def open_weights(folder: Path, stack: ExitStack) -> dict[str, tuple[Any, Path]]:
    """Name of every stored tensor -> (open file, its path)."""
    if (folder / INDEX_NAME).exists():
        weight_map = _read_json(folder / INDEX_NAME).get("weight_map") or {}
        paths = [folder / name for name in dict.fromkeys(weight_map.values())]
    elif (folder / WEIGHTS_NAME).exists():
        paths = [folder / WEIGHTS_NAME]
    elif any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise ModelLoadError(
            f"Model folder {folder} holds pickled weights only; convert them to safetensors, for example with "
            "transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)."
        )
    else:
        raise ModelLoadError(f"Model folder {folder} has no {WEIGHTS_NAME} and no {INDEX_NAME}.")
    tensors = {}
    for path in paths:
        if not path.exists():
            raise ModelLoadError(f"{folder / INDEX_NAME} names {path.name}, which is not there; download it again.")
        try:
            handle = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from None
        tensors.update((name, (handle, path)) for name in handle.keys())  # noqa: SIM118 (not a mapping)
    return tensors


def _check_names(folder: Path, config: ModelConfig, expected: set[str], found: set[str]) -> None:
    if missing := expected - found:
        raise ModelLoadError(
            f"Model folder {folder} lacks {_some(missing)}; a {config.family} model with {config.num_layers} layers "
            "needs them, so download it again."
        )
    # Tied models often store the head once more, and old files store the rotary frequencies.
    harmless = {"lm_head.weight"} if config.tie_word_embeddings else set()
    extra = {name for name in found - expected - harmless if not name.endswith("rotary_emb.inv_freq")}
    if extra:
        raise ModelLoadError(
            f"Model folder {folder} holds {_some(extra)}, which a {config.family} model of this config.json does not "
            "have; config.json and weights do not belong together."
        )


def _check_tensor(handle: Any, slot: WeightSlot, path: Path) -> None:
    stored = handle.get_slice(slot.name)
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if shape != slot.shape:
        raise ModelLoadError(
            f"Tensor {slot.name} in {path} has shape {list(shape)} but config.json asks for {list(slot.shape)}."
        )
    if dtype not in _STORED_DTYPES:
        raise ModelLoadError(
            f"Tensor {slot.name} in {path} is stored as {dtype}; only {', '.join(_STORED_DTYPES)} can be loaded."
        )


def _write_weights(model: Transformer, folder: Path) -> None:
    """One file, or shards and their index. Views of fused parameters are written without a copy."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    num_bytes = 0
    for slot in weight_slots(model.config):
        tensor = slot.view(model)
        if shards[-1] and num_bytes + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            num_bytes = 0
        shards[-1][slot.name] = tensor
        num_bytes += tensor.nbytes
    for stale in (*folder.glob("model-*-of-*.safetensors"), folder / WEIGHTS_NAME, folder / INDEX_NAME):
        stale.unlink(missing_ok=True)
    if len(shards) == 1:
        _save_shard(shards[0], folder / WEIGHTS_NAME)
        return
    names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    for shard, name in zip(shards, names, strict=True):
        _save_shard(shard, folder / name)
    weight_map = {tensor: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _save_shard(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod((path.parent / "config.json").stat().st_mode)  # the library makes files for the owner's eyes only


def _damaged(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(f"{path} is damaged or truncated ({_one_line(error)}); download it again.")


def _some(names: set[str]) -> str:
    listed = sorted(names)[:_MAX_NAMES]
    rest = len(names) - len(listed)
    return f"{'tensor' if len(names) == 1 else 'tensors'} {', '.join(listed)}" + (f" and {rest} more" if rest else "")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
