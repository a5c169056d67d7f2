"""A device for tests that is not the CPU: real numbers, and every mixture of devices is an error, as on a GPU.

Tensors report the device ``meta`` and hold a CPU tensor inside, so that the code under test takes its paths for "some
other device", with real values to branch on. What torch would refuse on a GPU raises :class:`MixedDevices`: an operator
with tensors of both devices (CPU scalars excepted, and CPU tensors that index, which are copied), and ``numpy()``. A
sum that a GPU would make in an order that chance decides raises :class:`UnorderedSum`.
Values that the host asks for (``item``, ``bool``, ``cpu``) are counted: on a GPU each of them waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

PRETENDED = torch.device("meta")
_aten = torch.ops.aten
COPIES = (_aten._to_copy.default, _aten.copy_.default)
INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
ADDS = (_aten.index_add.default, _aten.index_add_.default)
TO_HOST = (_aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.equal.default)


class MixedDevices(RuntimeError):  # noqa: N818 (named for what it is)
    """An operator was given tensors of both devices."""


class UnorderedSum(RuntimeError):  # noqa: N818
    """A GPU would add the numbers by atomics, in an order that chance decides."""


class OnDevice(torch.Tensor):
    """A tensor of the pretended device; its numbers are in ``inner``, on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=PRETENDED,
        )  # fmt: skip
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{op} outside pretended_device()")


class _Dispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.to_host: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        mine = [x for x in tensors if isinstance(x, OnDevice)]
        asked = kwargs.get("device")
        wraps = bool(mine) if asked is None else torch.device(asked) == PRETENDED
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        _check(op, args, tensors, mine)
        if op in ADDS and mine and args[0].is_floating_point() and len(args[2].inner.unique()) < args[2].numel():
            raise UnorderedSum(f"{op} of floating-point numbers with rows that occur several times")
        if (op in TO_HOST and mine) or (op is _aten._to_copy.default and mine and not wraps):
            self.to_host[str(op)] += 1
        if op is _aten.copy_.default:
            wraps = isinstance(args[0], OnDevice)
            self.to_host[str(op)] += isinstance(args[1], OnDevice) and not wraps
        flat, spec = tree_flatten((args, kwargs))
        inner_args, inner_kwargs = tree_unflatten([x.inner if isinstance(x, OnDevice) else x for x in flat], spec)
        result = op(*inner_args, **inner_kwargs)
        if not wraps:
            return result
        back = {id(x.inner): x for x in mine}  # what an in-place operator returns is what it was given
        return tree_map_only(torch.Tensor, lambda x: back.get(id(x)) if id(x) in back else OnDevice(x), result)


def _check(op: Any, args: Any, tensors: list[torch.Tensor], mine: list[OnDevice]) -> None:
    others = [x for x in tensors if not isinstance(x, OnDevice)]
    assert not any(x.device == PRETENDED for x in others), f"{op} was given a tensor without numbers"
    if not mine or not others or op in COPIES:
        return
    is_list_op = "_fused" in str(op) or "_foreach" in str(op)  # their kernels read every list on the device
    if not is_list_op and all(x.dim() == 0 for x in others):
        return
    if op in INDEXED and isinstance(args[0], OnDevice):
        values = [x for x in args[2:3] if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice) and x.dim()]
        if not values:
            return
    shapes = ", ".join(f"{'device' if isinstance(x, OnDevice) else 'cpu'} {tuple(x.shape)}" for x in tensors)
    raise MixedDevices(f"{op} was given tensors of both devices: {shapes}")


class _Functions(TorchFunctionMode):
    """Calls that never reach the dispatcher with their numbers, or bypass it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu") == PRETENDED:
            kwargs.pop("device")
            return OnDevice(function(*args, **kwargs))
        if function is torch.Tensor.__getitem__ and isinstance(args[0], OnDevice) and isinstance(args[1], list):
            args = (args[0], torch.tensor(args[1]))  # torch would make it on the device, where nothing fills it
        if function is torch.Tensor.new_tensor and isinstance(args[0], OnDevice):
            return OnDevice(args[0].inner.new_tensor(*args[1:], **kwargs))
        if function is torch.Tensor.numpy and isinstance(args[0], OnDevice):
            raise MixedDevices("numpy() of a tensor on the device")
        if function is torch.Tensor.tolist and isinstance(args[0], OnDevice):
            return args[0].detach().cpu().tolist()
        return function(*args, **kwargs)


@contextmanager
def pretended_device() -> Iterator[Counter[str]]:
    """Within: :data:`PRETENDED` is a device with numbers. Yields how often the host asked for values, by operator."""
    dispatch = _Dispatch()
    with _no_inference_mode(), dispatch, _Functions():
        yield dispatch.to_host


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """Views of a wrapper cannot be made in it; no_grad instead."""
    kind = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__

    def enter_no_grad(self: Any) -> None:
        self._before = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode and self._before)

    def leave_no_grad(self: Any, *_: Any) -> None:
        torch.set_grad_enabled(self._before)

    kind.__enter__, kind.__exit__ = enter_no_grad, leave_no_grad
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave


def to_device(model: torch.nn.Module) -> torch.nn.Module:
    """Move a model's parameters, in place; to be called within :func:`pretended_device`."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(OnDevice(parameter.detach().clone()))
    return model
