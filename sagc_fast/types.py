"""The records that flow through a step: prompts in, groups of completions out, statistics beside them.

Standard library only, so that schedulers, rewards and tools can use them without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from sagc_fast.errors import PromptError

FinishReason = Literal["stop", "length"]

MAX_TEMPERATURE = 1e6
"""Beyond it every token is as likely as any other, and soon no fp32 number holds it."""
MIN_TEMPERATURE = 1e-30
"""Of a draw that is not greedy: fp32 holds logits of up to 1e8 divided by it."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the completions of a prompt are drawn.

    The returned log-probs are those of the distribution that was sampled: ``log_softmax(logits / temperature)``,
    renormalised over the kept tokens when a filter is on. At ``temperature=0`` (greedy, ties to the lowest id) they are
    those of the unscaled model.
    """

    temperature: float = 1.0
    """0 means greedy; otherwise logits are divided by it (1e-30 to 1e6)."""
    max_new_tokens: int = 256
    """Length cap in tokens of one completion, at least 1."""
    seed: int = 0
    """Together with the prompt id, the sample index and the position it fixes the noise of every token."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; kept at the end of its token ids, cut from its text."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion beside the model's own end-of-sequence ids; the id stays in ``token_ids``."""
    ignore_eos: bool = False
    """Never end at the model's end-of-sequence ids (forced lengths in benchmarks)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with this probability mass; 1.0 is off."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest; 0.0 is off."""

    def __post_init__(self) -> None:
        for name, convert in (
            ("temperature", _plain_float), ("max_new_tokens", _plain_int), ("seed", _plain_int),
            ("top_k", _plain_int), ("top_p", _plain_float), ("min_p", _plain_float),
        ):  # fmt: skip
            object.__setattr__(self, name, convert(getattr(self, name)))
        object.__setattr__(self, "stop", _as_tuple(self.stop, str, "stop"))
        ids = _as_tuple(self.stop_token_ids, Integral, "stop_token_ids")
        object.__setattr__(self, "stop_token_ids", tuple(map(int, ids)))
        checks = (
            (
                _is_float(self.temperature)
                and (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE),
                "temperature",
                f"0 or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
            ),
            (_is_int(self.max_new_tokens) and self.max_new_tokens >= 1, "max_new_tokens", "an integer >= 1"),
            (_is_int(self.seed) and 0 <= self.seed < 2**64, "seed", "an integer in [0, 2**64)"),
            (_is_int(self.top_k) and self.top_k >= 0, "top_k", "an integer >= 0 (0 is off)"),
            (_is_float(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number in (0, 1] (1 is off)"),
            (_is_float(self.min_p) and 0 <= self.min_p <= 1, "min_p", "a number in [0, 1] (0 is off)"),
            (all(self.stop), "stop", "non-empty strings"),
            (isinstance(self.ignore_eos, bool), "ignore_eos", "True or False"),
        )
        for ok, name, wanted in checks:
            if not ok:
                raise PromptError(f"SamplingParams.{name} is {getattr(self, name)!r}; it must be {wanted}.")

    @property
    def is_filtered(self) -> bool:
        """True when top-k, top-p or min-p changes the sampled distribution."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def _plain_int(value: Any) -> Any:
    """Integers of any kind, numpy's included, as int; anything else, True and False too, as it is."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _plain_float(value: Any) -> Any:
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_float(value: object) -> bool:
    return type(value) is float


def _as_tuple(value: object, item_type: type, name: str) -> tuple:
    items = (value,) if isinstance(value, item_type) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, item_type) for item in items):
        wanted = "strings" if item_type is str else "integers"
        raise PromptError(f"SamplingParams.{name} is {value!r}; it must be a list of {wanted}.")
    return tuple(items)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer. ``token_ids`` and ``logprobs`` have the same length, the ending token included."""

    sample_index: int
    """Place in its group, from 0; part of the noise key."""
    token_ids: list[int]
    logprobs: list[float]
    """Natural-log probability of each token under the sampled distribution (see SamplingParams)."""
    finish_reason: FinishReason
    """``stop``: an end token or stop string; ``length``: cut at max_new_tokens or at the context's end."""
    text: str | None = None
    """Decoded text without special tokens and stop string; None when the engine has no tokenizer."""
    first_step: int = 0
    """Engine step (from 0, within the call) that sampled the first token; with last_step it draws the row timeline."""
    last_step: int = 0

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its G completions, in sample order."""

    prompt_index: int
    """Place of the prompt in the call."""
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_id: int = 0
    """The prompt's part of the noise key."""
    policy_version: int = 0
    """Number of optimizer steps behind the weights that sampled this group."""

    @property
    def group_size(self) -> int:
        return len(self.completions)

    @property
    def lengths(self) -> list[int]:
        """Completion lengths in tokens."""
        return [len(c.token_ids) for c in self.completions]


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Where one ``generate`` call spent its tokens, rows and seconds.

    A row-step is one live sequence in one engine step that samples. ``idle_fraction`` is
    ``1 - sum(active_rows) / (capacity_rows * len(active_rows))``: what a lock-step batch of ``capacity_rows`` rows
    would leave idle; compaction turns that area into time saved.
    """

    num_prompts: int = 0
    num_completions: int = 0
    num_prompt_tokens: int = 0
    """Unique prompt tokens: each prompt counted once, whatever its group size."""
    num_prefill_tokens: int = 0
    """Tokens computed in prefill, recomputation after preemption included."""
    num_recomputed_tokens: int = 0
    """The part of ``num_prefill_tokens`` that repeats work lost to preemption."""
    num_output_tokens: int = 0
    num_steps: int = 0
    total_seconds: float = 0.0
    prefill_seconds: float = 0.0
    """Model time of steps, divided between prefill and decode by their tokens."""
    decode_seconds: float = 0.0
    sample_seconds: float = 0.0
    host_seconds: float = 0.0
    """Scheduling, batch building, stop checks and detokenising."""
    capacity_rows: int = 0
    active_rows: list[int] = field(default_factory=list)
    """Rows that sample in each engine step, however many tokens each of them gets."""
    idle_fraction: float = 0.0
    tail_fraction: float = 0.0
    """Share of the steps in which at most a quarter (ours) of capacity_rows were live."""
    num_preemptions: int = 0
    kv_blocks_total: int = 0
    kv_blocks_peak: int = 0
    kv_bytes_total: int = 0
    straggler_ratio_mean: float = 0.0
    """Mean over groups of max length / median length."""
    straggler_ratio_max: float = 0.0
    clipped_ratio: float = 0.0
    """Share of completions cut at their length cap."""
    mean_length: float = 0.0
    max_length: int = 0
    is_filtered: bool = False
    """True when any completion was drawn with top-k, top-p or min-p."""
    num_draft_tokens: int = 0
    """Tokens computed ahead of time because they were expected (speculative decoding)."""
    num_accepted_tokens: int = 0
    """The part of ``num_draft_tokens`` that became output: row-steps saved."""
    num_steps_saved: float = 0.0
    """Steps that the call would have had more without drafts. An estimate where blocks are short or completions
    start in another order."""
    draft_gain_seconds: float = 0.0
    """Seconds that the drafts saved by the learnt cost of steps: those of the steps as they would have been without
    them less those of the steps as they were, drafted tokens and the host's work for them included. May be negative."""
    num_graph_captures: int = 0
    """This and what follows: of a device that runs bursts of steps (docs/gpu_rollout.md), else 0."""
    num_graph_replays: int = 0
    num_device_waits: int = 0
    """Times the host waited for results of a burst."""
    num_wasted_row_steps: int = 0
    """Rows computed in bursts that drew no token: padding, rows that were over, steps that were not taken up."""
    device_idle_seconds: float = 0.0
    """Device time between the end of queued work and the next: what the host did not hide."""

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.total_seconds if self.total_seconds > 0 else 0.0
