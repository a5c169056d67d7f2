"""The model as it stands, through the Triton kernels: the engine's tokens and a training step's gradients."""

from __future__ import annotations

import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from sagc_fast import RolloutEngine, SamplingParams, ops
from sagc_fast.algo.config import DAPO
from sagc_fast.algo.loss import linear_policy_loss
from sagc_fast.ops.layouts import PagedLayout
from sagc_fast.rollout.kv_cache import KVCache
from sagc_fast.train.packing import PackItem, build_micro_batch


def test_engine_draws_the_tokens_of_plain_torch(tiny_model, device: torch.device) -> None:
    prompts, params = [list(range(18)), [5, 6, 7]], SamplingParams(max_new_tokens=2, seed=3, ignore_eos=True)

    def tokens(backend: str) -> list[list[int]]:
        with ops.use_backend(backend):
            engine = RolloutEngine(tiny_model("qwen3", num_layers=1).to(device), kv_budget_gb=0.001)
            groups = engine.generate(prompts, group_size=[2, 1], params=params)
        return [completion.token_ids for group in groups for completion in group.completions]

    assert tokens("triton") == tokens("torch")


def test_a_layer_of_a_decode_step_is_five_launches_beside_its_products(tiny_model, device, monkeypatch) -> None:
    kind = InterpretedFunction if device.type == "cpu" else JITFunction
    launch, launched = kind.run, []
    monkeypatch.setattr(
        kind, "run", lambda self, *a, **k: (launched.append(self.fn.__name__), launch(self, *a, **k))[1]
    )

    def of_layers(num_layers: int) -> list[str]:
        model = tiny_model("llama", num_layers=num_layers).to(device)
        config = model.config
        kv = KVCache(num_layers, 4, 16, config.num_kv_heads, config.head_dim, device=device)
        rows = torch.arange(3, device=device)
        int32 = rows.int()
        layout = PagedLayout(
            rows * 0 + 16, torch.arange(4, device=device).int(), int32 * 0 + 17, torch.stack((int32 * 0, int32 + 1), 1),
            16 + 16 * rows, rows, int32 * 0, int32 * 0 + 1, max_query_len=1, max_context_len=17,
        )  # fmt: skip
        launched.clear()
        with ops.use_backend("triton"):
            assert torch.isfinite(model.forward_paged(rows, layout, kv)).all()
        return list(launched)

    one, two = of_layers(1), of_layers(2)
    assert one[:2] == ["rms_norm_kernel", "decode_plan_kernel"]
    attention = ["group_decode_kernel", "paged_decode_kernel"]
    assert one[2:] == [*attention, "rms_norm_kernel", "silu_mul_kernel", "rms_norm_kernel"]
    assert two == one + one[2:]


def test_training_step_has_the_gradients_of_plain_torch(tiny_model, device: torch.device) -> None:
    items = [PackItem(list(range(9)), [[3, 4, 5], [6], [8, 9]], [0, 1, 2])]
    batch = build_micro_batch(items, device)
    old = torch.full((len(batch.targets_N),), -5.0, device=device)
    advantages = torch.tensor([1.0, -1.0, 0.5], device=device)

    def gradients(backend: str) -> list[torch.Tensor]:
        model = tiny_model("qwen2", num_layers=1).to(device)
        with ops.use_backend(backend):
            hidden_NE = model.forward_packed(batch.token_ids_T, batch.layout).index_select(0, batch.source_rows_N)
            output, _ = linear_policy_loss(
                hidden_NE, model.lm_head_weight, batch.targets_N, old, advantages, batch.completion_index_N,
                temperature=1.0, config=DAPO, normalizer=6.0,
            )  # fmt: skip
            output.loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for found, wanted in zip(gradients("triton"), gradients("torch"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
