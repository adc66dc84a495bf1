"""The run settings of the page of placements: `earl plan --explain` of each, as a user asks it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from docs.site import placements
from earl_core.config.load import dump_config
from earl_core.deployment.placement import find_placement
from flows.cli.app import app
from tests.docs.pages import blocks, write_file

TEXT = placements.PAGE.read_text()
HEADINGS = [heading for heading, *_ in placements.blocks(TEXT)]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The placement of the page, importable."""
    for language, text in blocks(placements.PAGE):
        if language == "python":
            assert write_file(text, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    find_placement.cache_clear()


def test_the_page_has_each_policy() -> None:
    assert len(HEADINGS) == 7
    assert TEXT.count("```yaml\n") == 1 + len(HEADINGS)
    assert HEADINGS[-1] == placements.OWN


@pytest.mark.parametrize("number", range(len(HEADINGS)), ids=HEADINGS)
@pytest.mark.usefixtures("own")
def test_what_the_page_says_is_planned(number: int, tmp_path: Path) -> None:
    heading, hardware, config = [*placements.blocks(TEXT)][number]
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    asked = ["plan", str(file), "--explain", "--hardware", hardware, "--model", placements.MODEL]
    if heading == placements.OWN:
        refused = CliRunner().invoke(app, asked)
        words = " ".join(refused.output.split())
        assert "not imported: stages.placement (my_placement:UPPER): if you trust it, add" in words
        asked.append("--run-code")
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    for part in ("Who is where", "What moves in an iteration", "engine 0", "shared memory"):
        assert part in shown.output
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert told["plan"]["stages"]["update"]["shard"] == config.stages.update.shard
    engines = [seat for seat in told["places"] if seat["who"].startswith("engine ")]
    assert len(engines) == config.stages.rollout.replicas
    assert told["moves"][-1]["columns"] == ["weights"]
    assert {move["to"] for move in told["moves"]} >= {"reward", "advantage", "update"}
    assert all(move["here"] > 0 for move in told["moves"])
    assert (config.cluster.most > 1) == any(move["received"] for move in told["moves"])
    if heading == placements.OWN:
        ranks = [seat["devices"] for seat in told["places"] if seat["stage"] == "update"]
        assert (engines[-1]["devices"], ranks) == ("GPU 7", ["GPUs 4-7"])
