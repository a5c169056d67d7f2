"""Several Python threads, and processes that were forked after the engine had run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from sagc_fast import RolloutEngine, SamplingParams

PARAMS = SamplingParams(max_new_tokens=20, seed=3)
PROMPTS = [[index, *range(30)] for index in range(6)]


def test_engines_in_several_threads_share_a_model(tiny_model, helpers):
    """Each has its own cache, decoder and threads of torch; the native pool serves one of them at a time."""
    model = tiny_model("llama", seed=2, hidden_size=64, vocab_size=9_000)
    expected = helpers.outcome(RolloutEngine(model, threads=1).generate(PROMPTS, 8, PARAMS))
    results, start = {}, threading.Barrier(3)

    def work(index):
        engine = RolloutEngine(model, threads=1 + index % 2)
        start.wait()
        results[index] = [helpers.outcome(engine.generate(PROMPTS, 8, PARAMS)) for _ in range(3)]

    workers = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == {index: [expected] * 3 for index in range(3)}


FORK = """
import os, signal, sys, warnings
import torch
from sagc_fast import RolloutEngine, SamplingParams
from sagc_fast.model.config import ModelConfig
from sagc_fast.model.loader import random_model

config = ModelConfig(
    family="llama", vocab_size=2048, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4, num_kv_heads=4,
    head_dim=16, max_position_embeddings=256,
)
threads = int(sys.argv[1])
torch.set_num_threads(threads)
x = torch.randn(1000, 1000)
(x @ x + x).exp()  # torch's own threads
engine = RolloutEngine(random_model(config, seed=0), threads=threads)
plain = SamplingParams(max_new_tokens=6, ignore_eos=True)
cases = [plain, SamplingParams(max_new_tokens=6, ignore_eos=True, top_k=9)]
prompts = [[index] + [5] * 90 for index in range(8)]
expected = [engine.generate(prompts, 8, params) for params in cases]
child = os.fork()
if child == 0:
    status = 1
    signal.alarm(200)  # should it wait for ever
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [engine.generate(prompts, 8, params) for params in cases] == expected
        print([w.category.__name__ for w in caught], caught[0].message if caught else "", flush=True)
        status = 0
    finally:
        os._exit(status)
assert os.waitpid(child, 0)[1] == 0
assert engine.generate(prompts, 8, plain) == expected[0]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_process_generates_the_same_and_says_what_it_lost(threads):
    """With the threads of the parent torch would wait for ever in the child."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(threads)], capture_output=True, text=True, timeout=300, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    if threads == 1:
        assert done.stdout.split() == ["[]"]
    else:
        assert "['RuntimeWarning', 'RuntimeWarning']" in done.stdout
        assert "generate uses 1 thread here. Start processes by spawn, not fork, to use 2." in done.stdout
