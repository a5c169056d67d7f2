"""Character-level addition whose answers vary in length with a heavy tail, for a policy small enough for any CPU.

A prompt is ``"17+385="``, a sum of two or more terms. The policy shipped with the package (``data/addition/README.md``
tells how it was made) answers in one of two styles and may go over its workings again:

    >402                                                    at a guess: short, and often wrong
    7+5+0=12,1+8+1=10,0+3+1=4>402                           step by step, a clause a column, right to left
    7+5+0=12,1+8+1=10,0+3+1=4?7+5+0=12,1+8+1=10,0+3+1=4>402 ... gone over once more after the ``?``

A sum of several terms is worked out pair by pair, each intermediate sum written before its next term:
``"1+2+30="`` gives ``1+2+0=3;3+30=3+0+0=3,0+3+0=3>33``.

Length varies on three scales: digits and terms are drawn geometrically (between prompts), the style is free (within a
group), and a doubtful policy goes over its workings a geometric number of times (within a group, the heavy tail).
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from pathlib import Path

from sagc_fast.errors import ConfigError
from sagc_fast.tasks.base import Problem, ScorerSpec, check_split

HELDOUT_SHARE = 8
"""One sum in so many is held out, chosen by a checksum of its terms whatever their order."""
MAX_DRAWS = 10_000
"""Draws after which a split is taken to be empty (needs a configuration of a handful of sums)."""


@dataclass(frozen=True, slots=True)
class AdditionConfig:
    """How the sums are drawn. The defaults are those that the shipped policy has learnt from."""

    max_digits: int = 4
    """Digits of the longest term, 1 to 18."""
    more_digits: float = 0.6
    """Probability of one more digit, asked again until it fails or ``max_digits`` is reached."""
    max_terms: int = 4
    """Terms of a sum, 2 to 16."""
    more_terms: float = 0.25
    """Probability of one more term beyond two, asked in the same way."""
    max_new_tokens: int = 256
    """Length cap of an answer in tokens (characters)."""

    def __post_init__(self) -> None:
        for name, low, high in (("max_digits", 1, 18), ("max_terms", 2, 16), ("max_new_tokens", 1, 1 << 20)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"task.{name} is {value!r}; it must be an integer from {low} to {high}.")
        for name in ("more_digits", "more_terms"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
                raise ConfigError(f"task.{name} is {value!r}; it must be a probability in [0, 1).")


class AdditionTask:
    """Sums without end. The held-out ones never occur in training, in any order of their terms; they are the same
    whatever the run's seed, so that runs can be compared."""

    name = "addition"

    def __init__(self, config: AdditionConfig | None = None, *, seed: int = 0) -> None:
        self.config = config or AdditionConfig()
        self.seed = seed
        self.max_new_tokens = self.config.max_new_tokens
        self.scorer_spec = ScorerSpec("sagc_fast.tasks.addition:score")

    def problem(self, split: str, index: int) -> Problem:
        """The ``index``-th sum of ``split``. Raises ConfigError for an unknown split and for one without sums."""
        check_split(split)
        rng = random.Random(f"addition {split} {self.seed if split == 'train' else 0} {index}")
        for _ in range(MAX_DRAWS):
            terms = draw_terms(rng, self.config)
            if is_heldout(terms) == (split == "heldout"):
                prompt = "+".join(map(str, terms)) + "="
                kind = 100 * len(terms) + len(str(max(terms)))  # what the length of the workings goes by
                return Problem(prompt, answer=sum(terms), meta={"terms": terms}, problem_id=index, kind=kind)
        raise ConfigError(
            f"The {split} split of addition is empty with task.max_digits={self.config.max_digits} and "
            f"task.max_terms={self.config.max_terms}; allow more digits or terms."
        )

    def size(self, split: str) -> None:
        """None: the sums are drawn without end."""
        check_split(split)


def draw_terms(rng: random.Random, config: AdditionConfig) -> list[int]:
    """The terms of one sum: one of them has the drawn number of digits, the others as many or fewer, in random order.

    Only ``rng.random()`` is used, whose values are the same in every version of Python.
    """
    num_digits = 1 + _geometric(rng, config.more_digits, config.max_digits - 1)
    num_terms = 2 + _geometric(rng, config.more_terms, config.max_terms - 2)
    widths = [1 + _below(rng, num_digits) for _ in range(num_terms)]
    widths[_below(rng, num_terms)] = num_digits
    return [_number(rng, width) for width in widths]


def is_heldout(terms: list[int]) -> bool:
    """True for sums of the held-out split; the same for every order of the terms."""
    return zlib.crc32("+".join(map(str, sorted(terms))).encode()) % HELDOUT_SHARE == 0


def score(completion: str, problem: Problem) -> float:
    """1.0 when all that follows the one ``>`` is the right sum, without leading zeros; 0.0 otherwise.

    The workings are not judged. Of an answer cut at the length cap only the text is seen, and it seldom ends right.
    """
    _, mark, answer = completion.partition(">")
    return 1.0 if mark and answer == str(problem.answer) else 0.0


def policy_folder() -> Path:
    """Hugging Face folder of the small policy that is shipped with the package; ``model.path: addition`` means it."""
    return Path(__file__).parent / "data" / "addition"


def model_folder(path: str) -> Path:
    """The folder that a model's name means: itself, or the policy shipped with the package."""
    return policy_folder() if path == "addition" and not Path(path).exists() else Path(path)


def _geometric(rng: random.Random, probability: float, cap: int) -> int:
    """Successes before the first failure, at most ``cap``."""
    count = 0
    while count < cap and rng.random() < probability:
        count += 1
    return count


def _below(rng: random.Random, bound: int) -> int:
    return int(rng.random() * bound)


def _number(rng: random.Random, width: int) -> int:
    """A number of exactly ``width`` digits; 1 to 9 for one digit."""
    low = 10 ** (width - 1)
    return low + _below(rng, 9 * low)
