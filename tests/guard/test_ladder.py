"""What follows from findings: the least that may help, and never twice what has not."""

from __future__ import annotations

import pytest

from earl_core.control.guarding import branch_caution
from earl_core.guard.decision import NOT_JUDGED, Decision, Finding, not_judged
from earl_core.guard.ladder import AGAIN, CAUTION, MOST_RETURNS, OPEN, Past, decide, last_good
from earl_core.run.branches import Branches


def found(kind: str, onset: int, *prompts: tuple[str, int]) -> Finding:
    return Finding(kind=kind, onset=onset, text=f"{kind} at {onset}", prompts=prompts)


def ran(
    findings: dict[int, list[Finding]],
    until: int,
    *,
    outside: tuple[int, ...] = (),
    mostly: bool = False,
    every: int = 2,
    returns: int = 0,
    lag: int = 0,
) -> dict[int, Decision]:
    """Decisions up to an iteration, or the first that ends it. every: iterations between
    checkpoints."""
    decisions: dict[int, Decision] = {}
    for k in range(until + 1):
        known = {n: each for n, each in decisions.items() if k - OPEN <= n < k - lag}
        checkpoints = [n for n in range(k - lag) if (n + 1) % every == 0]
        past = Past(known, lag, checkpoints, returns)
        given = findings.get(k, [])
        decisions[k] = decide(k, given, outside if given else (), mostly, past)
        if decisions[k].back_to is not None or decisions[k].stop:
            break
    return decisions


def test_episodes_that_lie_outside_leave_and_nothing_else_happens() -> None:
    wrong = {k: [found("reward_range", 8, ("a", 3))] for k in range(8, 20)}
    decisions = ran(wrong, 19, outside=(4, 7))
    assert all(decisions[k].quarantined == (4, 7) for k in range(8, 20))
    assert not any(each.cautious or each.back_to is not None for each in decisions.values())
    assert decisions[7] == Decision()


def test_where_most_lie_outside_the_source_is_wrong_and_the_run_goes_back() -> None:
    wrong = {k: [found("reward_range", 8, ("a", k))] for k in (8, 9)}
    decisions = ran(wrong, 19, outside=(4, 7), mostly=True)
    assert decisions[8].back_to is None
    assert decisions[8].quarantined == (4, 7)
    # The last checkpoint from before the onset; every prompt that was named is left out.
    assert max(decisions) == 9
    assert decisions[9].back_to == 7
    assert decisions[9].left_out == (("a", 8), ("a", 9))


def test_a_source_has_to_be_found_twice() -> None:
    assert ran({8: [found("probe_reward", 8)]}, 30)[30] == Decision()
    decisions = ran({8: [found("probe_reward", 8)], 10: [found("probe_reward", 8)]}, 30)
    assert decisions[10].back_to == 7
    apart = ran({8: [found("probe_reward", 8)], 13: [found("probe_reward", 8)]}, 30)
    assert apart[13].back_to is None


def test_accidents_that_are_apart_are_no_single_one() -> None:
    """A source that was wrong now and then has the run go back to where it is wrong for good."""
    wrong = {k: [found("reward_range", k)] for k in (8, 20, 32, 33)}
    assert all(each.back_to is None for each in ran(wrong, 40, outside=(4,)).values())
    decisions = ran(wrong, 40, mostly=True)
    assert (max(decisions), decisions[33].back_to) == (33, 31)


def test_without_a_checkpoint_from_before_it_goes_to_what_is_nearer() -> None:
    past = Past({49: Decision(findings=(found("probe_reward", 40),))}, 0, [44, 48], 0)
    assert decide(50, [found("probe_reward", 40)], (), False, past).back_to == 44
    early = Past({3: Decision(findings=(found("probe_reward", 1),))}, 0, [3], 0)
    assert decide(4, [found("probe_reward", 1)], (), False, early).back_to == -1


def test_what_the_guard_cannot_look_at_has_no_consequence() -> None:
    faults = {k: [not_judged(k, "context_growth", KeyError("x"))] for k in range(8, 30)}
    decisions = ran(faults, 29)
    assert [each.findings[0].kind for each in list(decisions.values())[8:]] == [NOT_JUDGED] * 22
    assert not any(each.cautious or each.back_to is not None for each in decisions.values())


def test_learning_becomes_cautious_before_it_goes_back() -> None:
    once = ran({8: [found("level_shift", 7)]}, 30)
    assert [k for k, each in once.items() if each.cautious] == list(range(8, 8 + CAUTION))
    assert once[30] == Decision()
    stays = ran({k: [found("level_shift", 7)] for k in range(8, 30)}, 30)
    assert max(stays) == 8 + CAUTION
    assert stays[8 + CAUTION].back_to == 5
    again = 8 + CAUTION + AGAIN - 1
    returns = ran({8: [found("level_shift", 7)], again: [found("level_shift", 7)]}, 30)
    assert returns[again].back_to == 5
    # Long after, it is another one.
    other = ran({8: [found("level_shift", 7)], again + 2: [found("level_shift", again + 2)]}, 40)
    assert other[again + 2].cautious
    assert other[40] == Decision()


def test_with_iterations_that_overlap_the_same_comes_later() -> None:
    stays = ran({k: [found("entropy_growth", 7)] for k in range(8, 30)}, 30, lag=1)
    cautious = [k for k, each in stays.items() if each.cautious]
    assert cautious[0] == 8
    assert cautious == list(range(8, 8 + len(cautious)))
    assert stays[max(stays)].back_to == 3


@pytest.mark.parametrize(
    ("kind", "back_to"),
    [("level_shift", 9), ("context_growth", 9), ("gradient_norm", 10), ("sample_size", 10)],
)
def test_a_policy_that_played_badly_is_not_what_is_gone_back_to(kind: str, back_to: int) -> None:
    """The update of iteration 10 spoils the policy: 11 is the first that shows it, and the
    checkpoint of 10 the first that has it."""
    decisions = ran({k: [found(kind, 11)] for k in range(11, 30)}, 30, every=1)
    assert decisions[max(decisions)].back_to == back_to
    stopped = ran({k: [found(kind, 11)] for k in range(11, 30)}, 30, every=1, returns=MOST_RETURNS)
    assert f"the checkpoint of iteration {back_to} is from before it" in (
        stopped[max(stopped)].stop
    )


def test_a_branch_is_cautious_and_a_finding_in_it_more_so() -> None:
    past = Past({}, 0, [9], 1, branch_caution=1)
    assert decide(10, [], (), False, past).caution == 1
    assert decide(12, [found("level_shift", 12)], (), False, past).caution == 2
    wrong = {k: [found("probe_reward", 12)] for k in (12,)}
    assert decide(12, wrong[12], (), False, past).caution == 1


def opened(*kinds: str) -> Branches:
    branches = Branches()
    for number, each in enumerate(kinds):
        told = {"kinds": each.split(), "text": "", "left_out": (), "set_aside": ""}
        branches = branches.further(after=9 + number, from_iteration=16 + number, **told)
    return branches


def test_a_branch_is_cautious_where_it_went_wrong_before() -> None:
    once = opened("level_shift context_growth")
    ends = 16 + CAUTION
    told = [branch_caution(once, k) for k in (9, 10, ends, ends + 1)]
    assert told == [0, 1, 1, 0]
    # Each return makes it more so; a source that was wrong is no reason.
    assert branch_caution(opened("level_shift", "entropy_growth"), 11) == 2
    assert branch_caution(opened("level_shift", "probe_reward level_shift"), 11) == 0
    assert branch_caution(opened("reward_range", "level_shift"), 11) == 1


def test_before_the_first_checkpoint_it_begins_anew_and_at_last_it_stops() -> None:
    wrong = {k: [found("probe_environment", 1)] for k in (1, 2)}
    assert ran(wrong, 5, every=3)[2].back_to == -1
    decisions = ran(wrong, 5, returns=MOST_RETURNS)
    assert decisions[2].back_to is None
    assert "went back 3 times" in decisions[2].stop
    assert "probe_environment at 1" in decisions[2].stop


def test_the_checkpoint_of_a_return_is_kept_while_something_is_found() -> None:
    past = Past({}, 0, [1, 3, 5, 7], 0)
    assert last_good(Decision(), past) is None
    assert last_good(Decision(findings=(found("level_shift", 5),)), past) == 3
    assert last_good(Decision(findings=(found("probe_reward", 6),)), past) == 5
    earlier = Past({6: Decision(findings=(found("level_shift", 3),))}, 0, [1, 3, 5, 7], 0)
    assert last_good(Decision(), earlier) == 1
