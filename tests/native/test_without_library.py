"""What happens without the native library, and that it is there wherever it can be built."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys

import pytest
import torch

from sagc_fast.ops import native_interface
from sagc_fast.ops.backend import native_module

WITHOUT_LIBRARY = """
import os, sys, warnings
sys.modules["sagc_fast.ops.native"] = None  # importing it now raises ImportError
import torch
from sagc_fast import ops
from sagc_fast.errors import BackendError

x, weight = torch.ones(2, 8), torch.ones(3, 8)
os.environ["SAGC_BACKEND"] = "native"
try:
    ops.linear(x, weight)
except BackendError as error:
    print("native:", error)
os.environ["SAGC_BACKEND"] = "torch"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert torch.equal(ops.linear(x, weight), torch.full((2, 3), 8.0))
print("torch:", [str(w.message) for w in caught])
del os.environ["SAGC_BACKEND"]
ops.set_backend(None)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ops.linear(x, weight)
    ops.silu_mul(x)
print("automatic:", [w.category.__name__ for w in caught], ops.describe()[0][1])
"""


def run(code: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "SAGC_BACKEND"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_library_is_built_where_there_is_a_compiler() -> None:
    if shutil.which("c++") or shutil.which("g++"):
        assert importlib.import_module("sagc_fast.ops.native").available_ops()


def test_missing_library_falls_back_with_one_warning_unless_native_is_forced() -> None:
    forced, plain, automatic = run(WITHOUT_LIBRARY).splitlines()
    assert "sagc_fast._C is not built" in forced
    assert plain == "torch: []"
    assert automatic == "automatic: ['RuntimeWarning'] torch"


STALE = """
import sys, warnings
from sagc_fast.ops import native_interface
native_interface.SCHEMAS[sys.argv[1]] = sys.argv[2]  # what a library from other sources has differs in this operator
import torch
from sagc_fast import RolloutEngine, SamplingParams, ops
from sagc_fast.commands import _diagnosis
from sagc_fast.model.config import ModelConfig
from sagc_fast.model.loader import random_model

config = ModelConfig(
    family="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position_embeddings=64,
)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", RuntimeWarning)
    groups = RolloutEngine(random_model(config, seed=0)).generate([[1, 2], [3]], 2, SamplingParams(max_new_tokens=3))
assert [len(group.completions) for group in groups] == [2, 2]
print({w.category.__name__: str(w.message) for w in caught})
print({backend for _, backend, _ in ops.describe()})
check = _diagnosis.check_native()
print(check.status, check.sentence)
print(_diagnosis.check_generation().status)
"""


def run_stale(name: str, schema: str) -> list[str]:
    environment = {n: value for n, value in os.environ.items() if n != "SAGC_BACKEND"}
    command = [sys.executable, "-W", "error", "-c", STALE, name, schema]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(native_module() is None, reason="sagc_fast._C is not built")
@pytest.mark.parametrize(
    ("name", "schema", "words"),
    [
        ("decoder_bind_rows", "() -> ()", "it lacks the operator decoder_bind_rows"),
        ("linear", "(Tensor x) -> Tensor", "it has the operator linear as (Tensor x, Tensor weight, Tensor? bias)"),
    ],
)
def test_stale_library_falls_back_with_one_warning_and_doctor_says_what_to_do(name, schema, words) -> None:
    warned, backends, doctor, generation = run_stale(name, schema)
    for sentence in (warned, doctor):
        assert words in sentence
        assert "rebuild it: `python setup.py build_ext --inplace`" in sentence
    assert "several times slower" in warned
    assert backends == "{'torch'}"
    assert doctor.startswith("failure")
    assert generation == "ok"


@pytest.mark.skipif(native_module() is None, reason="sagc_fast._C is not built")
def test_the_interface_names_every_operator_of_the_library() -> None:
    """A new operator that Python calls would otherwise be missed in an older library only when it is called."""
    names = torch._C._dispatch_get_all_op_names()
    registered = {n.removeprefix("sagc_fast::") for n in names if n.startswith("sagc_fast::")}
    of_cuda = {"sample_keyed_tokens", "place_rows", "advance_rows"}
    assert registered - of_cuda == set(native_interface.SCHEMAS)
