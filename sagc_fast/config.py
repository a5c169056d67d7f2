"""The configuration of a training run: one YAML file, overrides of the same names, every value checked.

Standard library only (PyYAML is imported when a file is read). Each section is a frozen dataclass; the string under a
field is its documentation, which ``sagc-fast train --fields`` prints.

Every message names the field by its full path, the value and what is allowed; an unknown key names the nearest valid
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from sagc_fast.algo.config import AdvantageConfig, Algorithm, FilterConfig, LossConfig, make_algorithm
from sagc_fast.config_parsing import (
    Section,
    apply_overrides,
    check_keys,
    describe_fields,
    leaves,
    plain,
    read_yaml,
    yaml_dialect,
)
from sagc_fast.controller.config import MAX_GROUP_SIZE
from sagc_fast.errors import ConfigError
from sagc_fast.types import MAX_TEMPERATURE, MIN_TEMPERATURE


@dataclass(frozen=True)
class ModelOptions(Section):
    """The policy that is trained."""

    SECTION: ClassVar[str] = "model"

    path: str
    """Hugging Face folder of the starting weights and tokenizer, or ``addition`` for the small policy shipped with the
    package."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the parameters. ``bf16`` keeps fp32 master weights in the optimizer; on CPUs without bf16 units fp32 is
    faster, and only fp32 promises bit-for-bit independence of batch composition, hence the default."""
    device: str = "cpu"
    """Device that holds the policy: ``cpu`` or ``cuda``."""

    def _check(self) -> None:
        self._require(bool(self.path), "path", "a model folder")
        self._require(self.device == "cpu" or self.device.startswith("cuda"), "device", "cpu or cuda")


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraOptions(Section):
    """Train low-rank adapters in place of all the weights (arXiv:2106.09685); off unless ``rank`` is set."""

    SECTION: ClassVar[str] = "lora"

    rank: int = 0
    """Rank of the adapters (peft: r); 0 trains all the weights."""
    alpha: float = 32.0
    """The adapters are scaled by alpha / rank (peft: lora_alpha)."""
    dropout: float = 0.0
    """Share of the adapters' inputs that is dropped in training (peft: lora_dropout); the rollout knows none, so the
    trained and the sampled policy then differ."""
    target_modules: tuple[str, ...] = LORA_TARGETS
    """Adapted matrices by peft's names; ``lm_head`` as well, where it is not tied to the embedding."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) (arXiv:2312.03732)."""
    init_from: str | None = None
    """Folder of an adapter, ours or peft's, to start from; it must be of the kind given here."""

    def _check(self) -> None:
        self._at_least(0, "rank")
        self._above_zero("alpha")
        self._require(0 <= self.dropout < 1, "dropout", "in [0, 1)")
        known = set(self.target_modules) <= {*LORA_TARGETS, "lm_head"}
        unique = len(set(self.target_modules)) == len(self.target_modules) > 0
        self._require(known and unique, "target_modules", f"some of {', '.join(LORA_TARGETS)}, lm_head, each once")
        self._require(self.init_from is None or self.rank > 0, "init_from", "unset while lora.rank is 0")


@dataclass(frozen=True)
class RolloutOptions(Section):
    """How completions are sampled. No top-k, top-p or min-p here: the policy is trained on what it samples from."""

    SECTION: ClassVar[str] = "rollout"

    prompts_per_step: int = 32
    """Prompts of one optimizer step at the reference group size (see ``controller.hold``). TRL's and DAPO's examples
    use 8 to 512; 32 suits a machine without a GPU (ours)."""
    temperature: float = 1.0
    """Sampling temperature, applied to the trained log-probs as well. 1.0 as in GRPO, DAPO and TRL."""
    max_new_tokens: int | None = None
    """Length cap of a completion in tokens; unset takes the task's own."""
    kv_budget_gb: float = 2.0
    """Memory for cached keys and values in GB; when it runs out, sequences are preempted and recomputed."""
    block_size: int = 16
    """Tokens per block of the cache."""
    max_num_seqs: int = 256
    """Most completions decoded at once."""
    max_batch_tokens: int = 2048
    """Most tokens of one engine step, prompt chunks included."""
    speculation: Literal["fixed", "auto", "off"] = "fixed"
    """Draft the last rows' tokens from their group's text, on the CPU; no token changes. ``auto`` goes by the measured
    cost of steps, so that idle and tail figures differ from run to run; ``fixed`` repeats them to the bit."""
    graphs: Literal["auto", "off"] = "auto"
    """On a GPU, replay decode steps as CUDA graphs; no token changes."""

    def _check(self) -> None:
        self._at_least(1, "prompts_per_step", "max_new_tokens", "block_size", "max_num_seqs", "max_batch_tokens")
        self._require(self.prompts_per_step <= 1_000_000, "prompts_per_step", "at most 1000000")
        self._above_zero("kv_budget_gb")
        self._require(
            MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE,
            "temperature",
            f"from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g} (groups need variety)",
        )


REQUIRED_BY_KIND: dict[str, dict[str, Any]] = {
    # Every prompt is judged by its own groups and sized by itself, after the prompts have been drawn.
    "prompt_aware": {"hold": "prompts", "signal": "group", "ratio": "group", "dwell": 1},
    # Every length teaches every group size: nothing to explore, no first choice to make and none to calm.
    "cost_aware": {"start": None, "dwell": 1},
}
"""Options of the controller that have one value only under that kind."""


@dataclass(frozen=True)
class ControllerOptions(Section):
    """Who chooses the group size. Defaults marked *ours* are not in the paper (arXiv:2606.02218)."""

    SECTION: ClassVar[str] = "controller"

    kind: Literal["sagc", "fixed", "prompt_aware", "cost_aware"] = "sagc"
    """``sagc`` adapts the group size to stragglers; ``fixed`` keeps ``group_size``. Beyond the paper: ``prompt_aware``
    gives every prompt its own group size, and pays where prompts differ and come back; ``cost_aware`` seeks the most
    utility per measured second, whatever the straggler rate."""
    group_size: int = 8
    """Completions per prompt under ``fixed``, at least 2. 8 is TRL's default."""
    candidates: tuple[int, ...] = (4, 8, 16)
    """Group sizes to choose from, ascending, each at least 2; the paper's static baselines."""
    tau: float = 2.0
    """A group straggles when its longest completion exceeds tau times its median length (ours)."""
    delta: float = 0.25
    """Long-run share of straggling groups to stay under (ours)."""
    eta: float = 2.0
    """Step size of the dual ascent: lambda moves by eta * (straggler rate - delta) per step (ours; see
    docs/controller.md)."""
    gamma: float = 0.97
    """Forgetting factor of the posteriors per step; 1.0 never forgets (ours)."""
    prior_alpha: float = 1.0
    """Beta prior of every group size, straggler side (ours)."""
    prior_beta: float = 1.0
    """Beta prior of every group size, calm side (ours)."""
    lambda_0: float = 0.0
    """Starting price of a straggler, in units of log2 G (ours)."""
    lambda_max: float = 20.0
    """Cap of that price, so that an infeasible delta cannot wind it up (ours)."""
    radius: int = 1
    """Neighbouring candidates that one step may reach (ours)."""
    dwell: int = 1
    """Steps to stay at a group size before the next choice; 5 calms Thompson sampling's flips (ours)."""
    start: int | None = None
    """Group size of the first step, one of the candidates; unset is the smallest (ours)."""
    signal: Literal["group", "any", "batch"] = "group"
    """One step's evidence: k of n groups, one bit for any group, or max/median over the whole batch (ours)."""
    ratio: Literal["group", "reference"] = "group"
    """Longest completion over the group's own median (paper), or over a smoothed median of all completions, which takes
    the small-G artefact away (ours)."""
    fallback: bool = True
    """Hold the smallest group size, and stop raising lambda, while delta is out of its reach; false is the paper's
    plain rule (ours)."""
    hold: Literal["prompts", "completions", "tokens"] = "prompts"
    """What stays constant when the group size changes. ``prompts``: ``rollout.prompts_per_step``, the only reading that
    gives the paper's saving. ``completions``: that times the largest group size. ``tokens``: that times the mean length
    of the first step, by the expected length of past steps (ours)."""
    strength: float = 1.0
    """Under ``prompt_aware``: groups after which a prompt's own history weighs as much as that of all (ours)."""
    utility: Literal["log2", "informative"] = "log2"
    """Under ``cost_aware``: what a group is worth, log2 G (paper) or the expected share of groups with right and wrong
    answers (ours)."""

    def _check(self) -> None:
        self._require(
            2 <= self.group_size <= MAX_GROUP_SIZE,
            "group_size",
            f"at least 2 (one completion has no group to be compared with), at most {MAX_GROUP_SIZE}",
        )
        increasing = list(self.candidates) == sorted(set(self.candidates))
        self._require(
            bool(self.candidates) and increasing and self.candidates[0] >= 2 and self.candidates[-1] <= MAX_GROUP_SIZE,
            "candidates",
            f"ascending group sizes without repeats, each at least 2, at most {MAX_GROUP_SIZE}",
        )
        self._require(1 < self.tau < math.inf, "tau", "a finite number above 1")
        self._require(0 < self.delta < 1, "delta", "between 0 and 1, both excluded")
        self._above_zero("eta", "prior_alpha", "prior_beta", "lambda_max", "strength")
        self._require(0 < self.gamma <= 1, "gamma", "in (0, 1]")
        self._require(0 <= self.lambda_0 <= self.lambda_max, "lambda_0", "between 0 and controller.lambda_max")
        self._at_least(1, "radius", "dwell")
        known_start = self.start is None or self.start in self.candidates
        self._require(known_start, "start", f"one of controller.candidates {list(self.candidates)}")
        for name, only in REQUIRED_BY_KIND.get(self.kind, {}).items():
            text = "unset" if only is None else f"{only}"
            self._require(getattr(self, name) == only, name, f"{text} when controller.kind is {self.kind}")

    @property
    def max_group_size(self) -> int:
        """The largest group size that this controller can choose."""
        return self.group_size if self.kind == "fixed" else self.candidates[-1]


@dataclass(frozen=True)
class UpdateOptions(Section):
    """How a step's completions become gradients."""

    SECTION: ClassVar[str] = "update"

    micro_batch_tokens: int = 4096
    """Most tokens of one forward and backward pass, a group's prompt counted once. Memory and speed depend on it, the
    gradient does not."""
    num_epochs: int = 1
    """Passes over a step's completions (TRL: num_iterations, 1)."""
    num_minibatches: int = 1
    """Optimizer steps per pass, each on its share of the groups; 1 is strictly on-policy."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """Where the old log-probs come from: those of the rollout, or one more forward pass before the update."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    logprob_diff_alarm: float = 0.05
    """Mean absolute difference between rollout and training log-probs that raises an alarm (ours; fp32 differs by
    about 1e-6, bf16 by about 1e-2)."""
    max_bad_steps: int = 5
    """Stop after so many updates in a row with a loss or gradient that is not finite (ours)."""

    def _check(self) -> None:
        self._at_least(1, "micro_batch_tokens", "num_epochs", "num_minibatches", "max_bad_steps")
        self._above_zero("logprob_diff_alarm")


@dataclass(frozen=True)
class OptimizerOptions(Section):
    """AdamW with decoupled weight decay; the learning rate rises linearly over the warm-up, then stays."""

    SECTION: ClassVar[str] = "optimizer"

    learning_rate: float = 1e-6
    """TRL's and DAPO's value for billions of parameters; small models want 1e-5 to 1e-3."""
    warmup_steps: int = 20
    """Optimizer steps from 0 to the full rate (DAPO: 20). The rate depends on the step alone, so ``steps`` may grow."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment (torch's and TRL's default)."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices and embeddings, not of norms and biases (TRL: 0, DAPO: 0.1)."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; TRL's and DAPO's value."""

    def _check(self) -> None:
        self._above_zero("learning_rate", "epsilon", "max_grad_norm")
        self._at_least(0, "warmup_steps", "weight_decay")
        self._require(self.weight_decay < math.inf, "weight_decay", "a finite number, at least 0")
        for name in ("beta1", "beta2"):
            self._require(0 <= getattr(self, name) < 1, name, "in [0, 1)")


@dataclass(frozen=True)
class RewardOptions(Section):
    """The worker processes that score completions. What they call is the task's: ``task.reward: module:function``."""

    SECTION: ClassVar[str] = "reward"

    workers: int = 1
    """Scoring processes; one is enough for scorers that take microseconds."""
    timeout_seconds: float = 5.0
    """A scorer that runs longer is killed and that completion gets reward 0, counted as an error."""

    def _check(self) -> None:
        self._at_least(1, "workers")
        self._require(self.workers <= 1024, "workers", "at most 1024, and no more than there are cores to spare")
        self._above_zero("timeout_seconds")


@dataclass(frozen=True)
class EvaluationOptions(Section):
    """Held-out problems, always the same ones with the same noise: before step 1, every N steps and at the end."""

    SECTION: ClassVar[str] = "evaluation"

    every: int = 25
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    num_problems: int = 128
    """Problems of the held-out split, one completion each, the whole split when it has fewer; 0 never evaluates. At
    accuracy .5 the standard error of 128 is .044."""
    temperature: float = 1.0
    """1.0 measures the policy that is trained, 0 its greedy answer."""

    def _check(self) -> None:
        self._at_least(0, "every", "num_problems")
        self._require(self.num_problems <= 100_000, "num_problems", "at most 100000 (a standard error of .0016)")
        self._require(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE,
            "temperature",
            f"0 or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
        )


@dataclass(frozen=True)
class CheckpointOptions(Section):
    """When the run is saved and what is kept."""

    SECTION: ClassVar[str] = "checkpoint"

    every: int = 25
    """Steps between checkpoints; one is always written at the end and on SIGTERM. 0 writes only those."""
    keep_last: int = 2
    """Newest checkpoints kept, at least 1; two leave one to fall back to."""
    keep_best: bool = True
    """Also save and keep the step with the best held-out accuracy."""

    def _check(self) -> None:
        self._at_least(0, "every")
        self._at_least(1, "keep_last")


@dataclass(frozen=True)
class MetricsOptions(Section):
    """What is written and shown beside metrics.jsonl and lengths.jsonl."""

    SECTION: ClassVar[str] = "metrics"

    timeline_every: int = 10
    """Steps between rollout timelines in timeline.jsonl, the first and last step always; 0 writes only those."""
    tensorboard: bool = True
    """Write TensorBoard event files when the tensorboard package is installed."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (pip install wandb; WANDB_MODE=offline keeps it on this machine)."""
    display: Literal["auto", "live", "plain", "off"] = "auto"
    """``auto`` shows a few lines that stay in place on a terminal and one line per step elsewhere."""

    def _check(self) -> None:
        self._at_least(0, "timeline_every")


MAIN_OPTIONS = {
    "model": "model.path", "task": "task.name", "lora": "lora.rank", "controller": "controller.kind",
    "algo": "algo.name", "reward": "task.reward", "checkpoint": "checkpoint.every", "evaluation": "evaluation.every",
}  # fmt: skip
"""What a plain value given to a section is likely to mean."""


@dataclass(frozen=True)
class TrainConfig(Section):
    """Everything that a run depends on. Sections are frozen records; ``from_yaml`` is the usual way in."""

    model: ModelOptions
    task: dict[str, Any]
    """``name`` and the task's own options, checked by the task: ``addition``, ``reasoning_gym``, ``dataset`` (also
    called ``jsonl``, ``parquet``, ``huggingface``); ``reward: module:function`` puts your own scorer in place."""
    lora: LoraOptions = field(default_factory=LoraOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    controller: ControllerOptions = field(default_factory=ControllerOptions)
    algo: dict[str, Any] = field(default_factory=lambda: {"name": "grpo"})
    """``name``: grpo, dapo, dr_grpo, gspo, cispo, rloo or reinforce_pp, and single options in place of that set's."""
    update: UpdateOptions = field(default_factory=UpdateOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    steps: int = 200
    """Optimizer steps of the whole run; a resumed run may raise it."""
    seed: int = 0
    """Fixes problems, noise and the controller's draws; the same seed gives the same run."""
    threads: int | None = None
    """Threads of this process for model and update; unset uses all cores. Training bits depend on it."""
    run_dir: str = "runs/train"
    """Folder of this run; ``from_yaml`` sets ``runs/NAME`` from the file's name when unset."""

    def _check(self) -> None:
        self._at_least(1, "steps", "threads")
        self._require(self.threads is None or self.threads <= 1024, "threads", "at most 1024")
        self._require(0 <= self.seed < 2**63, "seed", "an integer in [0, 2**63)")
        self._require(bool(self.run_dir), "run_dir", "a folder name")
        name = self.task.get("name")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"task.name is {name!r}; it must be the name of a task, for example addition.")
        loss = self.algorithm.loss
        if loss.rollout_is != "none" and self.update.old_logprobs != "recompute":
            raise ConfigError(
                f"algo.rollout_is is {loss.rollout_is!r} but update.old_logprobs is 'rollout', so there is nothing to "
                "weigh; set update.old_logprobs to recompute or algo.rollout_is to none."
            )

    @property
    def algorithm(self) -> Algorithm:
        """The options of ``algo`` resolved into one record. Raises ConfigError for an unknown one."""
        return make_algorithm(self.algo)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "the configuration") -> TrainConfig:
        """Build from nested mappings. Raises ConfigError for an unknown key, a missing one, a wrong type or range."""
        _check_main_options(values, where)
        check_keys(cls, values, root=cls, where=where)
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
        """Read ``path``, then apply ``overrides`` such as ``"steps=10"`` or ``"controller.candidates=[2, 4]"``.

        Raises ConfigError for an unreadable file, a syntax error (file and line named) and whatever from_dict raises.
        """
        values = read_yaml(Path(path))
        values.setdefault("run_dir", f"runs/{Path(path).stem}")
        apply_overrides(values, overrides)
        return cls.from_dict(values, where=str(path))

    def with_overrides(self, overrides: Sequence[str]) -> TrainConfig:
        """A copy with ``a.b=value`` settings applied."""
        values = self.to_dict()
        apply_overrides(values, overrides)
        return self.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dicts and lists, every field resolved; ``from_dict`` gives an equal record back."""
        return plain(asdict(self))

    def to_yaml(self) -> str:
        """YAML text that ``from_yaml`` reads back to an equal record."""
        import yaml

        _, dumper = yaml_dialect()
        return yaml.dump(self.to_dict(), Dumper=dumper, sort_keys=False, allow_unicode=True, width=120)


def _check_main_options(values: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for a plain value in a section's place, and for a reward function among the options of its
    processes."""
    for section, option in MAIN_OPTIONS.items():
        value = values.get(section)
        if isinstance(value, Mapping) and section == "reward":
            name, value = next(((k, v) for k, v in value.items() if isinstance(v, str) and ":" in v), (None, None))
            section = f"reward.{name}"
        if isinstance(value, (str, int, float)):
            raise ConfigError(f"{where}: there is no option {section} = {value!r}; did you mean {option}: {value}?")


def changed_fields(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Fields that differ, by full path, as (old, new)."""
    a, b = (dict(leaves(c.to_dict())) for c in (old, new))
    return {path: (a.get(path), b.get(path)) for path in sorted(a.keys() | b.keys()) if a.get(path) != b.get(path)}


def field_reference() -> list[tuple[str, str, str]]:
    """(full path, default, documentation) of every option, in order; ``algo.*`` with the defaults of ``grpo``."""
    rows = list(describe_fields(TrainConfig))
    after_algo = next(i for i, (path, _, _) in enumerate(rows) if path == "algo") + 1
    algorithm = [
        row for record in (AdvantageConfig, LossConfig, FilterConfig) for row in describe_fields(record, "algo.")
    ]
    return rows[:after_algo] + algorithm + rows[after_algo:]
