"""This package's engine, in a process of its own like every peer, so that its memory and CPU seconds are its own."""

from __future__ import annotations

from typing import Any

from peer_worker import Run, serve


def load(settings: dict[str, Any]) -> Run:
    import torch

    from sagc_fast import RolloutEngine, SamplingParams

    torch.set_num_threads(settings["threads"])
    engine = RolloutEngine.from_pretrained(
        settings["model"],
        dtype=settings["dtype"],
        kv_dtype=settings["kv_dtype"],
        threads=settings["threads"],
        max_num_seqs=settings["max_rows"],
        kv_budget_gb=settings["kv_gb"],
    )

    def run(request: dict[str, Any]) -> dict[str, Any]:
        prompts, lengths = request["prompts"], request["lengths"]
        params = [
            [SamplingParams(max_new_tokens=length, ignore_eos=True, seed=request["seed"]) for length in group]
            for group in lengths
        ]
        groups = engine.generate(prompts, [len(group) for group in lengths], params)
        stats = engine.stats
        engine.reset()
        return {
            "lengths": [group.lengths for group in groups],
            "steps": stats.num_steps,
            "row_steps": sum(stats.active_rows) + stats.num_draft_tokens,
            "prefill_tokens": stats.num_prefill_tokens,
            "active_rows": stats.active_rows,
            "kv_bytes": stats.kv_bytes_total,
            "seconds": {name: getattr(stats, f"{name}_seconds") for name in ("prefill", "decode", "sample", "host")},
        }

    return run


if __name__ == "__main__":
    serve(load, ("sagc_fast", "torch"))
