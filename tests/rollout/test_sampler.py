"""Which hidden state each sample is drawn from."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from sagc_fast.rollout.rows import RowTable
from sagc_fast.rollout.sampler import Sampler


def test_a_hidden_state_that_nobody_draws_from_shifts_no_other() -> None:
    """Skipping one row and drawing twice from another once looked like one draw per row: 3 samples over 3 rows."""
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=4), logits=lambda hidden: hidden)
    hidden_states = 50.0 * torch.eye(4)  # row u all but names token u
    tokens, _ = Sampler(model, RowTable(3, max_blocks=1), None).sample(
        hidden_states, np.array([0, 2, 2]), np.arange(3), np.zeros(3, int)
    )
    assert tokens.tolist() == [0, 2, 2]
