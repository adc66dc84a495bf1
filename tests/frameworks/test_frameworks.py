"""Agents of popular frameworks, unchanged: every call is recorded exactly.

Each framework is the newest of the package index, in a Python of its own that is kept between
sessions of tests (`tests/foreign.py`).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.foreign import newest_python
from tests.frameworks.matrix import MATRIX, Tried
from tests.frameworks.recording import Scripted, Wire, check_recorded, played

pytestmark = pytest.mark.slow


def marks(tried: Tried) -> Any:
    return () if tried.in_ci else pytest.mark.campaign


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(tried)) for name, tried in MATRIX.items()]
)
def test_every_call_is_recorded_exactly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = MATRIX[name]
    python, version = newest_python(*tried.requirements)
    print(f"{name}: {version}")
    wire, engine = Wire(monkeypatch), Scripted(tried.says)
    episodes = played(f"tests.frameworks.agents:{tried.agent}", python, tried.options, engine)
    for episode in episodes:
        assert episode.finish_reason == "done", (episode.info, wire.refused)
        assert (episode.total_reward, episode.info["outcome"]) == (1.0, "right"), wire.refused
    check_recorded(episodes, wire, engine)
    assert [len(episode.samples) for episode in episodes] == [tried.samples] * len(episodes)
