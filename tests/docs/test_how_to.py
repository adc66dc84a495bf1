"""The code of the how-to pages, as it stands there: imported, played, computed."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.aggregation import AGGREGATIONS, Totals
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.objective import Objective
from earl_core.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from earl_core.config import RunConfig, load_config, parse_config
from earl_core.config.environment import EnvironmentConfig
from earl_core.config.load import RECIPES
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.environments.options import parse_options
from earl_core.environments.registry import BUILT_IN
from earl_core.environments.trial.findings import examine
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.gateway.play import play_agents
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.secrets.rules import RedactionRules
from earl_core.system.import_path import load_object
from tests.algorithms.central import compute_advantages
from tests.docs.pages import DOCS, Page, blocks
from tests.environments.test_tools import call, calling, texts
from tests.rollout.asking import answering, limits, specs
from tests.rollout.chat_models import CHATML, char_tokenizer

PAGES = DOCS / "how-to"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_package", "my_tools", "my_agent", "my_algorithms"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_an_environment_of_ones_own(directory: Path) -> None:
    page = Page("own-environment.md", directory)
    findings = examine(EnvironmentConfig(**page.settings["environment"]), episodes=9)
    assert [finding for finding in findings if finding.level in ("blocks", "warning")] == []
    exec(compile(page.snippets[0], "own-environment.md", "exec"), {})


@pytest.mark.parametrize("name", sorted(path.name for path in PAGES.glob("*.md")))
def test_settings_are_accepted(name: str, directory: Path) -> None:
    Page(name, directory)
    told = yaml.safe_load((RECIPES / "tictactoe_tiny.yaml").read_text())
    for language, text in blocks(PAGES / name):
        if language != "yaml":
            continue
        block = yaml.safe_load(text)
        if text.startswith("# rules.yaml"):
            RedactionRules.model_validate(block)
            continue
        if "environment" in block or "environments" in block:
            told.pop("environment", None)
            told.pop("environments", None)
        if "imitation" in block:
            told.pop("imitation", None)
        for section, settings in block.items():
            both = isinstance(settings, dict) and isinstance(told.get(section), dict)
            told[section] = told[section] | settings if both else settings
        config = parse_config(told)
        for environment in (*config.played.values(), *config.evaluation.suites):
            if environment.played in BUILT_IN:
                model = load_object(BUILT_IN[environment.played]).options_model
                parse_options(model, environment.options, environment.played)


def test_tools_of_ones_own(directory: Path) -> None:
    environment = EnvironmentConfig(**Page("own-tools.md", directory).settings["environment"])

    async def run() -> list[str]:
        pool = EnvironmentPool("tic_tac_toe", tools=environment.tools)
        await pool.start()
        try:
            await pool.reset(0, 0, 0)
            calls = call("price", item="tea", count=2), call("calculator", expression="1 + 1")
            return texts(await pool.use_tools(0, calling(*calls)))
        finally:
            await pool.stop()

    assert asyncio.run(run()) == ["6", "2"]


@pytest.mark.parametrize("page", ["own-agent.md", "program-agent.md"])
def test_an_agent_of_ones_own(page: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = EnvironmentConfig(**Page(page, directory).settings["environment"])
    monkeypatch.chdir(directory)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")

    async def run() -> list[Any]:
        pool = EnvironmentPool.of(environment, hosts=1, concurrency=4, log_path=None)
        await pool.start()
        try:
            chat, meter = ChatTokenizer(char_tokenizer(CHATML)), LoadMeter(2)
            return await play_agents(answering(), pool, chat, specs(2), limits(), meter=meter)
        finally:
            await pool.stop()

    for episode in asyncio.run(run()):
        assert (episode.finish_reason, len(episode.samples)) == ("done", 1)
        assert episode.info["outcome"] == "wrong"


def test_an_algorithm_of_ones_own(directory: Path) -> None:
    page = Page("own-algorithm.md", directory)
    overrides = [f"algorithm={yaml.safe_dump(page.settings['algorithm'], default_flow_style=True)}"]
    algorithm = load_config("tictactoe_tiny", overrides).algorithm
    estimator = ADVANTAGE_ESTIMATORS.build(algorithm.advantage)
    found = compute_advantages(estimator, [1.0, 0.0, 5.0, 5.0], [0, 0, 1, 1], [2, 1, 1, 1])
    np.testing.assert_allclose(found, [0.5, 0.5, -0.125, 0.0, 0.0])

    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old, reference = torch.tensor([-1.0, -3.0, -3.0]), torch.tensor([-1.5, -2.0, -4.0])
    advantages = torch.tensor([1.0, 1.0, -2.0])
    objective = Objective(
        POLICY_LOSSES.build(algorithm.policy_loss),
        AGGREGATIONS.build(algorithm.aggregation),
        KL_ESTIMATORS.build(algorithm.kl.estimator),
        algorithm.kl.coefficient,
    )
    counts = torch.tensor([2, 1])
    inputs = LossInputs(logprobs, old, advantages, torch.tensor([0, 0, 1]), 2)
    result = objective.microbatch(inputs, counts, Totals(3, 2), reference_logprobs=reference)
    result.loss.backward()  # type: ignore[no-untyped-call]
    weights = np.array([0.5**0.5, 0.5**0.5, 1.0]) / 2
    expected = -np.array([1.0, 0.0, 1.0]) * [1.0, 1.0, -2.0] + 0.01 * np.sign([0.5, 0.0, 1.0])
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), weights * expected, rtol=1e-6)
    assert result.metrics["masked_share"] == pytest.approx(1 / 3)


def test_the_keys_beside_those_of_other_projects_are_keys() -> None:
    text = (PAGES / "coming-from.md").read_text()
    schema = RunConfig.model_json_schema()

    def of(part: dict[str, Any]) -> dict[str, Any]:
        """The properties of a section, wherever the schema has them."""
        found = [part, *part.get("anyOf", ()), *part.get("allOf", ())]
        for each in found:
            target = schema["$defs"][each["$ref"].rsplit("/", 1)[1]] if "$ref" in each else each
            if "properties" in target:
                return dict(target["properties"])
        return {}

    rows = re.findall(r"^\| `([a-z_.]+)", text.partition("## Key by key")[2], re.MULTILINE)
    assert len(rows) > 30
    for key in rows:
        known = schema["properties"]
        parts = key.split(".")
        if parts[0] in ("policy_loss", "aggregation"):
            parts.insert(0, "algorithm")
        for part in parts:
            assert part in known, key
            known = of(known[part])
