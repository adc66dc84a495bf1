"""Trials of environments with one fault each: the finding names it, and nothing else blocks."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from earl_core.config.environment import EnvironmentConfig
from earl_core.environments.trial.findings import examine
from earl_core.system.finding import Finding

USER = "tests.environments.user_environments"


def tried(name: str = "Trying", episodes: int = 6, **settings: Any) -> list[Finding]:
    named = EnvironmentConfig(name=f"{USER}:{name}", **settings)
    return examine(named, episodes=episodes, turns=5)


def worse(findings: list[Finding]) -> dict[str, str]:
    """The levels of what is not good or a note, and their texts."""
    return {f"{f.text} → {f.advice}": f.level for f in findings if f.level in ("warning", "blocks")}


def test_a_sound_environment_has_no_faults() -> None:
    findings = tried(episodes=4, options={"fault": "sleeps"})
    assert worse(findings) == {}
    assert {finding.level for finding in findings} == {"good"}
    assert any("outcomes: end 4" in finding.text for finding in findings)


@pytest.mark.parametrize(
    ("fault", "level", "words"),
    [
        ("raises", "blocks", r"(exception), first after the answer"),
        ("seeds", "blocks", "beside others in the same process"),
        ("counts", "blocks", "again in the same process"),
        ("process", "blocks", "played in another process"),
        ("start", "warning", "first messages of prompt 0 depend on the seed"),
        ("waits", "blocks", "its calls wait and let no other run"),
        ("computes", "warning", "raise environment.hosts"),
        ("threads", "blocks", "each episode leaves 1.0 threads behind → end them in close()"),
        ("files", "blocks", "each episode leaves 1.0 open files"),
        ("processes", "blocks", "each episode leaves 1.0 child processes"),
        ("memory", "blocks", "MiB of memory behind"),
        ("endless", "warning", "6 of 6 episodes did not end within 5 turns"),
        ("mute", "warning", "every episode returns 0"),
        ("vast", "warning", "30006 at most"),
    ],
)
def test_each_fault_is_named_and_nothing_else_is(fault: str, level: str, words: str) -> None:
    found = worse(tried(episodes=4 if fault == "waits" else 6, options={"fault": fault}))
    assert len(found) == 1, found
    ((text, of),) = found.items()
    assert words in text
    assert of == level


def test_coroutines_that_keep_the_event_loop_are_found() -> None:
    ((text, level),) = worse(tried("Held", episodes=4)).items()
    assert "put what blocks into asyncio.to_thread" in text
    assert level == "blocks"


def test_characters_that_are_not_named_are_shown() -> None:
    ((text, level),) = worse(tried("Named")).items()
    assert "'02?emr'" in text
    assert level == "warning"


def test_what_cannot_be_replayed_may_say_so_and_what_cannot_be_made_is_refused() -> None:
    notes = [finding.text for finding in tried("Told") if finding.level == "note"]
    assert any("deterministic = False" in note for note in notes)
    ((text, level),) = worse(tried("Refusing")).items()
    assert "no sandbox here" in text
    assert level == "blocks"


def test_what_asks_the_policy_is_told_that_there_is_none() -> None:
    ((text, level),) = worse(tried("Asking", episodes=2)).items()
    assert "the attribute `policy` is None here" in text
    assert level == "blocks"


def test_a_step_over_its_deadline_is_named() -> None:
    slow = {"step_timeout_seconds": 0.3, "options": {"turns": 2, "pause": 30.0}}
    found = worse(tried("Pausing", episodes=2, **slow))
    assert any("2 of 2 episodes of random texts failed (timeout)" in text for text in found), found


def test_agents_are_only_looked_up_and_foreign_pythons_are_used() -> None:
    agent = EnvironmentConfig(agent="tests.rollout.agents:tic_tac_toe")
    assert [finding.level for finding in examine(agent)] == ["good", "note"]
    assert worse(tried(python=sys.executable)) == {}
