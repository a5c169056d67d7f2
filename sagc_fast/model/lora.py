"""LoRA (Hu et al., arXiv:2106.09685): low-rank adapters in the place of a full update, named as peft names them.

An adapted matrix is W + scale B A. It stands in the model merged, in training as in a rollout: one forward pass serves
both, so the policy that is trained is to the bit the one that sampled, and a rollout costs what it costs without
adapters. Only the backward pass knows A and B (:class:`_Adapted`).

The base is kept once, where it lies: in the weight files of the model folder, mapped into memory. Every merge computes
W + scale B A anew from them, never from an earlier merge, so nothing drifts, and :meth:`Adapters.unmerged` puts back W
itself to the bit. That costs one pass over the adapted matrices per optimizer update and no second copy of the weights.

Shape suffixes: T tokens, X input width, Y output width, R rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from sagc_fast import ops
from sagc_fast.errors import CheckpointError, ConfigError, ModelLoadError

if TYPE_CHECKING:
    from sagc_fast.model.transformer import Transformer
    from sagc_fast.model.weights import WeightSlot

CONFIG_NAME, WEIGHTS_NAME, BASE_NAME = "adapter_config.json", "adapter_model.safetensors", "base_model.json"
PREFIX = "base_model.model."
"""What peft puts before the names of the model's own modules."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
_MAX_NAMES = 3


@dataclass(frozen=True)
class LoraSpec:
    """What an adapter is, in peft's terms."""

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = TARGETS[:-1]
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class LowRank(nn.Module):
    """A and B of one peft target, fp32 whatever the model's dtype. B starts at zero: the model starts as its base."""

    def __init__(self, name: str, start: int, shape: tuple[int, int], rank: int, device: torch.device) -> None:
        super().__init__()
        self.name, self.start, self.num_rows = name, start, shape[0]
        self.lora_A = nn.Parameter(torch.empty(rank, shape[1], device=device))
        self.lora_B = nn.Parameter(torch.zeros(shape[0], rank, device=device))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """A uniform within +-1/sqrt(width), as peft draws it."""
        bound = self.lora_A.shape[1] ** -0.5
        self.lora_A.copy_(torch.rand(self.lora_A.shape, generator=generator).mul_(2 * bound).sub_(bound))


class AdaptedLinear(nn.Module):
    """The adapters of one matrix of ours, which may hold several of peft's (q, k and v in one)."""

    def __init__(self, parts: Sequence[LowRank], spec: LoraSpec) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.scale, self.dropout = spec.scale, spec.dropout

    def forward(self, x_TX: torch.Tensor, merged_YX: torch.Tensor, bias_Y: torch.Tensor | None) -> torch.Tensor:
        """x W'^T + bias [T, Y] with W' = ``merged_YX``, differentiable in A and B.

        With dropout, the adapters see it and the base does not, as in peft: scale (dropout(x) - x) A^T B^T is added.
        """
        y_TY = _Adapted.apply(x_TX, merged_YX, bias_Y, self.scale, self._starts(), *self._factors())
        if self.dropout and torch.is_grad_enabled():
            change_TY = torch.zeros_like(y_TY)
            for part in self.parts:
                noise_TX = functional.dropout(x_TX, self.dropout) - x_TX
                low_TR = ops.trained_linear(noise_TX, part.lora_A.to(x_TX.dtype))
                rows = slice(part.start, part.start + part.num_rows)
                change_TY[:, rows] = self.scale * ops.trained_linear(low_TR, part.lora_B.to(x_TX.dtype))
            y_TY = y_TY + change_TY
        return y_TY

    def weight(self, merged_YX: torch.Tensor) -> torch.Tensor:
        """The merged matrix itself, differentiable in A and B: for a product that is fused with what follows, as the
        head's is. Its gradient [Y, X] exists for a moment."""
        return _AdaptedWeight.apply(merged_YX, self.scale, self._starts(), *self._factors())

    def _starts(self) -> tuple[int, ...]:
        return tuple(part.start for part in self.parts)

    def _factors(self) -> list[torch.Tensor]:
        return [factor for part in self.parts for factor in (part.lora_A, part.lora_B)]


class _Adapted(torch.autograd.Function):
    """y = x W'^T + bias; backward gives dA = scale (dy B)^T x and dB = scale dy^T (x A^T), never the gradient of W'."""

    @staticmethod
    def forward(ctx, x_TX, merged_YX, bias_Y, scale, starts, *factors):
        ctx.save_for_backward(x_TX, merged_YX, *factors)
        ctx.scale, ctx.starts = scale, starts
        return ops.trained_linear(x_TX, merged_YX, bias_Y)

    @staticmethod
    def backward(ctx, dy_TY):
        x_TX, merged_YX, *factors = ctx.saved_tensors
        gradients = []
        for start, a_RX, b_YR in zip(ctx.starts, factors[::2], factors[1::2], strict=True):
            part_TY = dy_TY[:, start : start + len(b_YR)]
            low_TR = ops.mm(part_TY, b_YR.to(dy_TY.dtype))
            gradients.append(ops.mm(low_TR.T, x_TX).to(a_RX.dtype).mul_(ctx.scale))
            gradients.append(ops.mm(part_TY.T, ops.mm(x_TX, a_RX.T.to(x_TX.dtype))).to(b_YR.dtype).mul_(ctx.scale))
        dx_TX = ops.mm(dy_TY, merged_YX) if ctx.needs_input_grad[0] else None
        return dx_TX, None, None, None, None, *gradients


class _AdaptedWeight(torch.autograd.Function):
    """W' as a function of A and B; backward turns the gradient of W' into theirs."""

    @staticmethod
    def forward(ctx, merged_YX, scale, starts, *factors):
        ctx.save_for_backward(*factors)
        ctx.scale, ctx.starts = scale, starts
        return merged_YX.view_as(merged_YX)

    @staticmethod
    def backward(ctx, dw_YX):
        factors, gradients = ctx.saved_tensors, []
        for start, a_RX, b_YR in zip(ctx.starts, factors[::2], factors[1::2], strict=True):
            part_YX = dw_YX[start : start + len(b_YR)].to(a_RX.dtype)
            gradients.append((b_YR.T @ part_YX).mul_(ctx.scale))
            gradients.append((part_YX @ a_RX.T).mul_(ctx.scale))
        return None, None, None, *gradients


class Adapters:
    """All adapters of a model and the base they stand on. Made by :func:`attach`; close it to let the files go."""

    def __init__(self, model: Transformer, folder: Path, spec: LoraSpec) -> None:
        from sagc_fast.model.loader import open_weights

        self.spec, self.folder = spec, Path(folder)
        self._files = contextlib.ExitStack()
        self._parts: list[tuple[LowRank, torch.Tensor, Any]] = []  # adapter, its rows of the model, its file
        tensors = open_weights(self.folder, self._files)
        for slot in _adapted_slots(model, spec):
            part = LowRank(slot.name.removesuffix(".weight"), slot.start, slot.shape, spec.rank, model.device)
            self._parts.append((part, slot.view(model), tensors[slot.name][0]))
        self._paths = sorted({path for _, path in tensors.values()})
        self._fingerprint: dict[str, str] | None = None

    @property
    def parts(self) -> list[LowRank]:
        return [part for part, _, _ in self._parts]

    @torch.no_grad()
    def merge(self) -> None:
        """Put W + scale B A, computed in fp32 from the base on disk, into the model."""
        for part, view, file in self._parts:
            base = file.get_tensor(f"{part.name}.weight").to(
                view.device, torch.promote_types(view.dtype, torch.float32)
            )
            factors = part.lora_B.to(base.dtype), part.lora_A.to(base.dtype)
            view.copy_(torch.addmm(base, *factors, alpha=self.spec.scale))

    @contextlib.contextmanager
    def unmerged(self) -> Iterator[None]:
        """Within, the model is its base, to the bit: the reference policy."""
        with torch.no_grad():
            for part, view, file in self._parts:
                view.copy_(file.get_tensor(f"{part.name}.weight"))
        try:
            yield
        finally:
            self.merge()

    def save(self, folder: Path) -> None:
        """Write the adapter as peft does, and what base it belongs to."""
        spec = self.spec
        fields = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self.folder.resolve()),
            "r": spec.rank,
            "lora_alpha": spec.alpha,
            "lora_dropout": spec.dropout,
            "target_modules": list(spec.target_modules),
            "use_rslora": spec.use_rslora,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_NAME).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        (folder / BASE_NAME).write_text(json.dumps(self._base_fingerprint(), indent=2) + "\n", encoding="utf-8")
        tensors = {}
        for part in self.parts:
            for factor in ("lora_A", "lora_B"):
                tensors[f"{PREFIX}{part.name}.{factor}.weight"] = getattr(part, factor).detach().cpu().contiguous()
        save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        mode = (folder / CONFIG_NAME).stat().st_mode  # the library makes files for the owner's eyes only
        (folder / WEIGHTS_NAME).chmod(mode)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take A and B from an adapter folder, of ours or of peft's. Raises ConfigError when it is another kind of
        adapter than the configuration asks for, ModelLoadError when it cannot be read, CheckpointError when its base
        has changed."""
        spec, _ = read_config(folder)
        for name, theirs in asdict(spec).items():
            ours = asdict(self.spec)[name]
            is_same = set(ours) == set(theirs) if name == "target_modules" else ours == theirs
            if not is_same and name != "dropout":
                raise ConfigError(
                    f"lora.{name} is {ours!r} and the adapter in {folder} has {theirs!r}; set it to that."
                )
        if (folder / BASE_NAME).is_file():
            stored = json.loads((folder / BASE_NAME).read_text(encoding="utf-8"))
            if stored != self._base_fingerprint():
                raise CheckpointError(
                    f"The adapter in {folder} was trained on other weights than those in {self.folder}; "
                    "point model.path to the old ones."
                )
        _copy_factors(self.parts, folder)

    def _base_fingerprint(self) -> dict[str, str]:
        """SHA-256 of the base's weight files, read once."""
        if self._fingerprint is None:
            self._fingerprint = {}
            for path in self._paths:
                with open(path, "rb") as file:
                    self._fingerprint[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._fingerprint

    def close(self) -> None:
        self._files.close()


def attach(model: Transformer, folder: str | Path, spec: LoraSpec, seed: int = 0) -> Adapters:
    """Give ``model``, whose weights lie in ``folder``, fresh adapters and freeze everything else.

    ``seed`` fixes A. Raises ConfigError for an unknown target, for lm_head where it is tied to the embedding, and for a
    rank above the smallest dimension of the adapted matrices.
    """
    if unknown := [name for name in spec.target_modules if name not in TARGETS]:
        raise ConfigError(f"lora.target_modules names {unknown[0]!r}; it must be some of {', '.join(TARGETS)}.")
    if "lm_head" in spec.target_modules and model.head_weight is None:
        raise ConfigError(
            "lora.target_modules names lm_head, which this model ties to its embedding: merged, it would change the "
            "input as well; leave it out."
        )
    smallest = min(_adapted_slots(model, spec), key=lambda slot: min(slot.shape))
    if spec.rank > min(smallest.shape):
        raise ConfigError(
            f"lora.rank is {spec.rank}; it must be at most {min(smallest.shape)}, as {smallest.name} is of "
            f"{smallest.shape[0]} x {smallest.shape[1]} and a product of larger factors has no higher rank."
        )
    adapters = Adapters(model, Path(folder), spec)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    by_matrix: dict[str, list[LowRank]] = {}
    for part in adapters.parts:
        part.initialise(generator)
        by_matrix.setdefault(_matrix_of(part.name), []).append(part)
    for matrix, parts in by_matrix.items():
        owner, _, name = matrix.rpartition(".")
        linear = AdaptedLinear(parts, spec)
        if name == "head":
            model.head_lora = linear
        else:
            layer = model.get_submodule(owner)
            layer.lora = nn.ModuleDict() if layer.lora is None else layer.lora
            layer.lora[name] = linear
    model.adapters = adapters
    return adapters


def _adapted_slots(model: Transformer, spec: LoraSpec) -> list[WeightSlot]:
    """The matrices that ``spec`` adapts, in the order of the model."""
    from sagc_fast.model.weights import weight_slots

    endings = tuple(f".{name}.weight" for name in spec.target_modules)
    return [slot for slot in weight_slots(model.config) if f".{slot.name}".endswith(endings)]


def load_adapted(folder: str | Path, dtype: str, device: str | torch.device) -> Transformer:
    """The base of an adapter folder with the adapter merged in for good: a plain model."""
    from sagc_fast.model.loader import load_model

    folder = Path(folder)
    spec, base = read_config(folder)
    if not Path(base).is_dir():
        raise ModelLoadError(
            f"The adapter in {folder} belongs to the model folder {base}, which is not there; "
            f"correct base_model_name_or_path in its {CONFIG_NAME}."
        )
    model = load_model(base, dtype=dtype, device=device)
    adapters = Adapters(model, Path(base), spec)
    with contextlib.closing(adapters):
        _copy_factors(adapters.parts, folder)
        adapters.merge()
    return model


def read_config(folder: Path) -> tuple[LoraSpec, str]:
    """(adapter, path of its base) of a peft folder. Raises ModelLoadError for one that is not a plain LoRA of these
    models."""
    path = folder / CONFIG_NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        targets = fields["target_modules"]
        if isinstance(targets, str) or fields["peft_type"] != "LORA" or not set(targets) <= set(TARGETS):
            raise ModelLoadError(
                f"{path} is not a LoRA adapter of {', '.join(TARGETS)} but of {targets!r}; train one of these."
            )
        for name in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform"):
            if fields.get(name):
                raise ModelLoadError(
                    f"{path} sets {name}, which is not supported here; merge that adapter with peft first."
                )
        ordered = tuple(name for name in TARGETS if name in targets)
        spec = LoraSpec(
            fields["r"], float(fields["lora_alpha"]), fields["lora_dropout"], ordered, fields.get("use_rslora", False)
        )
        return spec, fields["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"{path} is not a legible adapter configuration ({type(error).__name__}: {error})."
        ) from None


def _copy_factors(parts: Sequence[LowRank], folder: Path) -> None:
    path = folder / WEIGHTS_NAME
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path} cannot be read ({error}); copy the adapter again.") from None
    with torch.no_grad():
        for part in parts:
            for factor in ("lora_A", "lora_B"):
                name, target = f"{PREFIX}{part.name}.{factor}.weight", getattr(part, factor)
                stored = tensors.pop(name, None)
                if stored is None or stored.shape != target.shape:
                    found = "is missing" if stored is None else f"has shape {list(stored.shape)}"
                    raise ModelLoadError(f"{name} {found} in {path}; the model needs {list(target.shape)}.")
                target.copy_(stored)
    if tensors:
        extra = ", ".join(sorted(tensors)[:_MAX_NAMES])
        raise ModelLoadError(f"{path} holds {extra}, which the model does not have.")


def _matrix_of(name: str) -> str:
    """Our matrix, without ``_weight``, that holds peft's module ``name``."""
    if name == "lm_head":
        return "head"
    owner, _, module = name.rpartition(".")
    layer = owner.removeprefix("model.").rpartition(".")[0]
    fused = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
    return f"{layer}.{fused.get(module, module.removesuffix('_proj'))}"
