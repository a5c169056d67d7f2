"""What a task is: problems by index, and the name of the function that scores a completion.

A task is deterministic and random access: ``task.problem("train", i)`` is the same problem in every process and after
every restart, so a run's data position is one integer. Scoring never happens in the training process: a task only names
its scorer (:class:`ScorerSpec`), and :class:`sagc_fast.tasks.scoring.ScoringPool` runs it in killable workers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from sagc_fast.errors import ConfigError

Split = Literal["train", "heldout"]
SPLITS: tuple[str, ...] = ("train", "heldout")

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt and what its scorer needs to know. Travels to the scoring workers by pickle: plain data only."""

    prompt: str
    """The prompt as text; for a chat prompt, the question alone (``messages`` then holds what is sent)."""
    answer: Any = None
    meta: dict[str, Any] = field(default_factory=dict)
    problem_id: int = 0
    """Names the problem within its split (a row number or a seed). The same problem drawn again has the same id, so
    it is not a noise key by itself: the noise key of a prompt is the index it was drawn at."""
    kind: int | None = None
    """Problems of one kind have answers of like lengths; None: the problem is a kind of its own. What a prompt-aware
    controller goes by, so that it can learn from problems that never come again."""
    stop: tuple[str, ...] = ()
    """Stop strings of this prompt's completions."""
    messages: tuple[dict[str, str], ...] = ()
    """When not empty: chat messages (role, content) that the tokenizer's chat template turns into the prompt."""

    @property
    def length_key(self) -> int:
        """By what the lengths of past groups are told apart."""
        return self.problem_id if self.kind is None else self.kind


@dataclass(frozen=True, slots=True)
class Score:
    """What one completion is worth. ``error`` is set when the scorer failed and the reward is a stand-in."""

    reward: float
    outcome: bool
    """Correct or not, whatever shaping the reward carries; dynamic sampling and accuracy go by it."""
    error: str | None = None
    """``kind: detail`` with kind one of :data:`sagc_fast.tasks.scoring.ERROR_KINDS`."""


@dataclass(frozen=True, slots=True)
class ScorerSpec:
    """Names a scorer: ``target`` is ``module:function``, called as ``function(completion, problem, **kwargs)``.

    It returns a float or a :class:`Score`. A float alone counts as correct when it is at least 1.0. ``kwargs`` must be
    picklable; the function is imported in the worker, so neither it nor its module need be.
    """

    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """A prompt source. Implementations set ``name``, ``max_new_tokens`` and ``scorer_spec`` as plain attributes."""

    name: str
    max_new_tokens: int
    """Length cap of a completion in tokens that suits the task; a run's sampling settings may override it."""
    scorer_spec: ScorerSpec

    def problem(self, split: str, index: int) -> Problem:
        """The ``index``-th problem (from 0) of ``split``. A finite split goes on past its end: the train split in a
        new order each epoch, the held-out split from the start."""
        ...

    def size(self, split: str) -> int | None:
        """Number of distinct problems of ``split``; None when they are generated without end."""
        ...


_TASKS: dict[str, tuple[str, str, str]] = {
    # name: (module, task class, its configuration record)
    "addition": ("sagc_fast.tasks.addition", "AdditionTask", "AdditionConfig"),
    "reasoning_gym": ("sagc_fast.tasks.reasoning_gym", "ReasoningGymTask", "ReasoningGymConfig"),
    "dataset": ("sagc_fast.tasks.dataset", "DatasetTask", "DatasetConfig"),
}
_ALIASES = {"jsonl": "dataset", "parquet": "dataset", "huggingface": "dataset"}


def task_names() -> list[str]:
    """Every name that ``make_task`` knows, in order."""
    return sorted([*_TASKS, *_ALIASES])


def make_task(config: Mapping[str, Any], *, seed: int = 0) -> Task:
    """Make the task that ``config["name"]`` asks for; the other keys are its own options.

    Two keys belong to every task: ``reward`` (``module:function``, see :class:`ScorerSpec`) replaces the task's scorer,
    and ``reward_kwargs`` are its keyword arguments. ``seed`` fixes the problems and their order.

    Raises ConfigError for an unknown name, an unknown key (the nearest valid one is named) or a value out of range, and
    what the task itself raises (DatasetError for a file, ConfigError with the remedy for a missing extra).
    """
    options = dict(config)
    name = options.pop("name", None)
    reward = options.pop("reward", None)
    reward_kwargs = options.pop("reward_kwargs", None)
    if not isinstance(name, str) or _ALIASES.get(name, name) not in _TASKS:
        raise ConfigError(f"task.name is {name!r}; it must be {_alternatives(name, task_names())}.")
    spec = _reward_spec(reward, reward_kwargs)
    module_name, class_name, config_name = _TASKS[_ALIASES.get(name, name)]
    module = import_module(module_name)
    task_config = config_from_mapping(getattr(module, config_name), options, "task", also=("reward", "reward_kwargs"))
    task = getattr(module, class_name)(task_config, seed=seed)
    return task if spec is None else TaskWithReward(task, spec)


def _reward_spec(reward: object, reward_kwargs: object) -> ScorerSpec | None:
    if reward is None and reward_kwargs is not None:
        raise ConfigError("task.reward_kwargs is given without task.reward; name the reward as module:function.")
    if reward is not None and not isinstance(reward, str):
        raise ConfigError(f"task.reward is {reward!r}; it must be a string module:function.")
    if reward_kwargs is not None and not isinstance(reward_kwargs, Mapping):
        raise ConfigError(f"task.reward_kwargs is {reward_kwargs!r}; it must be a mapping of keyword arguments.")
    return None if reward is None else ScorerSpec(reward, dict(reward_kwargs or {}))


class TaskWithReward:
    """A task's problems under another scorer."""

    def __init__(self, task: Task, scorer_spec: ScorerSpec) -> None:
        self.task = task
        self.name = task.name
        self.max_new_tokens = task.max_new_tokens
        self.scorer_spec = scorer_spec

    def problem(self, split: str, index: int) -> Problem:
        return self.task.problem(split, index)

    def size(self, split: str) -> int | None:
        return self.task.size(split)


def config_from_mapping(
    config_class: type[ConfigT], options: Mapping[str, Any], where: str, also: Sequence[str] = ()
) -> ConfigT:
    """Fill the dataclass ``config_class`` from ``options`` (lists become tuples); an unknown key is a ConfigError that
    names the nearest valid one, those of ``also`` included, which the caller sees to. Ranges are the record's own
    business (``__post_init__``)."""
    known = [f.name for f in fields(config_class)]  # type: ignore[arg-type]
    for key in options:
        if key not in known:
            raise ConfigError(f"{where}.{key} is not an option here; it must be {_alternatives(key, [*known, *also])}.")
    for f in fields(config_class):  # type: ignore[arg-type]
        if f.default is MISSING and f.default_factory is MISSING and f.name not in options:
            raise ConfigError(f"{where}.{f.name} is missing; give it in the configuration.")
    return config_class(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})


def nearest(name: object, choices: Iterable[str]) -> str | None:
    """The choice most like ``name``, or None when none is alike."""
    found = difflib.get_close_matches(str(name), list(choices), n=1, cutoff=0.6)
    return found[0] if found else None


def _alternatives(name: object, choices: list[str]) -> str:
    best = nearest(name, choices)
    return f"one of {', '.join(choices)}" + (f" (did you mean {best}?)" if best else "")


def check_split(split: str) -> None:
    """Raises ConfigError unless ``split`` is ``train`` or ``heldout``."""
    if split not in SPLITS:
        raise ConfigError(f"The split is {split!r}; it must be {' or '.join(SPLITS)}.")


def tokenize_prompt(problem: Problem, tokenizer: Any) -> list[int]:
    """Token ids of a problem's prompt: the chat template over ``messages`` when there are any, else the plain text
    with the special tokens that the tokenizer adds by itself. ``tokenizer`` is a transformers tokenizer or anything
    callable that returns ``input_ids``.

    Raises ConfigError when messages meet a tokenizer without a chat template.
    """
    if not problem.messages:
        return list(tokenizer(problem.prompt)["input_ids"])
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "The task sends chat messages but the model's tokenizer has no chat template; "
            "use a plain prompt template (task.chat: false) or a model with one."
        )
    text = tokenizer.apply_chat_template(list(problem.messages), tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
