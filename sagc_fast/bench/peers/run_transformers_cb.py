"""transformers' continuous batching (paged cache, one request per completion)."""

from __future__ import annotations

from typing import Any

from allocator import keep_freed_memory
from peer_worker import Run, serve

PAGE = 64


def load(settings: dict[str, Any]) -> Run:
    import torch
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.set_num_threads(settings["threads"])
    transformers.logging.set_verbosity_error()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings["dtype"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()
    model.set_attn_implementation("sdpa")

    def run(request: dict[str, Any]) -> dict[str, Any]:
        prompts, lengths = request["prompts"], request["lengths"]
        flat = [(prompt, n) for prompt, group in zip(prompts, lengths, strict=True) for n in group]
        # Left to itself it takes 60% of the free memory for the cache: give it what the work needs.
        num_blocks = sum(-(-(len(prompt) + n) // PAGE) for prompt, n in flat) + 8
        batching = ContinuousBatchingConfig(page_size=PAGE, num_blocks=num_blocks, seed=request["seed"])
        how = transformers.GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(n for _, n in flat),
            eos_token_id=-1, pad_token_id=3,
        )  # fmt: skip
        done: dict[str, Any] = {}
        with model.continuous_batching_context_manager(
            generation_config=how, continuous_batching_config=batching, warmup=False
        ) as manager:
            ids = [manager.add_request(prompt, max_new_tokens=n, eos_token_id=-1) for prompt, n in flat]
            while len(done) < len(ids):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = result
                elif result is None and not manager.is_running():
                    raise RuntimeError("the continuous-batching thread ended early")
        made = iter([len(done[i].generated_tokens) for i in ids])
        return {"lengths": [[next(made) for _ in group] for group in lengths]}

    return run


if __name__ == "__main__":
    keep_freed_memory()
    serve(load, ("transformers", "torch"))
