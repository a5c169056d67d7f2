"""A length history that survives a restart: it orders admission, so idle rows and preemptions depend on it."""

from __future__ import annotations

import json
from pathlib import Path

from sagc_fast.rollout.lengths import LengthHistory


class SavedLengthHistory(LengthHistory):
    """The engine's history of completion lengths, written to and read from a checkpoint."""

    def save(self, path: Path) -> None:
        """Write the history as JSON, prompts from the one not seen for longest to the newest."""
        prompts = [[key.hex(), mean] for key, mean in self._by_prompt.items()]
        path.write_text(json.dumps({"overall": self._overall, "prompts": prompts}), encoding="utf-8")

    def load(self, path: Path) -> None:
        """Take over what ``save`` wrote, to the bit."""
        saved = json.loads(path.read_text(encoding="utf-8"))
        self.clear()
        self._overall = saved["overall"]
        self._by_prompt.update((bytes.fromhex(key), mean) for key, mean in saved["prompts"])
