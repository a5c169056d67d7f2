"""Prompts from a file or folder of questions with reference answers, checked by math-verify or by comparison."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from sagc_fast.errors import ConfigError, DatasetError
from sagc_fast.tasks.answers import EXTRACTION_RULES, after_hashes, check_rule, last_boxed
from sagc_fast.tasks.base import Problem, ScorerSpec, Split, check_split
from sagc_fast.tasks.dataset_files import Row, read_rows

SCORERS = {
    "math": "sagc_fast.tasks.math_scorer:score_math",
    "exact": "sagc_fast.tasks.text_scorer:score_text",
}


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """Options of the task."""

    path: str
    """A .jsonl, .parquet or .arrow file, a folder of them, or a folder written by datasets.save_to_disk."""
    split: str | None = None
    """Part of a folder that holds several; None: the only one, or ``train``."""
    heldout_path: str | None = None
    """Where the held-out problems are; None: at ``path``, when ``heldout_split`` is given."""
    heldout_split: str | None = None
    heldout_fraction: float = 0.0
    """Without a held-out source of its own: this share of the questions (by a hash of their text, so that a question
    that occurs twice stays on one side) is kept out of training."""
    question_column: str = "question"
    answer_column: str = "answer"
    answer_format: str = "auto"
    """How the answer column states the answer: ``gsm8k`` (after ####), ``boxed`` (in the last \\boxed{}), ``plain``;
    ``auto`` takes the first of these that the text shows."""
    template: str = "{question}"
    """The prompt, or in a chat the user's message; every ``{question}`` in it is replaced, other braces stay."""
    chat: bool = False
    """Send the prompt through the model's chat template."""
    system: str = ""
    """System message of a chat."""
    check: str = "math"
    """``math``: equal by math-verify; ``exact``: equal as text (white space aside) or as decimal numbers."""
    extract: str = "auto"
    """Where in the completion the answer stands: a rule of answers.EXTRACTION_RULES; ``auto``: the last \\boxed{}, else
    after the last ####, else (``math``) what math-verify finds or (``exact``) the last line."""
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 512

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.extract != "auto":
            check_rule(self.extract, "task.extract")
        fraction = self.heldout_fraction
        is_fraction = isinstance(fraction, (int, float)) and not isinstance(fraction, bool) and 0 <= fraction < 1
        max_new_tokens = self.max_new_tokens
        is_count = isinstance(max_new_tokens, int) and not isinstance(max_new_tokens, bool) and max_new_tokens >= 1
        checks = (
            (isinstance(self.path, str) and bool(self.path), "path", "the path of a file or folder"),
            (is_fraction, "heldout_fraction", "a number in [0, 1)"),
            (self.answer_format in ("auto", *_GOLD), "answer_format", f"auto, {', '.join(_GOLD)}"),
            (
                isinstance(self.template, str) and "{question}" in self.template,
                "template",
                "text with {question} in it",
            ),
            (isinstance(self.chat, bool), "chat", "true or false"),
            (self.check in SCORERS, "check", " or ".join(SCORERS)),
            (is_count, "max_new_tokens", "an integer of at least 1"),
        )
        for ok, name, wanted in checks:
            if not ok:
                raise ConfigError(f"task.{name} is {getattr(self, name)!r}; it must be {wanted}.")
        if fraction and (self.heldout_path or self.heldout_split):
            raise ConfigError("task.heldout_fraction is set beside a held-out source of its own; keep one of them.")
        if self.system and not self.chat:
            raise ConfigError(
                "task.system is set without task.chat; put the text into task.template or set chat: true."
            )


class DatasetTask:
    """See :class:`DatasetConfig`. Everything is read and checked when the task is made.

    The train split is drawn in a new random order each epoch (fixed by the seed); the held-out split stands in one
    shuffled order that does not depend on the seed, so that its first n problems are a fair and comparable sample.

    Raises what :func:`sagc_fast.tasks.dataset_files.read_rows` raises, and DatasetError for an answer that does not
    have the stated format.
    """

    name = "dataset"

    def __init__(self, config: DatasetConfig, *, seed: int = 0) -> None:
        self.config = config
        self.max_new_tokens = config.max_new_tokens
        self.scorer_spec = ScorerSpec(SCORERS[config.check], {"extract": config.extract})
        self._seed = seed
        rows = read_rows(config.path, config.split, config.question_column, config.answer_column)
        train, heldout = list(enumerate(rows)), []
        if config.heldout_path or config.heldout_split:
            where = config.heldout_path or config.path
            held = read_rows(where, config.heldout_split, config.question_column, config.answer_column)
            heldout = list(enumerate(held))
        elif config.heldout_fraction:
            heldout = [(i, row) for i, row in train if _hash_unit(row.question) < config.heldout_fraction]
            train = [(i, row) for i, row in train if _hash_unit(row.question) >= config.heldout_fraction]
        random.Random(0).shuffle(heldout)
        if not train:
            raise DatasetError(f"{config.path} leaves no question to train on; lower task.heldout_fraction.")
        self._problems = {
            "train": [self._problem(i, row, "train") for i, row in train],
            "heldout": [self._problem(i, row, "heldout") for i, row in heldout],
        }
        self._order: tuple[int, list[int]] = (-1, [])

    def size(self, split: Split) -> int:
        check_split(split)
        return len(self._problems[split])

    def problem(self, split: Split, index: int) -> Problem:
        check_split(split)
        problems = self._problems[split]
        if not problems:
            raise ConfigError(
                f"The dataset {self.config.path} has no held-out problems; set task.heldout_path, "
                "task.heldout_split or task.heldout_fraction."
            )
        epoch, place = divmod(index, len(problems))
        return problems[self._train_order(epoch)[place] if split == "train" else place]

    def _train_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self._problems["train"])))
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def _problem(self, number: int, row: Row, split: str) -> Problem:
        prompt = self.config.template.replace("{question}", row.question)
        messages = ()
        if self.config.chat:
            system = ({"role": "system", "content": self.config.system},) if self.config.system else ()
            messages = (*system, {"role": "user", "content": prompt})
        return Problem(
            prompt=prompt,
            answer=reference_answer(row.answer, self.config.answer_format, row.place),
            meta={"split": split},
            problem_id=number,
            stop=tuple(self.config.stop),
            messages=messages,
        )


_GOLD = {
    "gsm8k": (after_hashes, "has no #### before its answer"),
    "boxed": (last_boxed, "has no closed \\boxed{} around its answer"),
    "plain": (EXTRACTION_RULES["text"], "is empty"),
}


def reference_answer(text: str, answer_format: str, place: str) -> str:
    """The bare answer in an answer column's text. Raises DatasetError, naming ``place``, when there is none."""
    formats = list(_GOLD) if answer_format == "auto" else [answer_format]
    for extract, _ in map(_GOLD.get, formats):
        answer = extract(text)
        if answer is not None and answer.strip():
            return answer.strip()
    missing = _GOLD[formats[-1]][1]
    raise DatasetError(f"{place}: the answer {text!r:.80} {missing}; mend it or set task.answer_format.")


def _hash_unit(text: str) -> float:
    """A number in [0, 1) fixed by the text."""
    digest = hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
