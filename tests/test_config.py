"""The configuration: what it accepts, and what it says when it does not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast.config import ControllerOptions, TrainConfig, changed_fields, field_reference
from sagc_fast.errors import ConfigError

MINIMAL = {"model": {"path": "folder"}, "task": {"name": "addition"}}


def config(**sections) -> TrainConfig:
    return TrainConfig.from_dict({**MINIMAL, **sections})


def message(**sections) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    return str(caught.value)


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_defaults_are_those_of_trl_and_dapo():
    c = config()
    assert (c.optimizer.learning_rate, c.optimizer.warmup_steps, c.rollout.temperature) == (1e-6, 20, 1.0)
    assert c.controller.candidates == (4, 8, 16)


def test_the_controller_section_is_the_controllers_own_record():
    """Fields and defaults of SAGCConfig are repeated in the configuration for its documentation; they must agree."""
    from sagc_fast.controller import SAGCConfig

    theirs = {f.name: f.default for f in fields(SAGCConfig)}
    ours = {f.name: f.default for f in fields(ControllerOptions)}
    assert {n: ours.get(n, "missing") for n in theirs if n not in ("adv_scale", "max_length")} == {
        n: default for n, default in theirs.items() if n not in ("adv_scale", "max_length")
    }
    assert set(ours) - set(theirs) == {"kind", "group_size", "strength", "utility"}


def test_the_other_controllers_defaults_are_theirs_too():
    from sagc_fast.controller import CostAwareConfig
    from sagc_fast.controller.prompt_aware import PRIOR_STRENGTH

    ours = {f.name: f.default for f in fields(ControllerOptions)}
    assert ours["strength"] == PRIOR_STRENGTH
    theirs = {f.name: f.default for f in fields(CostAwareConfig) if f.name in ours}
    assert theirs == {name: ours[name] for name in theirs}
    assert set(theirs) == {"candidates", "utility", "hold", "radius", "tau"}


def test_what_a_kind_needs_is_left_alone_and_every_kind_has_defaults_that_work():
    for kind in ("sagc", "fixed", "prompt_aware", "cost_aware"):
        assert config(controller={"kind": kind}).controller.kind == kind
    assert config(controller={"kind": "cost_aware", "hold": "tokens", "utility": "informative"})
    assert config(controller={"kind": "prompt_aware", "start": 16, "strength": 2})


def test_records_are_frozen():
    with pytest.raises(FrozenInstanceError):
        config().steps = 3


def test_yaml_and_overrides_of_the_same_names(tmp_path):
    path = write(tmp_path, "model: {path: m}\ntask: {name: addition, max_digits: 3}\nrollout:\n  temperature: 0.7\n")
    c = TrainConfig.from_yaml(
        path,
        overrides=["steps=10", "controller.candidates=[2, 4]", "rollout.kv_budget_gb=1", "task.max_digits=5"],
    )
    assert (c.steps, c.controller.candidates, c.rollout.temperature) == (10, (2, 4), 0.7)
    assert c.rollout.kv_budget_gb == 1.0
    assert isinstance(c.rollout.kv_budget_gb, float)
    assert c.task == {"name": "addition", "max_digits": 5}
    assert c.run_dir == "runs/run"


def test_numbers_like_1e_6_and_a_bare_off_mean_what_they_say(tmp_path):
    path = write(
        tmp_path, "model: {path: m}\ntask: {name: a}\noptimizer: {learning_rate: 3e-4}\nmetrics: {display: off}"
    )
    c = TrainConfig.from_yaml(path, ["optimizer.epsilon=1e-7"])
    assert (c.optimizer.learning_rate, c.optimizer.epsilon, c.metrics.display) == (3e-4, 1e-7, "off")


def test_round_trip_through_yaml(tmp_path):
    c = config(controller={"candidates": [2, 6], "kind": "fixed"}, algo={"name": "dapo", "clip_high": 0.3}, steps=7)
    assert TrainConfig.from_yaml(write(tmp_path, c.to_yaml())) == c
    assert TrainConfig.from_dict(c.to_dict()) == c


def test_with_overrides_and_changed_fields():
    c = config()
    d = c.with_overrides(["rollout.temperature=0.5", "task.max_terms=2"])
    assert changed_fields(c, d) == {"rollout.temperature": (1.0, 0.5), "task.max_terms": (None, 2)}
    assert changed_fields(c, c) == {}


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({"rolout": {"temperature": 1}}, "rolout; did you mean rollout"),
        ({"rollout": {"temprature": 1}}, "rollout.temprature; did you mean rollout.temperature"),
        ({"temperature": 1}, "temperature; did you mean rollout.temperature"),
        ({"optimizer": {"lerning_rate": 1}}, "did you mean optimizer.learning_rate"),
        ({"update": {"learning_rate": 1}}, "update.learning_rate; did you mean optimizer.learning_rate"),
        ({"zzz": 1}, "no option zzz; `sagc-fast train --fields`"),
    ],
)
def test_unknown_key_names_the_nearest_valid_path(sections, wanted):
    assert wanted in message(**sections)


def test_unknown_key_in_a_file_names_the_file(tmp_path):
    path = write(tmp_path, "model: {path: m}\ntask: {name: addition}\nrollout: {temprature: 1}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: there is no option rollout\.temprature"):
        TrainConfig.from_yaml(path)


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({"controller": {"kind": "fixed", "group_size": 1}}, "controller.group_size is 1; it must be at least 2"),
        ({"controller": {"candidates": [8, 4]}}, "controller.candidates is [8, 4]; it must be ascending"),
        ({"controller": {"candidates": [1, 4]}}, "controller.candidates is [1, 4]"),
        ({"controller": {"candidates": []}}, "controller.candidates is []"),
        ({"controller": {"candidates": [4, 4]}}, "controller.candidates is [4, 4]"),
        ({"controller": {"candidates": 4}}, "controller.candidates is 4; it must be a list"),
        ({"controller": {"candidates": [4, "x"]}}, "controller.candidates[1] is 'x'; it must be a whole number"),
        ({"controller": {"delta": 1.0}}, "controller.delta is 1.0; it must be between 0 and 1"),
        ({"controller": {"hold": "steps"}}, "it must be prompts, completions or tokens"),
        ({"controller": {"kind": "oracle"}}, "it must be sagc, fixed, prompt_aware or cost_aware"),
        (
            {"controller": {"kind": "prompt_aware", "hold": "tokens"}},
            "controller.hold is 'tokens'; it must be prompts when controller.kind is prompt_aware.",
        ),
        (
            {"controller": {"kind": "prompt_aware", "signal": "any"}},
            "controller.signal is 'any'; it must be group",
        ),
        ({"controller": {"kind": "prompt_aware", "ratio": "reference"}}, "controller.ratio is 'reference'; it must be"),
        ({"controller": {"kind": "prompt_aware", "dwell": 5}}, "controller.dwell is 5; it must be 1 when"),
        ({"controller": {"kind": "prompt_aware", "strength": 0}}, "controller.strength is 0.0; it must be a finite"),
        ({"controller": {"kind": "cost_aware", "dwell": 2}}, "controller.dwell is 2; it must be 1 when"),
        ({"controller": {"kind": "cost_aware", "start": 8}}, "controller.start is 8; it must be unset when"),
        ({"controller": {"kind": "cost_aware", "utility": "G"}}, "it must be log2 or informative"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature is 0.0; it must be from 1e-30 to 1e+06"),
        ({"evaluation": {"temperature": 1e-38}}, "evaluation.temperature is 1e-38; it must be 0 or from 1e-30"),
        ({"rollout": {"temperature": "warm"}}, "rollout.temperature is 'warm'; it must be a number"),
        ({"rollout": {"temperature": float("nan")}}, "rollout.temperature is nan"),
        ({"rollout": {"max_new_tokens": 0}}, "rollout.max_new_tokens is 0; it must be at least 1"),
        ({"rollout": {"prompts_per_step": 2.5}}, "rollout.prompts_per_step is 2.5; it must be a whole number"),
        ({"rollout": {"prompts_per_step": True}}, "rollout.prompts_per_step is True"),
        ({"rollout": [1]}, "rollout is [1]; it must be a section"),
        ({"metrics": {"tensorboard": "yes please"}}, "metrics.tensorboard is 'yes please'; it must be true or false"),
        ({"model": {"path": "m", "dtype": "fp16"}}, "model.dtype is 'fp16'; it must be fp32 or bf16"),
        ({"model": {}}, "model.path is missing"),
        ({"task": {"digits": 3}}, "task.name is None"),
        ({"algo": {"name": "ppo"}}, "algo.name is 'ppo'; it must be one of grpo"),
        ({"algo": {"clip_hihg": 1}}, "did you mean clip_high"),
        ({"algo": {"rollout_is": "truncate"}}, "set update.old_logprobs to recompute"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"controller": {"group_size": 10**30}}, "(one completion has no group to be compared with), at most 65536"),
        ({"controller": {"candidates": [4, 10**9]}}, "controller.candidates is [4, 1000000000]; it must be ascending"),
        ({"optimizer": {"weight_decay": float("inf")}}, "optimizer.weight_decay is inf; it must be a finite number"),
        ({"reward": {"workers": 10**6}}, "reward.workers is 1000000; it must be at most 1024"),
        ({"rollout": {"temperature": 1e300}}, "rollout.temperature is 1e+300; it must be from 1e-30 to 1e+06"),
        ({"optimizer": {"beta2": 1.0}}, "optimizer.beta2 is 1.0; it must be in [0, 1)"),
    ],
)
def test_bad_values_name_path_value_and_what_is_allowed(sections, wanted):
    assert wanted in message(**sections)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("model: {path: m\ntask: [", r"run\.yaml, line \d+: not valid YAML"),
        ("model: {path: m}\ntask: {name: a}\n\trollout: 1\n", r"run\.yaml, line 3: not valid YAML"),
        ("steps: 3\nseed: 1\nsteps: 4\n", r"run\.yaml, line 3: not valid YAML \(the key steps stands twice\)"),
        ("- a\n- b\n", "holds a list"),
        ("steps: 3\n[a, b]: 1\n", r"run\.yaml, line 2: not valid YAML \(a key must be a name"),
        ("steps: 3\n---\nseed: 1\n", r"run\.yaml, line 2: a second YAML document begins here.*remove the line ---"),
        ("", "model is missing"),
    ],
)
def test_malformed_files_name_file_and_line(tmp_path, text, wanted):
    with pytest.raises(ConfigError, match=wanted):
        TrainConfig.from_yaml(write(tmp_path, text))


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        TrainConfig.from_yaml(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml is not a text file"):
        TrainConfig.from_yaml(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("steps", "not of the form name=value"),
        ("=3", "not of the form name=value"),
        ("steps=[1", "not YAML"),
        ("steps.more=1", "goes below steps"),
        ("stepz=1", "did you mean steps"),
    ],
)
def test_bad_overrides(override, wanted):
    with pytest.raises(ConfigError, match=wanted):
        config(steps=3).with_overrides([override])


def test_every_field_is_documented_and_no_default_is_lost():
    documented = {path: doc for path, _, doc in field_reference()}
    assert [path for path, default, _ in field_reference() if default == "required"] == ["model.path", "task"]

    def check(config_class, prefix=""):
        from sagc_fast.config_parsing import _field_types

        for f in fields(config_class):
            hint = _field_types(config_class)[f.name]
            if is_dataclass(hint):
                check(hint, f"{prefix}{f.name}.")
            else:
                assert documented[prefix + f.name], prefix + f.name

    check(TrainConfig)


def test_importing_the_configuration_is_light():
    code = (
        "import sys, sagc_fast.config, sagc_fast.cli; assert not {'torch', 'numpy', 'numba', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(max_examples=50, deadline=None)
@given(
    temperature=st.floats(0.01, 10),
    candidates=st.sets(st.integers(2, 64), min_size=1, max_size=5),
    seed=st.integers(0, 2**63 - 1),
    run_dir=st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=20),
)
def test_any_valid_configuration_survives_yaml(tmp_path_factory, temperature, candidates, seed, run_dir):
    c = config(
        rollout={"temperature": temperature}, controller={"candidates": sorted(candidates)}, seed=seed, run_dir=run_dir
    )
    assert TrainConfig.from_yaml(write(tmp_path_factory.mktemp("yaml"), c.to_yaml())) == c


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("reward=mine:score", "task.reward: mine:score"),
        ("reward.function=mine:score", "task.reward: mine:score"),
        ("algo=dapo", "algo.name: dapo"),
        ("task=addition", "task.name: addition"),
        ("controller=fixed", "controller.kind: fixed"),
    ],
)
def test_a_value_in_a_sections_place_is_told_where_it_belongs(tmp_path, override, meant):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ntask: {name: addition}\n")
    with pytest.raises(ConfigError, match=f"did you mean {meant}\\?"):
        TrainConfig.from_yaml(path, [override])
