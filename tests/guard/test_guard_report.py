"""What people are shown of findings."""

from __future__ import annotations

import pytest

from earl_core.control.guarding import told
from earl_core.experience.probe import Asked
from earl_core.guard.decision import Decision, Finding
from earl_core.secrets.rules import Redaction, RedactionRules
from tasks.reports.guard_report import guard_page, newest_finding
from tasks.tracking.metric_catalogue import mlflow_name


def test_the_newest_finding_stands_first_with_its_evidence() -> None:
    range_ = Finding(kind="reward_range", onset=3, text="2 of 8 <b>", episodes=(26, 29))
    shift = Finding(kind="level_shift", onset=5, text="the mean fell")
    decisions = {
        3: Decision(findings=(range_,), quarantined=(26, 29)),
        6: Decision(findings=(range_, shift), back_to=2),
    }
    first, second, third = guard_page(decisions, Redaction()).splitlines()[4:]
    assert first.startswith("| 6 | reward_range | 3 | 2 of 8 &lt;b> | 26, 29 | back to iteration 2")
    assert "level_shift" in second
    assert "2 episodes left out" in third
    newest = newest_finding(decisions)
    assert newest.startswith("iteration 6: reward_range since iteration 3")
    assert "level_shift since iteration 5: the mean fell (back to iteration 2)" in newest
    assert newest_finding({}) == ""


@pytest.mark.parametrize("kind", ["hash_fields", "drop_fields"])
def test_ids_of_episodes_are_shown_as_the_rules_for_fields_say(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "a long key")
    rules = {kind: ["episode_id"], "key": "env:A_KEY"}
    redaction = Redaction(RedactionRules.model_validate(rules))
    asked = Asked()
    asked.add("function f", 4711, "0.5, and was 1")
    text = f"function f {asked.text('function f', 'before')}"
    found = Finding(kind="probe_reward", onset=3, text=text, episodes=(4711, 4712))
    decisions = {3: Decision(findings=(found,), back_to=2)}
    page, line = guard_page(decisions, redaction), told(found, redaction)
    assert "471" not in page + line + newest_finding(decisions)
    hashed = [redaction.hashed(["episode_id", each]) for each in found.episodes]
    for shown in (page, line):
        assert (", ".join(hashed) in shown) == (kind == "hash_fields")
    assert ("(episodes " in line) == (kind == "hash_fields")
    assert told(found, Redaction()).endswith("(episodes 4711, 4712)")


def test_findings_are_curves_and_what_they_compare_is_none() -> None:
    assert mlflow_name("guard/findings") == "guard/findings"
    assert mlflow_name("guard/level_shift") == "guard/level_shift"
    assert mlflow_name("guard/of/function f/mean") is None
