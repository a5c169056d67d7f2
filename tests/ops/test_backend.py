"""Choice of backend: forced, from the environment, automatic."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator

import pytest
import torch

from sagc_fast import ops
from sagc_fast.errors import BackendError
from sagc_fast.ops import backend


@pytest.fixture(autouse=True)
def _forget_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(backend.ENVIRONMENT_VARIABLE, raising=False)
    backend._choices.clear()
    yield
    backend._choices.clear()


def _install(monkeypatch: pytest.MonkeyPatch, native: types.ModuleType | None) -> None:
    monkeypatch.setattr(backend, "native_module", lambda: native)
    monkeypatch.setattr(ops, "native_module", lambda: native)


@pytest.fixture
def fake_native(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    native = types.ModuleType("native")
    native.available_ops = lambda: {"silu_mul", "rms_norm"}
    native.supports = lambda op, device_type, dtype: device_type == "cpu" and dtype == torch.float32
    native.silu_mul = lambda x: "native result"
    _install(monkeypatch, native)
    return native


def test_automatic_choice_takes_native_where_it_serves_and_says_why(fake_native: types.ModuleType) -> None:
    x = torch.ones(2, 4)
    assert ops.silu_mul(x) == "native result"
    assert isinstance(ops.silu_mul(x.double()), torch.Tensor)
    assert isinstance(ops.linear(x, torch.ones(3, 4)), torch.Tensor)
    assert [(op, choice) for op, choice, _ in ops.describe()] == [
        ("linear [cpu, float32]", "torch"),
        ("silu_mul [cpu, float32]", "native"),
        ("silu_mul [cpu, float64]", "torch"),
    ]
    reasons = [reason for *_, reason in ops.describe()]
    assert "no such operation" in reasons[0]
    assert "float64" in reasons[2]


def test_use_backend_forces_torch_and_restores(fake_native: types.ModuleType) -> None:
    x = torch.ones(2, 4)
    with ops.use_backend("torch"):
        assert isinstance(ops.silu_mul(x), torch.Tensor)
        assert ops.describe()[0][2] == "asked for by set_backend"
    assert ops.silu_mul(x) == "native result"


def test_environment_variable_forces_and_set_backend_overrides_it(
    fake_native: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGC_BACKEND", "torch")
    assert isinstance(ops.silu_mul(torch.ones(2, 4)), torch.Tensor)
    with ops.use_backend("native"):
        assert ops.silu_mul(torch.ones(2, 4)) == "native result"


def test_unknown_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        BackendError, match=r"'cutlass' \(set_backend\) is unknown; use one of native, triton, flash, cuda, torch"
    ):
        ops.set_backend("cutlass")
    monkeypatch.setenv("SAGC_BACKEND", "fast")
    with pytest.raises(BackendError, match="SAGC_BACKEND"):
        ops.silu_mul(torch.ones(2, 4))


def test_forced_native_that_is_not_built_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, None)
    with pytest.raises(BackendError, match="not built; run pip install again"):
        ops.set_backend("native")
    monkeypatch.setenv("SAGC_BACKEND", "native")
    with pytest.raises(BackendError, match="environment variable"):
        ops.silu_mul(torch.ones(2, 4))


def test_a_missing_library_warns_once_and_only_when_nobody_asked_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sagc_fast.ops.native", None)  # what an installation without a compiler looks like
    monkeypatch.delattr(ops, "native", raising=False)
    monkeypatch.setattr(backend, "_has_warned", False)
    monkeypatch.setattr(backend, "native_module", backend.native_module.__wrapped__)
    x = torch.ones(2, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ops.use_backend("torch"):
            ops.silu_mul(x)
        assert not caught
        ops.silu_mul(x)
        ops.rms_norm(x, x[0], 1e-6)
    assert len(caught) == 1
    assert "sagc_fast._C is not built" in str(caught[0].message)


@pytest.fixture
def fake_triton(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("triton_ops")
    module.available_ops = lambda: {"silu_mul", "varlen_attention"}
    module.supports = lambda op, device_type, dtype: device_type == "cuda" and dtype == torch.bfloat16
    monkeypatch.setattr(backend, "triton_module", lambda: module)
    monkeypatch.setattr(backend, "flash_module", lambda: None)
    return module


def test_triton_serves_cuda_and_the_cpu_stays_native(fake_triton: types.ModuleType, fake_native) -> None:
    assert backend.resolve("silu_mul", "cuda", torch.bfloat16) == "triton"
    assert backend.resolve("varlen_attention", "cuda", torch.bfloat16) == "triton"
    assert backend.resolve("silu_mul", "cuda", torch.float64) == "torch"
    assert backend.resolve("linear", "cuda", torch.bfloat16) == "torch"
    assert backend.resolve("silu_mul", "cpu", torch.float32) == "native"
    assert ops.describe()[0][1:] == ("torch", "triton has no such operation")
    with ops.use_backend("triton"):
        assert backend.resolve("silu_mul", "cuda", torch.bfloat16) == "triton"
        assert backend.resolve("silu_mul", "cpu", torch.float32) == "torch"


def test_the_cuda_operators_serve_only_when_asked_for_and_leave_the_others_automatic(
    fake_triton: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have not been measured against Triton on a GPU yet."""
    module = types.ModuleType("cuda_ops")
    module.available_ops = lambda: {"sample_keyed_tokens"}
    module.supports = lambda op, device_type, dtype: device_type == "cuda"
    module.MAX_VOCAB = 8
    module.sample_keyed_tokens = lambda *arguments: "cuda"
    fake_triton.available_ops = lambda: {"silu_mul", "sample_keyed_tokens"}
    fake_triton.sample_keyed_tokens = lambda *arguments: "triton"
    monkeypatch.setattr(backend, "cuda_module", lambda: module)
    monkeypatch.setattr(ops, "cuda_module", lambda: module)
    monkeypatch.setattr(ops, "triton_module", lambda: fake_triton)
    assert backend.resolve("sample_keyed_tokens", "cuda", torch.bfloat16) == "triton"
    with monkeypatch.context() as patch:  # what a measurement would change
        patch.setattr(backend, "MEASURED_FASTER", frozenset({"sample_keyed_tokens"}))
        backend.set_backend(None)
        assert backend.resolve("sample_keyed_tokens", "cuda", torch.bfloat16) == "cuda"
        assert backend.resolve("silu_mul", "cuda", torch.bfloat16) == "triton"
        patch.setattr(backend, "cuda_module", lambda: None)
        backend.set_backend(None)
        assert backend.resolve("sample_keyed_tokens", "cuda", torch.bfloat16) == "triton"
    backend.set_backend(None)
    with ops.use_backend("cuda"):
        assert backend.resolve("sample_keyed_tokens", "cuda", torch.bfloat16) == "cuda"
        assert backend.resolve("silu_mul", "cuda", torch.bfloat16) == "triton"
        monkeypatch.setattr(ops, "resolve", lambda *arguments: "cuda")
        keys, temperature, filter_R = (torch.zeros(2),) * 4, torch.ones(2), torch.ones(2)
        assert ops.sample_keyed_tokens(torch.zeros(2, 8), keys, temperature) == "cuda"
        assert ops.sample_keyed_tokens(torch.zeros(2, 8), keys, temperature, filter_R) == "triton"
        assert ops.sample_keyed_tokens(torch.zeros(2, 9), keys, temperature) == "triton"


def test_a_gpu_without_triton_warns_once_and_asking_for_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "triton_module", lambda: None)
    monkeypatch.setattr(backend, "flash_module", lambda: None)
    monkeypatch.setattr(backend, "_has_warned", False)
    with pytest.warns(RuntimeWarning, match="Triton is not there, or no GPU .* install triton 3.6 or later"):
        assert backend.resolve("silu_mul", "cuda", torch.bfloat16) == "torch"
    with pytest.raises(BackendError, match=r"'triton' \(set_backend\) is not there"):
        ops.set_backend("triton")
