"""OpenVINO GenAI's continuous batching on an exported model (run_openvino_export.py makes it)."""

from __future__ import annotations

import os
from typing import Any

from peer_worker import Run, serve

MAX_BATCH_TOKENS = 2048


def load(settings: dict[str, Any]) -> Run:
    if settings["dtype"] == "bf16" and settings["threads"] == 1:
        # With AMX, bf16 on one thread dies of SIGFPE (2026.4): leave AMX out then.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = max(1, round(settings["kv_gb"]))
    scheduler.max_num_seqs = settings["max_rows"]
    scheduler.max_num_batched_tokens = MAX_BATCH_TOKENS
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties = {
        "INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16"}[settings["dtype"]],
        "INFERENCE_NUM_THREADS": settings["threads"],
    }
    if settings["kv_dtype"] is not None:  # else 8 bits
        properties["KV_CACHE_PRECISION"] = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}[settings["kv_dtype"]]
    pipeline = genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
    next_id = 0

    def add(prompt: list[int], length: int) -> Any:
        nonlocal next_id
        how = genai.GenerationConfig()
        how.do_sample, how.temperature, how.top_p, how.top_k = True, 1.0, 1.0, 0
        how.max_new_tokens, how.ignore_eos, how.rng_seed = length, True, next_id
        next_id += 1
        return pipeline.add_request(next_id, ov.Tensor(np.array([prompt], dtype=np.int64)), how)

    def run(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal next_id
        prompts, lengths = request["prompts"], request["lengths"]
        next_id += request["seed"]
        steps = 0
        # Requests queued in one step do not share a prefix: let one leader per prompt go first (1.8x faster).
        handles = [[add(prompt, group[0])] for prompt, group in zip(prompts, lengths, strict=True)]
        for _ in range(-(-sum(map(len, prompts)) // MAX_BATCH_TOKENS)):
            pipeline.step()
            steps += 1
        for prompt, group, held in zip(prompts, lengths, handles, strict=True):
            held += [add(prompt, length) for length in group[1:]]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            steps += 1
        made = [[len(handle.read_all()[0].generated_ids) for handle in held] for held in handles]
        return {"lengths": made, "steps": steps}

    return run


if __name__ == "__main__":
    serve(load, ("openvino-genai", "openvino"))
