"""Each example trains as somebody has it who copied its folder: two iterations of its run file.

One small model plays all of them, in this process; the hosts of environments and agents are real.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from earl_core.config import load_config
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
        "#### 7", "7", "cad", "bad", "bug", "cog",
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


@pytest.mark.slow
@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_an_example_trains(folder: Path, model: Path, tmp_path: Path) -> None:
    if (folder / "make_data.py").exists():
        subprocess.run([sys.executable, "make_data.py"], check=True)
    here = (f"model.path={model}", f"dispatch.directory={tmp_path / 'shm'}")
    config = load_config("run.yaml", [*SMALL, *here])
    with opened_here(config, lambda *_: None) as controller:
        for number in range(2):
            assert Debugged(controller, number).whole()["update"].metrics["grad_norm"] > 0
    lines = read_lines(Path("runs") / config.name / "metrics.jsonl")
    assert len(lines) == 2
    assert all(line["rollout/episodes"] == 32 for line in lines)
    assert all(line["reward/std"] > 0 for line in lines)


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
