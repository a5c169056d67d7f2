"""The sampling parameters: numbers of any kind in, plain numbers kept, nonsense refused in one sentence."""

from __future__ import annotations

import numpy as np
import pytest

from sagc_fast.errors import PromptError
from sagc_fast.types import SamplingParams


def test_numpy_numbers_are_taken_as_plain_ones():
    params = SamplingParams(
        temperature=np.float32(0.5), max_new_tokens=np.int64(3), seed=np.int64(7), stop_token_ids=[np.int32(2)]
    )
    assert params == SamplingParams(temperature=0.5, max_new_tokens=3, seed=7, stop_token_ids=(2,))
    assert {type(params.seed), type(params.max_new_tokens), type(params.stop_token_ids[0])} == {int}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", 1e-38),
        ("temperature", 2e6),
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
        ("max_new_tokens", 2.5),
        ("seed", -1),
        ("top_k", None),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("ignore_eos", "no"),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", ["a"]),
    ],
)
def test_what_cannot_be_used_is_named(name, value):
    with pytest.raises(PromptError, match=rf"SamplingParams\.{name} is "):
        SamplingParams(**{name: value})
