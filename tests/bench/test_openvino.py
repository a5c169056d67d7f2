"""The OpenVINO peer on a stand-in of its two packages: what it is told, and that every completion gets its length."""

from __future__ import annotations

import json
import sys

import pytest

from sagc_fast.bench.engines import ENGINES, PEERS
from sagc_fast.bench.worker import Worker

FAKE_API = """
import json, pathlib
class Options: pass
class SchedulerConfig(Options): pass
class GenerationConfig(Options): pass
class Output:
    def __init__(self): self.generated_ids = []
class Handle:
    def __init__(self, prompt, how): self.prompt, self.how, self.output = prompt, how, Output()
    def read_all(self): return [self.output]
    @property
    def is_over(self): return len(self.output.generated_ids) == self.how.max_new_tokens
class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, properties):
        said = {"properties": properties, "scheduler": vars(scheduler)}
        pathlib.Path(__file__).with_name("said.json").write_text(json.dumps(said))
        self.handles = []
    def add_request(self, request_id, prompt, how):
        assert how.ignore_eos and how.temperature == 1.0
        self.handles.append(Handle(prompt.data.tolist()[0], how))
        return self.handles[-1]
    def step(self):
        for handle in self.handles:
            if not handle.is_over:
                handle.output.generated_ids.append(7)
    def has_non_finished_requests(self): return not all(handle.is_over for handle in self.handles)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """``start(dtype=..., kv_dtype=...)``: a worker, and what its pipeline was told."""
    (tmp_path / "openvino_genai.py").write_text(FAKE_API)
    (tmp_path / "openvino.py").write_text("class Tensor:\n    def __init__(self, data): self.data = data\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    workers = []

    def begin(**options):
        settings = {"model": "exported", "threads": 1, "max_rows": 8, "kv_gb": 1, **options}
        workers.append(Worker("openvino", sys.executable, PEERS / ENGINES["openvino"].script, settings).__enter__())
        return workers[-1], json.loads((tmp_path / "said.json").read_text())

    yield begin
    for worker in workers:
        worker.__exit__(None, None, None)


def test_every_completion_gets_its_length(start):
    worker, said = start(dtype="fp32", kv_dtype=None)
    lengths = [[3, 1, 5], [2, 2]]
    answer = worker.rollout([[1, 2, 3], [4] * 3000], lengths, seed=1)  # a worker refuses other lengths than these
    assert answer["steps"] == 7  # two for the leaders' prompts, of at most 2,048 tokens each, then five for the longest
    assert said["scheduler"]["enable_prefix_caching"]
    assert said["scheduler"]["max_num_seqs"] == 8


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "told"),
    [
        ("fp32", None, {"INFERENCE_PRECISION_HINT": "f32"}),  # its own choice: 8 bits
        ("fp32", "fp32", {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}),
        ("fp32", "fp16", {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"}),
        ("bf16", "bf16", {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}),
    ],
)
def test_the_pipeline_is_told_the_dtypes(start, dtype, kv_dtype, told):
    _, said = start(dtype=dtype, kv_dtype=kv_dtype)
    assert said["properties"] == told | {"INFERENCE_NUM_THREADS": 1}
