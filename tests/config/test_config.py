"""Configuration files, overrides and the messages of bad ones."""

from __future__ import annotations

import math
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from earl_core.algorithms.advantages import GroupRelative, Reinforce
from earl_core.algorithms.policy_losses import LossInputs, PolicyLoss
from earl_core.config import ConfigError, dump_config, load_config, parse_config
from earl_core.config.load import RECIPES
from earl_core.config.stage_keys import stage_key
from earl_core.config.table import resolved_rows

MINIMAL = {
    "name": "a",
    "iterations": 2,
    "model": {"path": "models/x"},
    "environment": {"name": "tic_tac_toe"},
    "rollout": {"prompts_per_iteration": 4, "group_size": 2, "max_turns": 5},
}


def with_(**changes: object) -> dict[str, object]:
    merged = {
        key: dict(value) if isinstance(value, dict) else value for key, value in MINIMAL.items()
    }
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        if key:
            merged.setdefault(section, {})[key] = value  # type: ignore[index]
        else:
            merged[section] = value
    return merged


STREAM = {"staleness": 1, "mode": "stream"}


def streaming(**changes: dict[str, object]) -> dict[str, object]:
    """Groups go on under newer weights, with other changes to sections."""
    rollout = {**MINIMAL["rollout"], "engine": "torch", **changes.pop("rollout", {})}  # type: ignore[dict-item]
    return with_(
        schedule=STREAM, algorithm={"importance_correction": {}}, rollout=rollout, **changes
    )


class OwnEstimator(Reinforce):
    """An estimator without groups."""


class OwnGroups(GroupRelative):
    """An estimator of groups."""


class OwnLoss(PolicyLoss):
    """A loss that says nothing about tokens without an advantage."""

    def per_token(self, inputs: LossInputs) -> tuple[Any, dict[str, Any]]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (with_(model__pth="x"), "model.pth: unknown key"),
        (with_(iteratons=3), "iteratons: unknown key"),
        ({"name": "a"}, "model: missing"),
        (with_(rollout__group_size=1), "group_size must be at least 2, not 1"),
        (
            with_(rollout__group_size=1, rollout__alike_groups="replace"),
            "alike_groups is `replace`, but in groups of one episode all score alike: raise",
        ),
        (
            with_(rollout__alike_groups="drop", algorithm={"advantage": "reinforce"}),
            "alike_groups is `drop`, but algorithm.advantage 'reinforce' does not compare the",
        ),
        (
            with_(
                rollout__alike_groups="replace",
                algorithm={"advantage": "tests.config.test_config:OwnEstimator"},
            ),
            "OwnEstimator' does not compare the episodes of a group",
        ),
        (with_(rollout__max_waves=0), "rollout.max_waves"),
        (
            with_(
                rollout__alike_groups="replace",
                environment=None,
                environments=[
                    {"name": "tic_tac_toe"},
                    {
                        "name": "connect_four",
                        "label": "old",
                        "reward_weight": 0.0,
                        "kl": {"coefficient": 0.1},
                    },
                ],
                algorithm={"kl": {"placement": "loss"}},
            ),
            "no episode of the environment 'old' gets a reward, so all of its groups would leave",
        ),
        (with_(rollout__top_p=0.9), "top_p must stay 1.0"),
        (with_(rollout__top_k=5), "top_k must stay 0"),
        (with_(rollout__stop=["end", ""]), "rollout.stop holds an empty string"),
        (with_(rollout__temperature=0), "rollout.temperature"),
        (with_(name="../x"), "cannot be a directory"),
        (with_(algorithm={"kl": {"placement": "loss"}}), "contradict each other"),
        (with_(algorithm={"policy_loss": "ppo"}), "no policy loss named 'ppo'"),
        (with_(algorithm={"policy_loss": {"name": "ppo_clip", "clip": 1}}), "clip"),
        (with_(algorithm={"advantage": {"nam": "grpo"}}), "algorithm.advantage"),
        (
            with_(algorithm={"policy_loss": "dppo", "importance_correction": {"cap": 2.0}}),
            "'dppo' corrects for the engine's log-probs itself",
        ),
        (
            with_(algorithm={"importance_correction": {"anchor": "rollout", "cap": 2.0}}),
            "importance_correction.cap bounds weights, which there are none of with anchor",
        ),
        (
            with_(
                algorithm={
                    "policy_loss": "policy_gradient",
                    "importance_correction": {"anchor": "rollout"},
                }
            ),
            "'policy_gradient' has no ratio that could be to the policy that sampled",
        ),
        (with_(schedule={"staleness": 1}), "and nothing corrects for that: set"),
        (
            with_(schedule={"staleness": 1}, algorithm={"policy_loss": "gspo"}),
            "algorithm.importance_correction",
        ),
        (
            with_(schedule={"staleness": 8}, algorithm={"policy_loss": "dppo"}),
            "schedule.staleness",
        ),
        (
            with_(iterations=3, schedule={"staleness": 3}, algorithm={"policy_loss": "dppo"}),
            ": lower it, or raise iterations",
        ),
        (with_(schedule={"mode": "stream"}), "set staleness to 1 or more"),
        (with_(schedule=STREAM), "and nothing corrects for that: set"),
        (streaming(rollout={"alike_groups": "drop"}), "does not go with rollout.alike_groups"),
        (streaming(imitation={"data": "x", "iterations": 1}), "does not go with imitation"),
        (
            with_(
                algorithm={"kl": {"placement": "loss", "coefficient": 0.1}},
                update={"zero_advantage": "skip"},
            ),
            "kl.placement is `loss`, which gives samples without an advantage a gradient: set it",
        ),
        (
            with_(algorithm={"entropy_coefficient": 0.1}, update={"zero_advantage": "skip"}),
            "but algorithm.entropy_coefficient is not 0, which",
        ),
        (
            with_(
                algorithm={"policy_loss": "tests.config.test_config:OwnLoss"},
                update={"zero_advantage": "skip"},
            ),
            "but algorithm.policy_loss is 'tests.config.test_config:OwnLoss', which",
        ),
        (
            with_(rollout__max_tokens_per_turn=9, rollout__max_tokens_per_episode=5),
            "exceeds rollout.max_tokens_per_episode",
        ),
        (
            with_(rollout__max_tokens_per_turn=900, update={"max_tokens_per_microbatch": 100}),
            "raise the first",
        ),
        (with_(update={"minibatches": 5}), "exceeds rollout.prompts_per_iteration"),
        (with_(imitation={"iterations": 1}), "imitation needs either `data`, or the `run`"),
        (with_(imitation={"iterations": 1, "data": "a", "run": "b"}), "needs either `data`, or"),
        (with_(imitation={"iterations": 1, "data": "a", "best_of": 2}), "the episodes of a `run`"),
        (with_(imitation={"iterations": 1, "run": "b", "split": "train"}), "is one of `data`"),
        (with_(imitation={"iterations": 99, "data": "a"}), "which counts them too: raise it"),
        (
            with_(imitation={"iterations": 1, "data": "a", "minibatches": 999}),
            "each minibatch needs a demonstration of its own",
        ),
        (with_(model__builder="no_colon"), "package.module:function"),
        (with_(name="prefect"), "name 'prefect' is taken"),
        (with_(name="mlflow.db"), "name 'mlflow.db' is taken"),
        (with_(name="mlflow.db-wal"), "name 'mlflow.db-wal' is taken"),
        (with_(update={"learning_rate": math.inf}), "update.learning_rate: inf is not a finite"),
        (
            with_(environment__step_timeout_seconds=math.inf),
            "environment.step_timeout_seconds: inf is not a finite",
        ),
        (
            with_(environment={"agent": "a:b", "call_timeout_seconds": 600}),
            "must be below environment.episode_timeout_seconds",
        ),
        (
            with_(reward={"functions": [{"function": "judge"}, {"function": "a.b:judge"}]}),
            "reward: reward.functions have the label 'judge' twice",
        ),
        (
            with_(reward={"functions": [{"function": "judge", "environments": ["chat"]}]}),
            "'judge' is for the environment 'chat', but the run has one environment",
        ),
        (
            with_(
                reward__environment_weight=0, reward__functions=[{"function": "a:b", "weight": 0}]
            ),
            "every reward would be 0",
        ),
        (
            with_(reward={"functions": [{"function": "judge", "options": {"api_key": "sk-1"}}]}),
            "reward.functions.0.options.api_key holds a secret",
        ),
        (with_(deadlines={"stage": math.nan}), "deadlines.stage: nan is not a finite"),
        (with_(guard="on"), "guard: Input should be 'off', 'warn' or 'act'"),
        (with_(guard="act", checkpoint={"keep_last": 1}), "checkpoint.keep_last is 1: raise it to"),
        (with_(environment__options={"a": {"b": [1, math.nan]}}), "options: a.b.1 is nan"),
        (with_(environment__options={"day": date(2026, 1, 2)}), "options: day is of type date"),
        (with_(environment__options={"a": {1: 2}}), "options: a has the key 1"),
        (with_(model__builder_options={"chosen": {1, 2}}), "builder_options: chosen is of type"),
        (with_(evaluation={"options": {"x": math.inf}}), "evaluation.options: x is inf"),
        (
            with_(algorithm={"policy_loss": {"name": "ppo_clip", "clip_high": math.inf}}),
            "algorithm.policy_loss: clip_high is inf",
        ),
    ],
)
def test_bad_configurations_say_what_to_change(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        parse_config(raw)


@pytest.mark.parametrize(
    ("algorithm", "skips"),
    [
        ({}, True),
        ({"policy_loss": "gspo", "importance_correction": {}}, True),
        ({"kl": {"placement": "reward", "coefficient": 0.1}}, True),
        ({"kl": {"placement": "loss", "coefficient": 0.1}}, False),
        ({"entropy_coefficient": 0.1}, False),
        ({"policy_loss": "tests.config.test_config:OwnLoss"}, False),
    ],
)
def test_samples_without_advantage_are_skipped_where_that_is_exact(
    algorithm: dict[str, Any], skips: bool
) -> None:
    given = with_(algorithm=algorithm)
    assert parse_config(given).skips_zero_advantage is skips
    given["update"] = {"zero_advantage": "compute"}
    assert not parse_config(given).skips_zero_advantage


def test_alike_groups_leave_any_estimator_of_groups() -> None:
    own = {"advantage": "tests.config.test_config:OwnGroups"}
    config = parse_config(with_(rollout__alike_groups="replace", algorithm=own)).rollout
    assert (config.filters_groups, config.most_waves) == (True, 3)
    assert parse_config(with_(rollout__alike_groups="drop")).rollout.most_waves == 1
    assert not parse_config(with_(rollout__max_waves=7)).rollout.filters_groups


def test_keys_of_stages_without_alike_groups_stay() -> None:
    """`select` covers all settings of the rollout; the waves need none of these two."""

    def keys(**changes: Any) -> list[str]:
        config = parse_config(with_(**changes))
        names = ["select", "rollout", "rollout_wave2", "reward_wave1"]
        return [stage_key(config, "uid", 1, name, []) for name in names]

    kept = keys()
    assert kept == keys(rollout__max_waves=3, rollout__alike_groups="keep")
    dropped, replaced = keys(rollout__alike_groups="drop"), keys(rollout__alike_groups="replace")
    assert len({kept[0], dropped[0], replaced[0]}) == 3
    assert kept[1:] == dropped[1:] == replaced[1:]


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(with_(model__pth="x", rollout__top_k=5))
    assert "model.pth" in str(caught.value)
    assert "top_k" in str(caught.value)


def test_overrides_files_and_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    config = load_config(
        path,
        [
            "update.learning_rate=1e-5",
            "algorithm.policy_loss.name=gspo",
            "environment.options.opponent=greedy",
            "rollout.stop=['.']",
        ],
    )
    assert config.update.learning_rate == 1e-5
    assert config.algorithm.policy_loss == {"name": "gspo"}
    assert config.environment.options == {"opponent": "greedy"}
    assert config.rollout.stop == (".",)
    path.write_text(dump_config(config))
    assert load_config(path) == config


OPTION = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="ascii", exclude_categories=["Cc"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["x", "y", "1", "no"]), OPTION))
def test_options_come_back_as_they_were(options: dict[str, object]) -> None:
    config = parse_config(with_(environment__options=options))
    again = parse_config(yaml.safe_load(dump_config(config)))
    assert repr(again.environment.options) == repr(options)


def test_options_that_contain_themselves(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(with_(environment__options={"a": 1})))
    path.write_text(path.read_text().replace("options:", "options: &o").replace("a: 1", "a: *o"))
    with pytest.raises(ConfigError, match="the anchor in line 3 holds itself"):
        load_config(path)


def test_missing_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "nothing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(ConfigError, match="must be a mapping"):
        load_config(tmp_path / "list.yaml")


def test_the_first_evaluation_may_be_smaller_than_the_others() -> None:
    assert [load_config("demo").evaluation.episodes_of(version) for version in (0, 1, 24)] == [
        24,
        256,
        256,
    ]
    usual = parse_config(with_(evaluation={"episodes": 8})).evaluation
    assert (usual.episodes_of(0), usual.episodes_of(1)) == (8, 8)


def test_resolved_table_multiplies_the_sizes() -> None:
    rows = {what: value for what, value, _ in resolved_rows(parse_config(MINIMAL))}
    assert rows["episodes per iteration"] == "8"
    assert rows["episodes in all"] == "16"


def test_recipes_are_valid_and_loaded_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    (tmp_path / "demo").write_text("not a recipe")
    monkeypatch.chdir(tmp_path)
    assert names
    for name in names:
        assert load_config(name).name == name
    with pytest.raises(ConfigError, match=r"cannot be read: .* the recipes .*demo, tictactoe_"):
        load_config("dema")


@pytest.mark.parametrize(
    "modules", ["earl_core.config", "earl_core.selector", "flows.train", "flows.cli"]
)
def test_the_flow_process_imports_no_torch(modules: str) -> None:
    script = (
        f"import sys, {modules}\n"
        "found = {'torch', 'transformers', 'vllm', 'accelerate'} & set(sys.modules)\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_places_begin_with_the_home_where_they_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = parse_config(with_(model__path="~/models/x", runs_directory="~/runs"))
    assert (config.model.path, config.runs_directory) == ("/home/me/models/x", "/home/me/runs")
