"""llama.cpp by its C interface: a prompt is computed once and its cache shared by the group, one token per live row and
decode call, rows leave the batch as they end. The cache is kept in fp16, llama.cpp's default.

The model is a GGUF file without a tokenizer (sagc_fast.bench.gguf_export makes it).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from peer_worker import Run, serve

MAX_BATCH_TOKENS = 2048
CELL_MULTIPLE = 256
"""llama.cpp's cache comes in multiples of so many tokens."""


def load(settings: dict[str, Any]) -> Run:
    import llama_cpp as api
    import numpy as np

    silent = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(silent, None)
    api.llama_backend_init()
    model_options = api.llama_model_default_params()
    model_options.n_gpu_layers = 0
    model = api.llama_model_load_from_file(settings["model"].encode(), model_options)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {settings['model']}")
    vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    class Session:
        """A context with room for ``num_cells`` tokens, and its batch."""

        def __init__(self, num_cells: int) -> None:
            self.num_cells = -(-num_cells // CELL_MULTIPLE) * CELL_MULTIPLE
            options = api.llama_context_default_params()
            options.n_ctx, options.n_seq_max, options.n_batch = self.num_cells, settings["max_rows"], MAX_BATCH_TOKENS
            options.n_threads = options.n_threads_batch = settings["threads"]
            options.kv_unified = True  # rows share a prompt's cells; a stream per row would copy them
            self.context = api.llama_init_from_model(model, options)
            if not self.context:
                raise SystemExit(f"llama.cpp made no context for {self.num_cells} tokens")
            self.memory = api.llama_get_memory(self.context)
            self.batch = api.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)

        def decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> np.ndarray:
            """Logits, one row for each (token, position, row, wants logits) that wants them."""
            self.batch.n_tokens = len(tokens)
            for i, (token, position, row, wants) in enumerate(tokens):
                self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, position, wants
                self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, row
            if status := api.llama_decode(self.context, self.batch):
                raise SystemExit(f"llama_decode returned {status} for {len(tokens)} tokens")
            num_wanted = sum(wants for _, _, _, wants in tokens)
            return np.ctypeslib.as_array(api.llama_get_logits(self.context), (num_wanted, vocab_size))

        def close(self) -> None:
            api.llama_batch_free(self.batch)
            api.llama_free(self.context)

    session = Session(CELL_MULTIPLE)

    def run(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal session
        prompts, lengths = request["prompts"], request["lengths"]
        num_cells = sum(map(len, prompts)) + sum(map(sum, lengths)) + CELL_MULTIPLE
        if session.num_cells < num_cells:
            session.close()
            session = Session(num_cells)
        random = np.random.default_rng(request["seed"])
        wall, cpu = time.perf_counter(), time.process_time()  # without making the context
        made, steps, row_steps = _rollout(api, session, prompts, lengths, random)
        elapsed = {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        return {
            "lengths": made, "steps": steps, "row_steps": row_steps, "prefill_tokens": sum(map(len, prompts)), **elapsed
        }  # fmt: skip

    return run


def _rollout(
    api: Any, session: Any, prompts: list[list[int]], lengths: list[list[int]], random: Any
) -> tuple[list[list[int]], int, int]:
    """(tokens made of each completion, decode calls after the prompts, rows sampled in all)."""
    api.llama_memory_clear(session.memory, True)
    made = [[0] * len(group) for group in lengths]
    live: list[tuple[int, int, int, int]] = []  # prompt, place in its group, row, last token
    row = 0
    for p, (prompt, group) in enumerate(zip(prompts, lengths, strict=True)):
        leader = row
        for start in range(0, len(prompt), MAX_BATCH_TOKENS):
            part = prompt[start : start + MAX_BATCH_TOKENS]
            ends = [start + i == len(prompt) - 1 for i in range(len(part))]
            logits = session.decode([(t, start + i, leader, ends[i]) for i, t in enumerate(part)])
        for i, token in enumerate(_sample(logits.repeat(len(group), axis=0), random)):
            if i:
                api.llama_memory_seq_cp(session.memory, leader, row, -1, -1)
            live.append((p, i, row, token))
            made[p][i] = 1
            row += 1
    steps, row_steps = 0, len(live)
    while live := _still_live(api, session, live, made, lengths):
        tokens = [(token, len(prompts[p]) + made[p][i] - 1, row, True) for p, i, row, token in live]
        drawn = []
        for start in range(0, len(tokens), MAX_BATCH_TOKENS):
            drawn += _sample(session.decode(tokens[start : start + MAX_BATCH_TOKENS]), random)
        steps += 1
        row_steps += len(live)
        for place, (p, i, row, _) in enumerate(live):
            made[p][i] += 1
            live[place] = (p, i, row, drawn[place])
    return made, steps, row_steps


def _still_live(
    api: Any, session: Any, live: list[tuple[int, int, int, int]], made: list[list[int]], lengths: list[list[int]]
) -> list[tuple[int, int, int, int]]:
    """Those short of their length; the others give their cells back."""
    for p, i, row, _ in live:
        if made[p][i] == lengths[p][i]:
            api.llama_memory_seq_rm(session.memory, row, -1, -1)
    return [member for member in live if made[member[0]][member[1]] < lengths[member[0]][member[1]]]


def _sample(logits_NV: Any, random: Any) -> list[int]:
    """One token a row at temperature 1 over the whole vocabulary, by the Gumbel trick."""
    import numpy as np

    noise_NV = random.random(logits_NV.shape, dtype=np.float32)
    np.log(noise_NV, out=noise_NV)
    np.log(-noise_NV, out=noise_NV)
    return (logits_NV - noise_NV).argmax(axis=1).tolist()


if __name__ == "__main__":
    serve(load, ("llama_cpp_python",))
