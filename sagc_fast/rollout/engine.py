"""The rollout engine: prompts in, groups of completions out, from one copy of the policy."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from sagc_fast import ops
from sagc_fast.errors import ConfigError, KVBudgetError
from sagc_fast.rollout.call import Call, CallSettings, OnGroup
from sagc_fast.rollout.decode_graphs import GRAPHS_MODES, DecodeGraphs, GraphsMode, burst_device
from sagc_fast.rollout.device import made_current
from sagc_fast.rollout.divergence import divergence_named
from sagc_fast.rollout.kv_cache import KVCache, dtype_of
from sagc_fast.rollout.lengths import LengthHistory
from sagc_fast.rollout.request import ParamsArgument, Prompt, PromptRequest, check_request
from sagc_fast.rollout.speculation import SPECULATION_MODES, Speculation, SpeculationMode
from sagc_fast.rollout.step_cost import roofline
from sagc_fast.rollout.stop import Detokenizer
from sagc_fast.rollout.threads import MAX_THREADS, torch_threads
from sagc_fast.types import Group, RolloutStats, SamplingParams

BYTES_PER_GB = 10**9
BYTES_PER_MB = 10**6


class RolloutEngine:
    """Samples groups of completions; weights may change between calls (in place), never during one.

    In fp32 on the CPU with the native operators a completion's tokens and log-probs depend, bit for bit, on the
    weights, its prompt, its sampling parameters and its noise key (seed, prompt id, sample index) alone: not on batch
    order, group sizes, chunking, preemption, memory or the number of rows. Elsewhere that holds up to rounding.

    Args:
        model: a :class:`sagc_fast.model.transformer.Transformer`; its weights are read, never copied.
        tokenizer: needed for string prompts, stop strings and ``Completion.text``.
        kv_budget_gb: most memory for keys and values, in 10**9 bytes; less is taken when a call needs less.
        block_size: tokens per KV block.
        max_num_seqs: most completions that run at once. At most ``max_batch_tokens`` do.
        max_batch_tokens: most tokens of one step, decode rows and prefill chunks together.
        threads: torch's intra-op threads during ``generate``, restored afterwards; None leaves them alone.
        kv_dtype: ``fp32``, ``bf16`` or ``fp16``; None: the model's.
        eos_token_ids: ids that end a completion; None: those of the model's configuration, else the tokenizer's.
        speculation: tokens of the last rows are drafted from what the prompt's completions have in common and several
            of a row computed in one step, without changing any; see :class:`sagc_fast.rollout.speculation.Speculation`
            for ``auto``, ``fixed`` and ``off``. Only on the CPU, whose costs are known.
        graphs: on a GPU, decode steps are replayed as CUDA graphs (``auto``) or run operator by operator (``off``); no
            token changes. Without Triton, and on the CPU, there are none.
        draft_recall_mb: memory for completions of earlier calls, in 10**6 bytes, from which a call with the same prompt
            drafts too; 0 keeps none.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        kv_budget_gb: float = 2.0,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_batch_tokens: int = 2048,
        threads: int | None = None,
        kv_dtype: str | torch.dtype | None = None,
        eos_token_ids: Sequence[int] | None = None,
        speculation: SpeculationMode = "auto",
        draft_recall_mb: float = 0.0,
        graphs: GraphsMode = "auto",
    ) -> None:
        sizes = {"block_size": block_size, "max_num_seqs": max_num_seqs, "max_batch_tokens": max_batch_tokens}
        for name, value in (*sizes.items(), ("threads", 1 if threads is None else threads)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be an integer >= 1.")
        if threads is not None and threads > MAX_THREADS:
            raise ConfigError(
                f"threads is {threads}; it must be at most {MAX_THREADS}, and no more than there are cores."
            )
        if not (_is_number(kv_budget_gb) and kv_budget_gb > 0):
            raise ConfigError(f"kv_budget_gb is {kv_budget_gb!r}; it must be a number of gigabytes above 0.")
        if not (_is_number(draft_recall_mb) and draft_recall_mb >= 0):
            raise ConfigError(f"draft_recall_mb is {draft_recall_mb!r}; it must be a number of megabytes, 0 for none.")
        if speculation not in SPECULATION_MODES:
            raise ConfigError(f"speculation is {speculation!r}; it must be one of {', '.join(SPECULATION_MODES)}.")
        if graphs not in GRAPHS_MODES:
            raise ConfigError(f"graphs is {graphs!r}; it must be one of {', '.join(GRAPHS_MODES)}.")
        self.model = model
        self.tokenizer = tokenizer
        self.kv_budget_gb = kv_budget_gb
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.threads = threads
        self.kv_dtype = model.dtype if kv_dtype is None else dtype_of(kv_dtype)
        self.eos_token_ids = (
            _eos_token_ids(model, tokenizer) if eos_token_ids is None else _checked_ids(eos_token_ids, model)
        )
        self.policy_version = 0
        """Optimizer steps behind the weights: each :meth:`reset` adds one. Stamped on every group."""
        self.stats = RolloutStats()
        """Of the last call that finished."""
        self.lengths = LengthHistory()
        """Lengths per prompt seen so far; guides the order of admission, never the tokens."""
        # Elsewhere a plan with drafts is no graph, and the host's clock does not say what the device takes.
        mode = speculation if model.device.type == "cpu" else "off"
        has_bursts = isinstance(model, torch.nn.Module) and ops.has_decoder(
            model.device.type, model.dtype, self.kv_dtype
        )
        self._speculation = Speculation(
            mode, *_roofline(model, has_bursts), int(draft_recall_mb * BYTES_PER_MB), has_bursts
        )
        self._kv: KVCache | None = None
        device = burst_device(model.device, model.dtype)
        self._graphs = None if device is None else DecodeGraphs(device, graphs)
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._running: dict[str, object] = {}
        """A mark of the call in progress, which alone takes it out again: an interrupt may come behind any function
        call, also one that has just acquired a lock."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: str = "fp32",
        device: str = "cpu",
        kv_budget_gb: float = 2.0,
        threads: int | None = None,
        **settings: Any,
    ) -> RolloutEngine:
        """Load a Hugging Face model folder. ``dtype`` is ``fp32``, ``bf16`` or ``fp16``; ``settings`` as in the
        constructor. A folder without tokenizer files gives an engine for token ids alone.

        Raises ModelLoadError for a folder that cannot be read, BackendError for a device that is not there.
        """
        from sagc_fast.model.loader import TOKENIZER_FILES, load_model, load_tokenizer, model_path

        folder = model_path(folder)
        model = load_model(folder, dtype=dtype, device=device)
        has_tokenizer = any((folder / name).exists() for name in TOKENIZER_FILES)
        tokenizer = load_tokenizer(folder) if has_tokenizer else None
        return cls(model, tokenizer, kv_budget_gb=kv_budget_gb, threads=threads, **settings)

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int | Sequence[int] = 8,
        params: ParamsArgument = SamplingParams(),  # noqa: B008 (frozen)
        *,
        prompt_ids: Sequence[int] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """Sample ``group_size`` completions of every prompt.

        Args:
            prompts: strings (encoded by the tokenizer, its special tokens included) or token-id lists.
            group_size: one for all prompts, or one per prompt; at least 1.
            params: one for all, one per prompt, or per prompt a list with one per completion. A completion that reaches
                the end of the model's context is cut there with finish_reason ``length``.
            prompt_ids: the prompts' part of the noise key, in [0, 2**64); default: the place in the call.
            on_group: called in this thread with each group as soon as it is complete. What it raises leaves this call
                and ends it; the engine stays usable.

        Returns the groups in prompt order. All checks precede all work: PromptError for prompts and parameters,
        KVBudgetError when one completion alone could outgrow the KV budget. DivergenceError when logits turn out NaN or
        infinite.
        """
        started = perf_counter()
        mark = object()
        try:
            if self._running.setdefault("call", mark) is not mark:  # atomic
                raise RuntimeError("This RolloutEngine is generating already; call it from one place at a time.")
            config = self.model.config
            requests = check_request(
                prompts,
                group_size,
                params,
                prompt_ids,
                vocab_size=config.vocab_size,
                context_length=config.max_position_embeddings,
                tokenizer=self.tokenizer,
            )
            if not requests:
                self.stats = RolloutStats()
                return []
            num_completions = sum(len(request.params) for request in requests)
            settings = CallSettings(
                capacity_rows=min(self.max_num_seqs, self.max_batch_tokens, num_completions),
                max_batch_tokens=self.max_batch_tokens,
                eos_token_ids=self.eos_token_ids,
                policy_version=self.policy_version,
            )
            kv = self._kv_for(requests, settings.capacity_rows)
            with torch_threads(self.threads), made_current(self.model.device), divergence_named(self.model):
                call = Call(
                    self.model, kv, requests, settings, self.lengths, self._detokenizer, self._speculation, self._graphs
                )
                groups = call.run(on_group)
            self.stats = call.stats(perf_counter() - started)
            return groups
        finally:
            if self._running == {"call": mark}:
                self._running.clear()

    def reset(self) -> None:
        """Call after a weight update: no KV computed before is used again, ``policy_version`` goes up by one."""
        self.policy_version += 1

    def release(self) -> None:
        """Give the KV memory back, and captured graphs with it; the next call takes it anew."""
        self._kv = None
        if self._graphs is not None:
            self._graphs.drop()

    # ---- memory --------------------------------------------------------------------------------------------------

    def bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers."""
        config = self.model.config
        return KVCache.bytes_per_block(
            config.num_layers, self.block_size, config.num_kv_heads, config.head_dim, self.kv_dtype
        )

    def _kv_for(self, requests: list[PromptRequest], capacity_rows: int) -> KVCache:
        """A cache within the budget and no larger than the call can use; an earlier one is kept when it suffices."""
        has_scratch = self._graphs is not None
        budget = int(self.kv_budget_gb * BYTES_PER_GB) // self.bytes_per_block() - has_scratch
        private, prompts = [], []
        for index, request in enumerate(requests):
            prompt_length = request.token_ids.size
            prompts.append(self._blocks_of(prompt_length))
            for params in request.params:
                needed = self._blocks_of(self._kv_length(prompt_length, params))
                if needed > budget:
                    raise self._budget_error(index, prompt_length, params, needed)
                private.append(needed - prompt_length // self.block_size)
        # At most capacity_rows completions and their prompts are held at once; the rest is admission's headroom.
        useful = sum(heapq.nlargest(capacity_rows, private)) + sum(heapq.nlargest(capacity_rows, prompts))
        num_blocks = min(budget, useful + capacity_rows + 1)
        if has_scratch:  # graphs hold the address, so that the cache should seldom move
            num_blocks = min(budget, 1 << (num_blocks - 1).bit_length())
        if self._kv is None or not num_blocks <= self._kv.num_blocks <= budget:
            self.release()  # the old memory goes before the new comes
            config = self.model.config
            self._kv = KVCache(
                config.num_layers,
                num_blocks,
                self.block_size,
                config.num_kv_heads,
                config.head_dim,
                self.kv_dtype,
                self.model.device,
                has_scratch,
            )
        return self._kv

    def _kv_length(self, prompt_length: int, params: SamplingParams) -> int:
        """Most tokens in the cache for one completion; the last one sampled is never fed back."""
        return min(prompt_length + params.max_new_tokens, self.model.config.max_position_embeddings) - 1

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _budget_error(self, index: int, prompt_length: int, params: SamplingParams, needed: int) -> KVBudgetError:
        needed_bytes = (needed + (self._graphs is not None)) * self.bytes_per_block()
        remedy_gb = (needed_bytes // 10**5 + 1) / 10**4
        return KVBudgetError(
            f"Prompt {index} with {prompt_length} tokens and max_new_tokens={params.max_new_tokens} needs "
            f"{needed_bytes:,} bytes of KV cache for one completion and kv_budget_gb={self.kv_budget_gb:g} allows "
            f"{int(self.kv_budget_gb * BYTES_PER_GB):,}; set kv_budget_gb to at least {remedy_gb:g} or lower "
            "max_new_tokens."
        )


def _roofline(model: Any, has_bursts: bool) -> tuple[float, float]:
    """Tokens that cost as much as a step's fixed part, and its seconds; a stand-in without weights costs the host's
    work alone."""
    if not isinstance(model, torch.nn.Module):
        return roofline(0, 0)
    weights = list(model.parameters())
    num_bytes = sum(w.numel() * w.element_size() for w in weights)
    return roofline(sum(w.numel() for w in weights), num_bytes, has_bursts)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    ids = tuple(model.config.eos_token_ids)
    if not ids and getattr(tokenizer, "eos_token_id", None) is not None:
        ids = (tokenizer.eos_token_id,)
    return ids


def _checked_ids(ids: Sequence[int], model: Any) -> tuple[int, ...]:
    vocab_size = model.config.vocab_size
    if not isinstance(ids, Sequence) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise ConfigError(f"eos_token_ids is {ids!r}; it must be a list of token ids in [0, {vocab_size}).")
    return tuple(ids)
