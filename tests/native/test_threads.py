"""The operators' thread pool: several callers at once, forked processes, and bits that no thread count changes."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import ModuleType

import pytest
import torch

from sagc_fast.bench.kernels import decode_layout

ROWS, REPEATS = 96, 6


def operations(native: ModuleType, seed: int) -> list[torch.Tensor]:
    """One of each kind of parallel region, on operands that are large enough to be spread."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, weight, gate_up = random(ROWS, 288), random(864, 288), random(ROWS, 1536)
    layout, cache = decode_layout(ROWS, 64, 16, 2), random(2, ROWS * 4, 6, 16, 48)
    normed, residual = native.add_rms_norm(x, x.flip(0).contiguous(), weight[0].contiguous(), 1e-5)
    uniform = torch.rand(ROWS, dtype=torch.float64, generator=generator)
    token, logprob = native.sample_tokens(gate_up, uniform, torch.ones(ROWS))
    product, active = native.linear(x, weight), native.silu_mul(gate_up)
    return [
        product,
        native.linear(x.bfloat16(), weight.bfloat16()),
        normed,
        residual,
        active,
        native.paged_attention(product[:, :288].reshape(ROWS, 6, 48), cache[0], cache[1], layout, 0.1),
        token,
        logprob,
    ]


def assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(native: ModuleType, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        wanted = operations(native, 1)
        torch.set_num_threads(threads)
        for _ in range(REPEATS):
            torch.manual_seed(1)
            assert_same(operations(native, 1), wanted)
    finally:
        torch.set_num_threads(before)


def test_callers_in_several_python_threads_do_not_disturb_each_other(two_threads: None) -> None:
    """One of them has the pool, the others work alone; torch's number of threads is each caller's own."""
    from sagc_fast.ops import native

    seeds, wrong = range(3), []
    torch.manual_seed(0)
    layout = decode_layout(ROWS, 64, 16, 2)

    def run(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x, weight = torch.randn(ROWS, 288, generator=generator), torch.randn(864, 288, generator=generator)
        cache = torch.randn(2, ROWS * 4, 6, 16, 48, generator=generator)
        product = native.linear(x, weight)
        attended = native.paged_attention(product[:, :288].reshape(ROWS, 6, 48), cache[0], cache[1], layout, 0.1)
        return [product, attended, native.rms_norm(x, weight[0].contiguous(), 1e-5)]

    wanted = [run(seed) for seed in seeds]

    def call(seed: int) -> None:
        torch.set_num_threads(2)
        for _ in range(REPEATS):
            if not all(torch.equal(a, b) for a, b in zip(run(seed), wanted[seed], strict=True)):
                wrong.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in seeds]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


FORK = """
import os, signal, torch
from sagc_fast.ops import native
torch.set_num_threads(2)
x, weight = torch.randn(96, 288), torch.randn(864, 288)
def product():  # compared as bytes: torch.equal would be spread over OpenMP's threads, which do not survive a fork
    return native.linear(x, weight).numpy().tobytes()
wanted = product()
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        os._exit(0 if all(product() == wanted for _ in range(20)) else 3)
    assert product() == wanted
    assert os.waitpid(child, 0)[1] == 0, "the child hung or got other bits"
print("same")
"""


def test_a_forked_child_makes_a_pool_of_its_own() -> None:
    """The helpers do not exist there; were the parent's pool used, its mutexes could be locked for ever."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "same", done.stderr


CONFINED = """
import os, torch
from sagc_fast.ops import native
torch.set_num_threads(2)
x, weight = torch.randn(96, 288), torch.randn(864, 288)
wanted = native.linear(x, weight)
everywhere = os.sched_getaffinity(0)
for cpus in ({min(everywhere)}, {max(everywhere)}, everywhere):
    os.sched_setaffinity(0, cpus)
    for _ in range(20):
        assert torch.equal(native.linear(x, weight), wanted)
print("same")
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "sched_setaffinity"), reason="CPU sets are Linux's")
def test_a_process_may_be_confined_to_other_cpus_meanwhile() -> None:
    done = subprocess.run([sys.executable, "-c", CONFINED], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "same", done.stderr


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


def test_a_thread_takes_little_memory_for_itself(native: ModuleType) -> None:
    """It counts once per worker, so it must not hold the state of every instruction set and pair of dtypes."""
    num_threads = 4
    layout, cache, q = decode_layout(ROWS, 64, 16, 2), torch.randn(2, ROWS * 4, 6, 16, 48), torch.randn(ROWS, 6, 48)
    stay, done = threading.Event(), threading.Barrier(num_threads + 1)

    def attend() -> None:
        native.paged_attention(q, cache[0], cache[1], layout, 0.1)
        done.wait()
        stay.wait()

    threads = [threading.Thread(target=attend) for _ in range(num_threads)]
    native.paged_attention(q, cache[0], cache[1], layout, 0.1)
    before = anonymous_bytes()
    for thread in threads:
        thread.start()
    done.wait()
    grown = anonymous_bytes() - before
    stay.set()
    for thread in threads:
        thread.join()
    assert grown / num_threads < 3e6
