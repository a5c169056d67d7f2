"""llama.cpp as a peer: the GGUF file that is written for it, and the calls that its script makes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from sagc_fast.bench.engines import ENGINES, PEERS
from sagc_fast.bench.gguf_export import export_gguf
from sagc_fast.bench.worker import PeerError, Worker
from sagc_fast.model import gguf
from sagc_fast.model.config import ModelConfig, RopeScaling
from sagc_fast.model.loader import load_model, random_model, save_model
from sagc_fast.model.transformer import Transformer
from sagc_fast.model.weights import weight_slots

SHAPE = ModelConfig(
    family="llama", vocab_size=40, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=5e5,
)  # fmt: skip
SHAPES = {
    "llama": SHAPE,
    "llama tied": dataclasses.replace(SHAPE, tie_word_embeddings=True),
    "llama 3": dataclasses.replace(SHAPE, rope_scaling=RopeScaling(32.0, *gguf.LLAMA3_LOW_HIGH_CONTEXT)),
    "qwen2": dataclasses.replace(SHAPE, family="qwen2", has_qkv_bias=True),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_written_is_read_back_to_the_bit(name, dtype, tmp_path):
    save_model(random_model(SHAPES[name], seed=3), tmp_path / "model")
    path = tmp_path / "model.gguf"
    export_gguf(tmp_path / "model", path, dtype)
    model = load_model(tmp_path / "model", dtype=dtype)
    reader = gguf._open(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = gguf._config(gguf.GGUFMetadata(reader, path), tensors)
    assert config == dataclasses.replace(model.config, eos_token_ids=(), bos_token_id=None, pad_token_id=None)
    again = Transformer(config, torch.float32)
    gguf._fill(again, tensors, path)
    for slot in weight_slots(config):
        assert torch.equal(slot.view(again), slot.view(model).float()), slot.name


FAKE_API = '''
"""As much of llama.cpp's interface as the peer uses, over a model whose next token is surely the sum of all before it.
It holds the caller to the rules: room in the cache, no more tokens than a batch has, positions that go on where a row
stands, and the token that was to be drawn."""
import ctypes
import types
import numpy as np
VOCAB = 11
llama_log_callback = lambda function: function
llama_log_set = lambda callback, data: None
llama_backend_init = lambda: None
llama_model_default_params = lambda: types.SimpleNamespace()
llama_model_load_from_file = lambda path, options: path.endswith(b".gguf")
llama_model_get_vocab = lambda model: model
llama_vocab_n_tokens = lambda vocab: VOCAB
llama_context_default_params = lambda: types.SimpleNamespace()
class Context:
    def __init__(self, options):
        self.options, self.rows, self.next_tokens = options, {}, {}
    @property
    def cells(self):
        return len({cell for row in self.rows.values() for cell, _ in row})
    next_cell = 0
llama_init_from_model = lambda model, options: Context(options)
llama_get_memory = lambda context: context
llama_free = lambda context: None
llama_batch_free = lambda batch: None
def llama_batch_init(size, embedding, rows):
    return types.SimpleNamespace(n_tokens=0, size=size, token=[0] * size, pos=[0] * size, logits=[0] * size,
                                 n_seq_id=[0] * size, seq_id=[[0] for _ in range(size)])
def llama_memory_clear(context, data):
    context.rows.clear()
    context.next_tokens.clear()
def llama_memory_seq_cp(context, source, target, start, end):
    assert target not in context.rows and target < context.options.n_seq_max
    context.rows[target] = list(context.rows[source])
    context.next_tokens[target] = context.next_tokens[source]
def llama_memory_seq_rm(context, row, start, end):
    del context.rows[row]
    context.next_tokens.pop(row)
def llama_decode(context, batch):
    assert context.options.kv_unified and 0 < batch.n_tokens <= batch.size
    logits = []
    for i in range(batch.n_tokens):
        name = batch.seq_id[i][0]
        row = context.rows.setdefault(name, [])
        assert batch.n_seq_id[i] == 1 and batch.pos[i] == len(row), (batch.pos[i], len(row))
        assert batch.token[i] == context.next_tokens.pop(name, batch.token[i])
        row.append((Context.next_cell, batch.token[i]))
        Context.next_cell += 1
        if batch.logits[i]:
            sure = context.next_tokens[name] = sum(token for _, token in row) % VOCAB
            logits.append([0.0 if t == sure else -1e9 for t in range(VOCAB)])
        if context.cells > context.options.n_ctx:
            return 1
    context.logits = np.array(logits, dtype=np.float32)
    return 0
def llama_get_logits(context):
    return context.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
'''


@pytest.fixture
def worker(tmp_path, monkeypatch):
    (tmp_path / "llama_cpp.py").write_text(FAKE_API)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = {"model": "some.gguf", "dtype": "fp32", "threads": 1, "max_rows": 8}
    with Worker("llamacpp", sys.executable, PEERS / ENGINES["llamacpp"].script, settings) as started:
        yield started


def test_every_completion_gets_its_length_and_prompts_are_computed_once(worker):
    prompts = [list(range(1, 7)), [3] * 2100]  # the second is longer than a batch
    lengths = [[1, 4, 2], [5, 1]]
    answer = worker.rollout(prompts, lengths, seed=1)
    assert answer["prefill_tokens"] == 2106
    assert answer["steps"] == 4
    assert answer["row_steps"] == sum(map(sum, lengths))
    assert answer["cpu_seconds"] > 0
    assert worker.rollout(prompts, lengths, seed=1)["steps"] == 4, "the cache is cleared between runs"


def test_a_file_that_llama_cpp_does_not_load_is_said(tmp_path, monkeypatch):
    (tmp_path / "llama_cpp.py").write_text(FAKE_API)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = {"model": "some.bin", "dtype": "fp32", "threads": 1, "max_rows": 8}
    with pytest.raises(PeerError, match=r"cannot load some\.bin"):
        Worker("llamacpp", sys.executable, Path(PEERS / "run_llamacpp.py"), settings)
