"""Greedy decoding against transformers.generate, token for token, for models that transformers made."""

from __future__ import annotations

import pytest
import torch

from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.types import SamplingParams

SHAPES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "eos_token_id": [2, 11]}),
    ("qwen2", {"num_key_value_heads": 1}),
    ("qwen3", {"num_hidden_layers": 3}),
]


@pytest.mark.parametrize(("family", "fields"), SHAPES)
def test_unequal_prompts_in_one_batch_give_the_tokens_of_transformers(hf_folder, family, fields):
    from transformers import AutoModelForCausalLM

    folder = hf_folder(family, seed=7, **fields)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 5, 16, 17, 40, 63)]
    expected = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        output = reference.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=40)
        expected.append(output[0, len(prompt) :].tolist())
    engine = RolloutEngine.from_pretrained(folder, kv_budget_gb=0.1, max_batch_tokens=50)
    groups = engine.generate(prompts, 2, SamplingParams(temperature=0, max_new_tokens=40))
    assert [c.token_ids for group in groups for c in group.completions] == [t for t in expected for _ in range(2)]
    ends = {2, 11} if "eos_token_id" in fields else {2}
    for group in groups:
        for completion in group.completions:
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] in ends else "length")
            assert completion.text is None
