"""transformers' ``generate`` on the very tensors of our model, with forced lengths."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gpu.device import DEVICE, DTYPE


class Peer:
    """The transformers model of a :class:`~sagc_fast.model.transformer.Transformer`, on the same tensors."""

    def __init__(self, model: Any) -> None:
        import transformers

        from sagc_fast.model.weights import weight_slots

        transformers.logging.set_verbosity_error()
        self.pad = model.config.pad_token_id or 0
        with tempfile.TemporaryDirectory() as folder:
            fields = model.config.to_hf_dict(str(DTYPE).removeprefix("torch."))
            (Path(folder) / "config.json").write_text(json.dumps(fields))
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device(DEVICE):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE, attn_implementation="sdpa")
        ours = {slot.name: torch.nn.Parameter(slot.view(model), False) for slot in weight_slots(model.config)}
        missing, unexpected = self.model.load_state_dict(ours, strict=False, assign=True)
        self.model.tie_weights()
        self.model.eval()
        wrong = [name for name in (*missing, *unexpected) if name != "lm_head.weight"]
        embedding = self.model.get_input_embeddings().weight
        if wrong or embedding.data_ptr() != model.embed_weight.data_ptr():
            raise RuntimeError(f"transformers did not take the weights in place ({', '.join(wrong) or 'embedding'})")

    @torch.no_grad()
    def generate(self, prompts: Sequence[list[int]], lengths: list[list[int]], batch: int) -> None:
        """Sample every completion to its length, ``batch`` rows at a time, left-padded; a batch lasts as long as its
        longest row. Raises RuntimeError when it ends at another length."""
        import transformers

        rows = [(prompt, n) for prompt, group in zip(prompts, lengths, strict=True) for n in group]
        for begin in range(0, len(rows), batch):
            part = rows[begin : begin + batch]
            width, longest = max(len(prompt) for prompt, _ in part), max(n for _, n in part)
            ids = torch.tensor([[self.pad] * (width - len(p)) + p for p, _ in part], device=DEVICE)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in part], device=DEVICE)
            ends = torch.tensor([n for _, n in part], device=DEVICE) + width

            class AtItsLength(transformers.StoppingCriteria):
                def __call__(self, input_ids: torch.Tensor, scores: Any, ends: Any = ends, **_: Any) -> torch.Tensor:
                    return input_ids.shape[1] >= ends

            how = transformers.GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, eos_token_id=-1,
                pad_token_id=self.pad,
            )  # fmt: skip
            stop = transformers.StoppingCriteriaList([AtItsLength()])
            out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=how, stopping_criteria=stop)
            if out.shape[1] - width != longest:
                raise RuntimeError(f"transformers made {out.shape[1] - width} tokens where {longest} were forced")
