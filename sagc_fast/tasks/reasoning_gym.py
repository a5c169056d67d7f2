"""Problems from any reasoning-gym generator, by name, with few-shot examples and a safe way of scoring.

Splits are disjoint twice over. Train, held-out and example problems come from ranges of generator seeds that do not
meet; and a hash of the question's text says which split it may appear in, so that even a generator with a few hundred
different questions never shows a held-out question in training (``split_by="question"``). A problem's index fixes it
for ever; the held-out problems and the examples do not depend on the run's seed, so runs compare.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sagc_fast.errors import ConfigError
from sagc_fast.tasks.answers import check_rule
from sagc_fast.tasks.base import Problem, ScorerSpec, Split, check_split, nearest
from sagc_fast.tasks.reasoning_gym_scorer import SCORERS, scoring_mode

TRIES = 64
"""Generator seeds set aside for each problem; the first whose question belongs to the split is taken."""
PROBLEMS_PER_DATASET = 16
"""Problems made from one generator object: making some of them is costly."""
HELDOUT_SHARE = 0.25
"""Share of all questions that only the held-out split may show."""
_FIRST_SEED = {"examples": 0, "heldout": 2**20, "train": 2**28}
_NUM_PROBLEMS = {"heldout": (2**28 - 2**20) // TRIES, "train": (2**31 - 2**28) // TRIES}


@dataclass(frozen=True, slots=True)
class ReasoningGymConfig:
    """Options of the task. ``template`` is written out once per example and, up to ``{answer}``, for the problem; it
    may also name entries of the generator's metadata, as in ``"{expression} = {answer}"`` for chain_sum."""

    generator: str
    params: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the generator's configuration (min_terms, max_digits, ...)."""
    few_shot: int = 0
    """Solved examples before the problem, the same ones for every problem."""
    template: str = "Question: {question}\nAnswer: {answer}"
    separator: str = "\n\n"
    instruction: str = ""
    """Text before everything else (the system message of a chat)."""
    chat: bool = False
    """Send the examples and the question as messages through the model's chat template; ``template`` is not used."""
    extract: str = "first_line"
    """Where in the completion the answer stands, see answers.EXTRACTION_RULES."""
    stop: tuple[str, ...] | None = None
    """Stop strings; None: a line end after one-line examples, else an empty line; nothing in a chat or without
    examples."""
    scoring: str = "auto"
    """``exact``: the extracted answer equals the generator's; ``countdown``: an expression of the given numbers that
    equals the target; ``generator``: its own scorer; ``auto``: the first of these that is sound for the generator."""
    partial_credit: bool = False
    """Score by the generator and pay its fractions of a reward; an outcome is correct only at 1.0 all the same."""
    split_by: str = "question"
    """``question`` or ``seed`` (faster; enough when the generator hardly ever repeats itself)."""
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check_rule(self.extract, "task.extract")
        checks = (
            (isinstance(self.params, Mapping), "params", "a mapping of the generator's options"),
            (_is_count(self.few_shot, 0) and self.few_shot <= 64, "few_shot", "an integer from 0 to 64"),
            (isinstance(self.template, str) and "{answer}" in self.template, "template", "a text that holds {answer}"),
            (
                self.scoring in ("auto", "exact", "countdown", "generator"),
                "scoring",
                "auto, exact, countdown or generator",
            ),
            (self.split_by in ("question", "seed"), "split_by", "question or seed"),
            (isinstance(self.chat, bool), "chat", "true or false"),
            (isinstance(self.partial_credit, bool), "partial_credit", "true or false"),
            (
                not self.partial_credit or self.scoring in ("auto", "generator"),
                "scoring",
                "auto or generator with task.partial_credit",
            ),
            (_is_count(self.max_new_tokens, 1), "max_new_tokens", "an integer of at least 1"),
        )
        for ok, name, wanted in checks:
            if not ok:
                raise ConfigError(f"task.{name} is {getattr(self, name)!r}; it must be {wanted}.")


class ReasoningGymTask:
    """See the module's text. Raises ConfigError for an unknown generator (the nearest name is given), options it does
    not take, examples asked of a generator without reference answers, and when reasoning-gym is not installed."""

    name = "reasoning_gym"

    def __init__(self, config: ReasoningGymConfig, *, seed: int = 0) -> None:
        self.config = config
        self.max_new_tokens = config.max_new_tokens
        self._create = _creator(config)
        self._dataset = lru_cache(maxsize=8)(self._make_dataset)
        offset = int.from_bytes(hashlib.blake2b(f"{seed}".encode(), digest_size=8).digest(), "big")
        self._start = {"heldout": 0, "train": offset % _NUM_PROBLEMS["train"]}
        mode = self._scoring_mode()
        self._sends_entry = mode != "exact"
        own = {"generator": config.generator, "params": dict(config.params), "partial_credit": config.partial_credit}
        self.scorer_spec = ScorerSpec(SCORERS[mode], {"extract": config.extract} | (own if mode == "generator" else {}))
        self.examples: tuple[dict[str, Any], ...] = ()
        """The solved examples of every prompt: entries with question, answer and metadata."""
        self.examples = tuple(self._make_examples())
        self._example_questions = frozenset(entry["question"] for entry in self.examples)
        self._stop = self._stop_strings()
        self.problem("train", 0)  # a template that cannot be filled in, or too few questions, shows here

    def size(self, split: Split) -> None:
        check_split(split)

    def problem(self, split: Split, index: int) -> Problem:
        check_split(split)
        slot = (self._start[split] + index) % _NUM_PROBLEMS[split]
        seed, entry = self._entry(split, slot)
        meta = {"split": split, "generator": self.config.generator}
        if self._sends_entry:
            meta["entry"] = entry
        return Problem(
            prompt=self._prompt(entry),
            answer=entry["answer"],
            meta=meta,
            problem_id=seed,
            stop=self._stop,
            messages=self._messages(entry) if self.config.chat else (),
        )

    def _scoring_mode(self) -> str:
        if self.config.scoring != "auto":
            return self.config.scoring
        if self.config.partial_credit:
            return "generator"
        from reasoning_gym.dataset import ProceduralDataset

        own_scorer = type(self._create(0, 1)).score_answer
        return scoring_mode(self.config.generator, own_scorer is not ProceduralDataset.score_answer)

    def _entry(self, split: str, slot: int) -> tuple[int, dict[str, Any]]:
        block, place = divmod(slot, PROBLEMS_PER_DATASET)
        first_seed = _FIRST_SEED[split] + block * PROBLEMS_PER_DATASET * TRIES
        dataset = self._dataset(first_seed)
        for i in range(place * TRIES, (place + 1) * TRIES):
            entry = dataset[i]
            if entry["question"] not in self._example_questions and self._belongs(entry["question"], split):
                return first_seed + i, entry
        raise ConfigError(
            f"Generator {self.config.generator!r} with these options makes too few different questions to keep some "
            "for the held-out split; widen task.params or set task.split_by to seed."
        )

    def _belongs(self, question: str, split: str) -> bool:
        if self.config.split_by == "seed":
            return True
        digest = hashlib.blake2b(question.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return (int.from_bytes(digest, "big") < HELDOUT_SHARE * 2**64) == (split == "heldout")

    def _make_dataset(self, first_seed: int) -> Any:
        return self._create(first_seed, PROBLEMS_PER_DATASET * TRIES)

    def _make_examples(self) -> list[dict[str, Any]]:
        self._example_questions: frozenset[str] = frozenset()
        examples: dict[str, dict[str, Any]] = {}
        slot = 0
        while len(examples) < self.config.few_shot:
            _, entry = self._entry("examples", slot)
            if entry["answer"] is None:
                raise ConfigError(
                    f"Generator {self.config.generator!r} gives no reference answers to show; set task.few_shot to 0."
                )
            examples.setdefault(entry["question"], entry)
            slot += 1
            if slot > 64 * self.config.few_shot:
                raise ConfigError(
                    f"Generator {self.config.generator!r} makes fewer than {self.config.few_shot} different questions "
                    "for task.few_shot; lower it."
                )
        return list(examples.values())

    def _stop_strings(self) -> tuple[str, ...]:
        if self.config.stop is not None:
            return tuple(self.config.stop)
        if self.config.chat or not self.examples:
            return ()
        return ("\n",) if all("\n" not in entry["answer"].strip() for entry in self.examples) else ("\n\n",)

    def _prompt(self, entry: dict[str, Any]) -> str:
        if self.config.chat:
            return entry["question"]
        question_part = self.config.template.partition("{answer}")[0].rstrip(" ")
        shots = [self._filled(self.config.template, example) for example in self.examples]
        start = [self.config.instruction] if self.config.instruction else []
        return self.config.separator.join([*start, *shots, self._filled(question_part, entry)])

    def _filled(self, template: str, entry: dict[str, Any]) -> str:
        values = {**entry["metadata"], "question": entry["question"], "answer": entry["answer"]}
        try:
            return template.format_map(values)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"task.template {self.config.template!r} cannot be filled in ({error}); "
                f"it may name {', '.join(sorted(map(str, values)))}."
            ) from error

    def _messages(self, entry: dict[str, Any]) -> tuple[dict[str, str], ...]:
        system = [{"role": "system", "content": self.config.instruction}] if self.config.instruction else []
        shots = [
            {"role": role, "content": text}
            for example in self.examples
            for role, text in (("user", example["question"]), ("assistant", example["answer"]))
        ]
        return (*system, *shots, {"role": "user", "content": entry["question"]})


def _creator(config: ReasoningGymConfig) -> Any:
    """``create(seed, size)`` for the configured generator."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            "The reasoning_gym task needs the package reasoning-gym; install it with pip install sagc_fast[tasks]."
        ) from error
    if config.generator not in DATASETS:
        best = nearest(config.generator, DATASETS)
        hint = f"did you mean {best}?" if best else "reasoning_gym.factory.DATASETS lists them."
        raise ConfigError(f"task.generator is {config.generator!r}, which reasoning-gym does not have; {hint}")

    def create(seed: int, size: int) -> Any:
        try:
            return reasoning_gym.create_dataset(config.generator, seed=seed, size=size, **config.params)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"task.params {dict(config.params)!r} do not suit the generator {config.generator!r}: {error}; "
                "see its configuration record in reasoning-gym."
            ) from error

    return create


def _is_count(value: object, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value < math.inf
