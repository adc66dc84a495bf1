"""Building algorithms from configuration."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageEstimator
from earl_core.algorithms.aggregation import AGGREGATIONS
from earl_core.algorithms.importance import ImportanceCorrection
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.policy_losses import POLICY_LOSSES
from earl_core.algorithms.registry import Registry
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.system.errors import ConfigError

ALL: dict[str, tuple[Registry[Any], tuple[str, ...]]] = {
    "advantages": (
        ADVANTAGE_ESTIMATORS,
        (
            *("dr_grpo", "gae", "gigpo", "grpo", "reinforce", "reinforce_plus_plus", "rloo"),
            "turn_returns",
        ),
    ),
    "losses": (POLICY_LOSSES, ("cispo", "dppo", "gspo", "policy_gradient", "ppo_clip", "sapo")),
    "kl": (KL_ESTIMATORS, ("k1", "k2", "k3")),
    "aggregations": (
        AGGREGATIONS,
        ("constant", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_mean"),
    ),
}
MEMBERS = [(registry, name) for registry, names in ALL.values() for name in names]
REQUIRED: dict[str, dict[str, Any]] = {"constant": {"length": 64}}


class UserEstimator(AdvantageEstimator):
    """Stands for an estimator in a user's own package."""

    scale: float = 2.0

    def advantages(self, returns: Any, groups: Any, batch: Any) -> Any:
        return returns * self.scale


@pytest.mark.parametrize("family", ALL)
def test_every_name_of_the_families_is_registered(family: str) -> None:
    registry, names = ALL[family]
    assert registry.names() == names


@pytest.mark.parametrize(("registry", "name"), MEMBERS)
def test_a_member_survives_the_way_through_its_specification(
    registry: Registry[Any], name: str
) -> None:
    built = registry.build({"name": name, **REQUIRED.get(name, {})})
    assert registry.build({"name": name, **built.model_dump()}) == built


@pytest.mark.parametrize(("registry", "name"), MEMBERS)
def test_members_are_immutable_and_refuse_unknown_parameters(
    registry: Registry[Any], name: str
) -> None:
    with pytest.raises(ConfigError, match="no_such_parameter"):
        registry.build({"name": name, **REQUIRED.get(name, {}), "no_such_parameter": 1})
    built = registry.build({"name": name, **REQUIRED.get(name, {})})
    with pytest.raises(ValidationError):
        built.anything = 1


def test_a_bare_name_means_its_defaults() -> None:
    assert ADVANTAGE_ESTIMATORS.build("grpo") == ADVANTAGE_ESTIMATORS.build({"name": "grpo"})


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(ConfigError) as caught:
        POLICY_LOSSES.build({"name": "pppo"})
    assert "'pppo'" in str(caught.value)
    for name in POLICY_LOSSES.names():
        assert name in str(caught.value)


@pytest.mark.parametrize("spec", [{}, {"name": ""}, {"name": 3}, ""])
def test_a_missing_name_lists_the_names(spec: Any) -> None:
    with pytest.raises(ConfigError, match=r"needs a `name`.*ppo_clip"):
        POLICY_LOSSES.build(spec)


def test_a_class_by_import_path() -> None:
    path = f"{__name__}:UserEstimator"
    built = ADVANTAGE_ESTIMATORS.build({"name": path, "scale": 3.0})
    assert isinstance(built, UserEstimator)
    assert built.scale == 3.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.module:Thing", "cannot be imported"),
        (f"{__name__}:Missing", "cannot be imported"),
        ("collections:OrderedDict", "must be a subclass of .*AdvantageEstimator"),
        ("earl_core.algorithms.kl:K1", "must be a subclass of .*AdvantageEstimator"),
        ("earl_core.algorithms.advantages:AdvantageEstimator", "cannot be built.*abstract"),
    ],
)
def test_a_wrong_import_path_is_one_clear_error(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ADVANTAGE_ESTIMATORS.build({"name": path})


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="is taken"):
        ADVANTAGE_ESTIMATORS.register("grpo")(UserEstimator)


@pytest.mark.parametrize(
    ("registry", "spec"),
    [
        (POLICY_LOSSES, {"name": "ppo_clip", "clip_low": 0.0}),
        (POLICY_LOSSES, {"name": "ppo_clip", "clip_low": 1.0}),
        (POLICY_LOSSES, {"name": "ppo_clip", "clip_high": -0.1}),
        (POLICY_LOSSES, {"name": "ppo_clip", "clip_high": float("inf")}),
        (POLICY_LOSSES, {"name": "ppo_clip", "dual_clip": 1.0}),
        (POLICY_LOSSES, {"name": "gspo", "clip_low": "wide"}),
        (POLICY_LOSSES, {"name": "cispo", "clip_high": 0.0}),
        (POLICY_LOSSES, {"name": "cispo", "clip_low": 0.2}),
        (POLICY_LOSSES, {"name": "dppo", "mask_low": 1.0}),
        (POLICY_LOSSES, {"name": "dppo", "mask_high": 0.0}),
        (POLICY_LOSSES, {"name": "sapo", "tau_negative": 0.0}),
        (ADVANTAGE_ESTIMATORS, {"name": "grpo", "epsilon": 0.0}),
        (ADVANTAGE_ESTIMATORS, {"name": "reinforce_plus_plus", "epsilon": float("nan")}),
        (ADVANTAGE_ESTIMATORS, {"name": "reinforce", "baseline": "value"}),
        (AGGREGATIONS, {"name": "constant"}),
        (AGGREGATIONS, {"name": "constant", "length": 0}),
    ],
)
def test_wrong_parameters_are_named(registry: Registry[Any], spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has wrong parameters") as caught:
        registry.build(spec)
    parameter = next((key for key in spec if key != "name"), "length")
    assert parameter in str(caught.value)


def test_parameters_outside_registries_are_checked_too() -> None:
    for wrong in ({"cap": 0.0}, {"level": "episode"}, {"other": 1}):
        with pytest.raises(ValidationError):
            ImportanceCorrection(**wrong)
    with pytest.raises(ValidationError):
        AlgorithmConfig(entropy_coefficient=-0.1)


def test_reading_a_configuration_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from earl_core.algorithms.advantage_batch import Episodes, batch_moments\n"
        "from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS\n"
        "from earl_core.algorithms.aggregation import AGGREGATIONS\n"
        "from earl_core.algorithms.kl import KL_ESTIMATORS\n"
        "from earl_core.algorithms.policy_losses import POLICY_LOSSES\n"
        "for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES, KL_ESTIMATORS, AGGREGATIONS):\n"
        "    for name in registry.names():\n"
        "        spec = {'name': name, 'length': 8} if name == 'constant' else name\n"
        "        registry.build(spec)\n"
        "episodes = Episodes.checked([1, 0], [0, 0], [3, 2])\n"
        "batch_moments(ADVANTAGE_ESTIMATORS.build('reinforce_plus_plus'), episodes)\n"
        "heavy = {'torch', 'transformers', 'vllm', 'prefect', 'mlflow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
