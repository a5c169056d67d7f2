"""A model whose next-token distribution is a hash of the whole context as read back from the KV cache.

A block that is missing, stale, copied wrongly or shared wrongly changes every later token, so tests of the scheduler,
the block tables and preemption need no real weights to see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sagc_fast import ops
from sagc_fast.rollout import step_cost
from sagc_fast.rollout.engine import BYTES_PER_GB, RolloutEngine
from sagc_fast.rollout.noise import uniforms
from sagc_fast.types import Group, SamplingParams

VOCAB_SIZE = 29
EOS = 28
_HASH_BITS = 24


def context_hash(token_ids: Sequence[int]) -> int:
    """A number below 2**24 (exact in fp32) that depends on every token and its place."""
    state = 1
    for token_id in token_ids:
        state = (state * 1_000_003 + token_id + 7) % (2**61 - 1)
    return state % 2**_HASH_BITS


class LetterTokenizer:
    """One letter per token id of the ContextHashModel; the end token is special."""

    eos_token_id = EOS

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return "".join("" if i == EOS and skip_special_tokens else chr(ord("A") + i) for i in token_ids)


class ContextHashModel:
    """Stands in for the Transformer; checks the layout it is given on every step.

    ``memory``: the distribution depends on that many last tokens alone, so that texts repeat themselves and each other,
    the more the higher ``sharpness``; None: on the whole context.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, context_length: int = 128, memory: int | None = None, sharpness: float = 1.0) -> None:
        self.memory = memory
        self.sharpness = sharpness
        self.config = SimpleNamespace(
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=context_length,
            num_layers=1,
            num_kv_heads=1,
            head_dim=2,
            eos_token_ids=(EOS,),
        )
        self.num_tokens = 0
        self.largest_step = 0
        self.num_copied_rows = 0

    def forward_paged(self, token_ids_T: torch.Tensor, layout: Any, kv: Any) -> torch.Tensor:
        tokens, positions = token_ids_T.numpy(), layout.positions_T.numpy()
        tables, ends = layout.block_tables_SB.numpy(), layout.cu_query_S1.numpy()
        lengths, slots = layout.context_lens_S.numpy(), layout.slots_T.numpy()
        size = kv.block_size
        assert ends[-1] == tokens.size == positions.size == slots.size
        assert np.unique(slots).size == slots.size, "two tokens are written to one slot"
        assert layout.max_query_len == np.diff(ends).max()
        assert layout.max_context_len == lengths.max()
        assert (np.diff(ends)[: layout.first_chunk] == 1).all()
        assert (np.diff(ends)[layout.first_chunk :] > 1)[:1].all(), "a decode row is taken for the first chunk"
        self.num_tokens += tokens.size
        self.largest_step = max(self.largest_step, tokens.size)
        keys, values = kv.k(0).numpy(), kv.v(0).numpy()
        keys[slots // size, 0, slots % size, 0] = tokens
        values[slots // size, 0, slots % size, 0] = positions
        hidden = np.full((tokens.size, 1), -1.0, dtype=np.float32)
        wanted = set(layout.logits_rows_R.tolist())
        for s, length in enumerate(lengths):
            rows = range(ends[s], ends[s + 1])
            assert positions[rows].tolist() == list(range(length - len(rows), length))
            blocks = tables[s, : -(-length // size)]
            held = keys[blocks, 0, :, 0].reshape(-1)[:length]
            assert values[blocks, 0, :, 0].reshape(-1)[:length].tolist() == list(range(length)), "a block is misplaced"
            for row in wanted & set(rows):
                hidden[row] = self.hash(held[: positions[row] + 1].astype(int).tolist())
        self._check_sharing(layout, tables)
        return torch.from_numpy(hidden)[layout.logits_rows_R]

    def hash(self, token_ids: Sequence[int]) -> int:
        return context_hash(token_ids if self.memory is None else token_ids[-self.memory :])

    @staticmethod
    def _check_sharing(layout: Any, tables: np.ndarray) -> None:
        leaders: dict[int, np.ndarray] = {}
        for s, (group, count) in enumerate(
            zip(layout.share_group_S.tolist(), layout.shared_blocks_S.tolist(), strict=True)
        ):
            if group >= 0 and count:
                assert np.array_equal(leaders.setdefault(group, tables[s, :count]), tables[s, :count])

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        assert (hidden_RE >= 0).all(), "a hidden state that was not asked for is used"
        states = hidden_RE.numpy().astype(np.uint64)
        mixed = (
            states * np.uint64(2_654_435_761) + np.arange(VOCAB_SIZE, dtype=np.uint64) * np.uint64(40_503)
        ) * np.uint64(0x9E3779B97F4A7C15)
        return torch.from_numpy((mixed >> np.uint64(40)).astype(np.float32) * np.float32(4.0 * self.sharpness / 2**24))


def sample_alone(
    model: ContextHashModel, prompt: Sequence[int], prompt_id: int, sample_index: int, params: SamplingParams
) -> tuple[list[int], list[float], str]:
    """The reference: one completion, token by token, without cache, batch or scheduler."""
    token_ids, logprobs = [], []
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    room = min(params.max_new_tokens, model.config.max_position_embeddings - len(prompt))
    while True:
        state = model.hash([*prompt, *token_ids])
        noise = uniforms(params.seed, prompt_id, sample_index, len(token_ids)).reshape(1)
        columns = [torch.from_numpy(noise), torch.tensor([params.temperature])]
        if params.is_filtered and params.temperature > 0:
            columns += [torch.tensor([params.top_k]), torch.tensor([params.top_p]), torch.tensor([params.min_p])]
        token, logprob = ops.sample_tokens(model.logits(torch.tensor([[float(state)]])), *columns)
        token_ids.append(int(token))
        logprobs.append(float(logprob))
        text = LetterTokenizer().decode(token_ids, skip_special_tokens=True)
        if token_ids[-1] in ends or any(stop in text for stop in params.stop):
            return token_ids, logprobs, "stop"
        if len(token_ids) == room:
            return token_ids, logprobs, "length"


def outcome(groups: list[Group]) -> list[list[tuple[list[int], list[float], str]]]:
    """What must never depend on the schedule."""
    return [[(c.token_ids, c.logprobs, c.finish_reason) for c in group.completions] for group in groups]


@pytest.fixture(scope="session")
def helpers() -> SimpleNamespace:
    return SimpleNamespace(
        Model=ContextHashModel,
        Tokenizer=LetterTokenizer,
        sample_alone=sample_alone,
        outcome=outcome,
        VOCAB_SIZE=VOCAB_SIZE,
        EOS=EOS,
    )


@pytest.fixture(scope="session")
def engine_with_blocks() -> Callable[..., RolloutEngine]:
    """``engine_with_blocks(model, 12, block_size=4)``: an engine whose budget is exactly that many KV blocks."""

    def make(model: Any, num_blocks: int, **settings: Any) -> RolloutEngine:
        engine = RolloutEngine(model, **settings)
        engine.kv_budget_gb = (num_blocks + 0.5) * engine.bytes_per_block() / BYTES_PER_GB
        return engine

    return make


@pytest.fixture(scope="module")
def tiny_models_draft():
    """Drafts would not pay for the native steps of a tiny model: let those cost as much as a plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_cost, "HOST_SECONDS_IN_BURSTS", step_cost.HOST_SECONDS)
        patch.setattr(step_cost, "PLAN_SECONDS", 0.0)
        yield
