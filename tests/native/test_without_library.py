"""What happens without the native library, and that it is there wherever it can be built."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys

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
