"""Each example trains as somebody has it who copied its folder: two iterations of its run file.

One small model plays all of them, in this process; the hosts of environments and agents are real.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from earl_core.config import load_config
from earl_core.environments.registry import create
from earl_core.run.record import read_lines
from flows.debug import Debugged, opened_here
from tests.examples.phrases import called, phrase_model

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/run.yaml"))
SMALL = (
    "iterations=2", "model.builder=null", "model.builder_options={}", "tracking.enabled=false",
    "rollout.engine=torch", "rollout.dtype=float32", "rollout.threads=1", "rollout.vllm={}",
    "rollout.prompts_per_iteration=4", "rollout.group_size=8",
    "update.precision=fp32", "update.threads=1", "update.max_tokens_per_microbatch=16384",
    "evaluation.every=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that knows how the examples' answers look."""
    phrases = [
        called("calculator", expression="1 * 2"), called("price", item="lamp"),
        "#### 7", "7", "wc -l < notes.txt > answer.txt", "cad", "bad", "bug", "cog",
    ]  # fmt: skip
    return phrase_model(tmp_path_factory.mktemp("models") / "phrases", phrases)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example's folder, as the working directory."""
    copy = tmp_path / request.param
    kept = shutil.ignore_patterns("runs", "models", "__pycache__", "*.jsonl")
    shutil.copytree(EXAMPLES / request.param, copy, ignore=kept)
    monkeypatch.chdir(copy)
    monkeypatch.syspath_prepend(str(copy))
    for module in copy.glob("*.py"):
        # Two examples have modules of one name.
        monkeypatch.delitem(sys.modules, module.stem, raising=False)
    return copy


def _trained(file: str, tmp_path: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of two iterations, each of which had a gradient."""
    config = load_config(file, [*SMALL, *overrides, f"dispatch.directory={tmp_path / 'shm'}"])
    with opened_here(config, lambda *_: None) as controller:
        for number in range(2):
            assert Debugged(controller, number).whole()["update"].metrics["grad_norm"] > 0
    return read_lines(Path("runs") / config.name / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_an_example_trains(folder: Path, model: Path, tmp_path: Path) -> None:
    if (folder / "make_data.py").exists():
        subprocess.run([sys.executable, "make_data.py"], check=True)
    lines = _trained("run.yaml", tmp_path, f"model.path={model}")
    assert len(lines) == 2
    assert all(line["rollout/episodes"] == 32 for line in lines)
    assert all(line["reward/std"] > 0 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["word_guessing"], indirect=True)
def test_an_example_begins_with_demonstrations(folder: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "demonstrations.py", "--games", "8"], check=True)
    imitated, played = _trained(
        "warm_start.yaml", tmp_path, "model.path=tiny", "model.builder=earl_core.models.tiny:build",
        "model.builder_options={hidden: 32, layers: 2, warm_start_steps: 80}",
        "model.builder_options.warm_start_learning_rate=0.01",
        "imitation.iterations=1", "imitation.episodes_per_iteration=8", "imitation.minibatches=2",
    )  # fmt: skip
    assert imitated["demonstrate/episodes"] == 8
    assert played["rollout/episodes"] == 32


@pytest.mark.parametrize("folder", ["calculator"], indirect=True)
def test_the_demonstrations_of_calls_are_right(folder: Path) -> None:
    subprocess.run([sys.executable, "demonstrations.py", "--chats", "8"], check=True)
    config = load_config("warm_start.yaml")
    lines = Path("demonstrations.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    assert len(chats) == 8
    for _, question, call, result, answer in chats:
        one, _, other = question["content"].removesuffix("?").split()[2:]
        expression = call["tool_calls"][0]["function"]["arguments"]["expression"]
        assert expression == f"{one} * {other}"
        assert int(answer["content"]) == int(result["content"]) == int(one) * int(other)
    assert config.imitation is not None
    made = create(config.environment.played, config.environment.options)
    assert [each["role"] for each in made.reset(0, 0)] == ["system", "user"]


def test_the_agent_is_the_same_beside_a_server_and_without() -> None:
    for name in ("agent.py", "shop.py"):
        one, other = (EXAMPLES / folder / name for folder in ("own_agent", "mcp_agent"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_a_page_and_its_curve(name: str) -> None:
    page = (EXAMPLES / name / "README.md").read_text()
    assert "earl train run.yaml" in page
    if "**No curve was recorded yet.**" not in page:
        assert "(curve.svg)" in page
        assert (EXAMPLES / name / "curve.svg").read_text().startswith("<svg")
    assert f"]({name}/README.md)" in (EXAMPLES / "README.md").read_text()
