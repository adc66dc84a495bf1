"""Agents of popular frameworks, unchanged: every call is recorded exactly.

Each framework is the newest of the package index, in a Python of its own that is kept between
sessions of tests (`tests/foreign.py`). Two are in the slow set, with the versions of `locks/`,
because a release of theirs is no change of ours.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.foreign import LOCKS, locked_python, newest_python
from tests.frameworks.matrix import MATRIX
from tests.frameworks.recording import Scripted, Wire, check_recorded, played

pytestmark = pytest.mark.slow


def cases() -> Any:
    for name, tried in MATRIX.items():
        yield pytest.param(name, "", marks=pytest.mark.campaign, id=name)
        if tried.locked:
            yield pytest.param(name, tried.locked, id=f"{name}, locked")


@pytest.mark.parametrize(("name", "locked"), cases())
def test_every_call_is_recorded_exactly(
    name: str, locked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = MATRIX[name]
    python, version = (
        locked_python(LOCKS / locked) if locked else newest_python(*tried.requirements)
    )
    print(f"{name}: {version}")
    wire, engine = Wire(monkeypatch), Scripted(tried.says)
    episodes = played(f"tests.frameworks.agents:{tried.agent}", python, tried.options, engine)
    for episode in episodes:
        assert episode.finish_reason == "done", (episode.info, wire.refused)
        assert (episode.total_reward, episode.info["outcome"]) == (1.0, "right"), wire.refused
    check_recorded(episodes, wire, engine)
    assert [len(episode.samples) for episode in episodes] == [tried.samples] * len(episodes)
