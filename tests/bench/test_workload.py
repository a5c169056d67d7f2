"""The workload is the same everywhere and forever, and counts what its documentation says."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagc_fast.bench import bound
from sagc_fast.bench.ceilings import Ceilings, Rate
from sagc_fast.bench.models import SHAPES, Shape, model_folder, shape_of
from sagc_fast.bench.workload import Workload
from sagc_fast.errors import ConfigError, ModelLoadError


def test_sizes_of_the_default_workload():
    about = Workload().describe()
    assert about["completions"] == 128
    assert about["output_tokens"] == 8113
    assert about["unique_prompt_tokens"] == 1110
    assert about["repeated_prompt_tokens"] == 17760
    assert about["lock_step_idle"] == pytest.approx(0.7524)


def test_sizes_of_the_large_models_workloads():
    kind = {"mean_length": 32.0, "max_length": 128}
    assert Workload(**kind).describe()["output_tokens"] == 4093
    assert Workload(num_prompts=4, group_size=8, **kind).describe()["output_tokens"] == 1007


def test_the_draws_are_pinned():
    text = json.dumps([Workload().prompts(), Workload().lengths()])
    assert hashlib.sha256(text.encode()).hexdigest().startswith(PINNED)


PINNED = "0b163e86b3133f98"


def test_runs_differ_in_ids_alone():
    first, second = Workload().prompts(1), Workload().prompts(2)
    assert [len(ids) for ids in first] == [len(ids) for ids in second]
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert all(4 <= i < 4096 for ids in second for i in ids)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 5))
def test_live_rows_add_up_to_the_output_tokens(num_prompts, group_size, seed):
    workload = Workload(num_prompts, group_size, seed=seed)
    rows = workload.live_rows()
    assert sum(rows) == workload.describe()["output_tokens"]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] == num_prompts * group_size


@pytest.mark.parametrize("wrong", [{"num_prompts": 0}, {"group_size": 0}, {"max_length": 4}, {"mean_length": 300.0}])
def test_a_workload_without_work_is_refused(wrong):
    with pytest.raises(ConfigError, match="workload's"):
        Workload(**wrong)


TINY = Shape(width=4, layers=2, heads=2, kv_heads=1, head_dim=2, hidden=6, vocab=10)


def test_arithmetic_by_hand():
    """qkv 8 x 4, output 4 x 4, gate and up 12 x 4, down 4 x 6 in two layers; head 10 x 4."""
    per_layer = 2 * (8 * 4 + 4 * 4 + 12 * 4 + 4 * 6)
    assert TINY.layer_flops_per_token() == 2 * per_layer
    assert TINY.head_flops_per_row() == 80
    assert TINY.weight_elements == per_layer + 40
    # A prompt of 3, completions of 1 and 2: tokens 3 + 0 + 1; rows 3; pairs 1+2+3 in the prompt and 4 for the second.
    flops = bound.rollout_flops(TINY, [3], [[1, 2]])
    assert flops == 4 * 2 * per_layer + 3 * 80 + 4 * (6 + 4) * 2 * 2 * 2


def test_the_bound_is_weights_over_bandwidth_plus_arithmetic_over_rate():
    ceilings = Ceilings(Rate(10.0, 20.0), {"bf16": Rate(100.0, 200.0)}, rows=1, shapes=[])
    limit = bound.rollout_bound(TINY, "bf16", ceilings, steps=3, flops=1000.0, clock="cpu")
    assert limit.weight_seconds == pytest.approx(2 * TINY.weight_elements * 3 / 20)
    assert limit.arithmetic_seconds == pytest.approx(5.0)
    assert limit.seconds == pytest.approx(limit.weight_seconds + 5.0)


def test_a_made_model_is_one_that_loads_and_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGC_BENCH_CACHE", str(tmp_path))
    monkeypatch.setitem(SHAPES, "S", SHAPES["S"] | {"num_layers": 1})
    folder = model_folder("S", "bf16")
    assert shape_of(folder) == Shape(width=288, layers=1, heads=6, kv_heads=6, head_dim=48, hidden=768, vocab=4096)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert model_folder("S", "bf16") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == ["S-bf16"]


def test_a_model_that_is_not_there_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="sagc-fast fetch smollm2"):
        model_folder("smollm2", "fp32")
    with pytest.raises(ModelLoadError, match="give S, M, smollm2 or a model folder"):
        model_folder("nowhere", "fp32")


def test_a_vocabulary_too_small_for_the_prompts_is_refused():
    from sagc_fast.tasks.addition import policy_folder

    with pytest.raises(ConfigError, match="4,096 ids"):
        model_folder(str(policy_folder()), "fp32")
