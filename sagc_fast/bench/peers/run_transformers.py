"""transformers' ``generate``: one left-padded batch, prompts repeated G times, rows held until the last one ends."""

from __future__ import annotations

from typing import Any

from allocator import keep_freed_memory
from peer_worker import Run, serve

PAD = 3


def load(settings: dict[str, Any]) -> Run:
    import torch
    import transformers

    torch.set_num_threads(settings["threads"])
    transformers.logging.set_verbosity_error()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings["dtype"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()

    class AtItsLength(transformers.StoppingCriteria):
        """A row is done at its forced length; the batch goes on until all are."""

        def __init__(self, prompt_length: int, lengths: list[int]) -> None:
            self.ends = torch.tensor(lengths) + prompt_length

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            return input_ids.shape[1] >= self.ends

    def run(request: dict[str, Any]) -> dict[str, Any]:
        prompts, lengths = request["prompts"], request["lengths"]
        torch.manual_seed(request["seed"])
        rows = [prompt for prompt, group in zip(prompts, lengths, strict=True) for _ in group]
        flat = [length for group in lengths for length in group]
        width = max(map(len, rows))
        input_ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        # An end-of-sequence id that no row can draw; None would fall back to the model's own.
        how = transformers.GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(flat), eos_token_id=-1,
            pad_token_id=PAD,
        )  # fmt: skip
        with torch.no_grad():
            out = model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                generation_config=how,
                stopping_criteria=transformers.StoppingCriteriaList([AtItsLength(width, flat)]),
            )
        steps = out.shape[1] - width
        made = iter([min(length, steps) for length in flat])  # what lies behind a row's end is padding
        return {
            "lengths": [[next(made) for _ in group] for group in lengths],
            "steps": steps,
            "row_steps": steps * len(rows),
            "prefill_tokens": width * len(rows),
        }

    return run


if __name__ == "__main__":
    keep_freed_memory()
    serve(load, ("transformers", "torch"))
