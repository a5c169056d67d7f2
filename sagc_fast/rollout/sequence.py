"""The state of a prompt's group and of its completions while a call is running. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagc_fast.rollout.drafts import Cursor, DraftIndex
from sagc_fast.rollout.stop import StopMatcher
from sagc_fast.types import Completion, SamplingParams

NO_BLOCKS = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class PromptGroup:
    """A prompt, the KV blocks that hold it, and the completions that fork from it.

    The group owns its prompt's blocks as long as a completion may still need them; each admitted completion holds them
    too, by reference. ``blocks`` covers the whole prompt from the moment its prefill is admitted; ``num_cached`` says
    how many of its tokens have been computed.
    """

    prompt_index: int
    prompt_id: int
    token_ids: NDArray[np.int64]
    """[P]"""
    sequences: list[Sequence] = field(default_factory=list)
    unstarted: list[Sequence] = field(default_factory=list)
    """Never admitted; the next one to start is last."""
    joiners: list[Sequence] = field(default_factory=list)
    """Admitted, waiting for the prompt's prefill."""
    blocks: NDArray[np.int32] = field(default_factory=lambda: NO_BLOCKS)
    num_cached: int = 0
    high_water: int = 0
    """Most prompt tokens ever computed; what lies below is recomputation."""
    is_prefilling: bool = False
    last_hidden: Any = None
    """Hidden state [1, E] of the prompt's last token: the one logits row from which every first token is drawn."""
    num_live: int = 0
    """Admitted and unfinished completions."""
    num_finished: int = 0
    finished_tokens: int = 0
    completions: dict[int, Completion] = field(default_factory=dict)
    has_known_length: bool = False
    """Whether the admission queue expects a length of its own for this group."""
    is_known_from_before: bool = False
    """Whether that expectation comes from earlier calls."""
    drafts: DraftIndex | None = None
    """What the group has written, once drafts are wanted."""

    @property
    def prompt_length(self) -> int:
        return self.token_ids.size

    @property
    def num_waiting(self) -> int:
        """Completions not admitted at present: never started, or sent back."""
        return len(self.sequences) - self.num_live - self.num_finished

    @property
    def is_cached(self) -> bool:
        return self.num_cached == self.token_ids.size


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion. While it is admitted its tokens stand in the row table; otherwise here."""

    group: PromptGroup
    sample_index: int
    params: SamplingParams
    max_output: int
    """``max_new_tokens``, or less where the context ends first."""
    end_set: int
    """Row of the call's table of ending token ids."""
    matcher: StopMatcher | None = None
    """Set when the completion has stop strings."""
    order: int = -1
    """Rank of first admission; the youngest is preempted first and keeps its rank."""
    slot: int = -1
    """Row-table slot while admitted."""
    high_water: int = 0
    """Most tokens ever held in the KV cache; what lies below is recomputation."""
    token_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    first_step: int = 0
    num_steps_ahead: int = 0
    """Its drafts that counted: steps by which it is shorter; without those drafted while others waited for blocks."""
    cursor: Cursor | None = None
    """Its place in the group's ``drafts``."""

    @property
    def num_output(self) -> int:
        """Tokens sampled before the last time it was sent back (0: never started)."""
        return self.token_ids.size

    @property
    def length(self) -> int:
        """Prompt and output tokens, while not admitted."""
        return self.group.token_ids.size + self.token_ids.size
