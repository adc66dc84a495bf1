"""What people are shown of findings."""

from __future__ import annotations

from earl_core.guard.decision import Decision, Finding
from tasks.reports.guard_report import guard_page, newest_finding
from tasks.tracking.metric_catalogue import mlflow_name


def test_the_newest_finding_stands_first_with_its_evidence() -> None:
    range_ = Finding(kind="reward_range", onset=3, text="2 of 8 <b>", episodes=(26, 29))
    shift = Finding(kind="level_shift", onset=5, text="the mean fell")
    decisions = {
        3: Decision(findings=(range_,), quarantined=(26, 29)),
        6: Decision(findings=(range_, shift), back_to=2),
    }
    first, second, third = guard_page(decisions).splitlines()[4:]
    assert first.startswith("| 6 | reward_range | 3 | 2 of 8 &lt;b> | 26, 29 | back to iteration 2")
    assert "level_shift" in second
    assert "2 episodes left out" in third
    told = newest_finding(decisions)
    assert told.startswith("iteration 6: reward_range since iteration 3")
    assert "level_shift since iteration 5: the mean fell (back to iteration 2)" in told
    assert newest_finding({}) == ""


def test_findings_are_curves_and_what_they_compare_is_none() -> None:
    assert mlflow_name("guard/findings") == "guard/findings"
    assert mlflow_name("guard/level_shift") == "guard/level_shift"
    assert mlflow_name("guard/of/function f/mean") is None
