"""Detectors over the numbers of made-up runs: silent on noise and learning, quick on what is
planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from earl_core.guard import detectors
from earl_core.guard.decision import NOT_JUDGED
from earl_core.guard.detectors import DETECTORS, Settings, detect, without_sources
from earl_core.guard.rewards import reward_findings, seen_bounds
from earl_core.guard.seen import HUGE, Given, Seen, can_leave, shortened

Line = dict[str, float]
Change = Callable[[int, np.ndarray, Line], np.ndarray]

GROUPS, SIZE = 16, 8


def learning(
    seed: int, iterations: int, change: Change | None = None, level: float | None = None
) -> list[Line]:
    """The lines of a run whose share of successes follows a logistic curve, as metrics.jsonl has
    them. change: of an iteration's rewards [groups, episodes], and of its other numbers. level: the
    share that it ends at; rewards have no tails then."""
    random = np.random.default_rng(seed)
    middle, width = random.uniform(5, 60), random.uniform(2, 12)
    low, high = random.uniform(0, 0.4), random.uniform(0.5, 1.0)
    tail = random.choice([0.0, 0.1, 0.3])
    if level is not None:
        high, tail = level, 0.0
    lines, wander = [], 0.0
    for k in range(iterations):
        # A policy is better and worse for a while.
        wander = 0.9 * wander + random.normal(0, 0.02)
        chance = low + (high - low) / (1 + math.exp((middle - k) / width)) + wander
        # Prompts differ in how hard they are.
        of_group = np.clip(chance + random.normal(0, 0.2, (GROUPS, 1)), 0, 1)
        rewards = np.where(random.random((GROUPS, SIZE)) < of_group, 1.0, -1.0)
        rewards += tail * random.standard_t(4, rewards.shape)
        line: Line = {
            "iteration": k,
            "update/entropy": 0.02 + math.exp(-k / 20) * random.uniform(0.9, 1.1),
            "update/grad_norm": 0.5 * math.exp(random.normal(0, 0.6)),
            "update/importance_sample_share": random.uniform(0.5, 1.0),
            "rollout/context/mean": 50 + 30 * k / iterations + random.normal(0, 2),
        }
        if change is not None:
            rewards = change(k, rewards, line)
        numbers = seen(rewards).numbers
        lines.append(line | {f"guard/of/environment/{n}": v for n, v in numbers.items()})
    return lines


def seen(rewards: np.ndarray) -> Seen:
    flat = rewards.ravel()
    groups = np.repeat(np.arange(len(rewards)), rewards.shape[1])
    prompts = [("", int(group)) for group in groups]
    return Seen.of(Given(flat, np.arange(flat.size), groups, prompts), HUGE)


def found_in(lines: list[Line], first: int = 0) -> list[tuple[int, str, int]]:
    """(iteration, kind, onset) of all findings, as a run would have them."""
    found, history = [], []
    for k, line in enumerate(lines):
        if k >= first:
            now = {n: v for n, v in line.items() if not n.startswith("update/")}
            for each in detect(history, now, Settings(max_grad_norm=1.0)):
                line[f"guard/{each.kind}"] = 1.0
                found.append((k, each.kind, each.onset))
        history.append(line)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_noise_and_learning_are_no_finding(seed: int) -> None:
    assert found_in(learning(seed, 80)) == []


BEGINS = 70


def planted(kind: str) -> Change:
    random = np.random.default_rng(0)

    def change(k: int, rewards: np.ndarray, line: Line) -> np.ndarray:
        if k < BEGINS:
            return rewards
        late = k - BEGINS + 1
        match kind:
            case "flipped":
                return -rewards
            case "most":
                return np.where(random.random(rewards.shape) < 0.75, -rewards, rewards)
            case "constant":
                return np.ones_like(rewards)
            case "gradient":
                line["update/grad_norm"] = 1e3
            case "entropy":
                line["update/entropy"] = 3.0
            case "weights":
                line["update/importance_sample_share"] = 0.01
            case "contexts":
                line["rollout/context/mean"] *= 1 + 0.2 * late
                return rewards - 0.5 * late
            case "collapse":
                line["update/entropy"] = 0.001
                return -np.ones_like(rewards)
        return rewards

    return change


@pytest.mark.parametrize(
    ("kind", "finding", "delay"),
    [
        ("flipped", "level_shift", 1),
        ("most", "level_shift", 3),
        ("constant", "reward_constant", 1),
        ("gradient", "gradient_norm", 2),
        ("entropy", "entropy_growth", 2),
        ("weights", "sample_size", 3),
        ("contexts", "context_growth", 3),
        ("collapse", "entropy_collapse", 3),
    ],
)
def test_what_is_planted_is_found_in_time(kind: str, finding: str, delay: int) -> None:
    """delay: iterations until then, the first included. An update is seen by the next one."""
    for seed in (0, 1, 2):
        level = 0.5 if kind == "constant" else 0.9
        lines = learning(seed, BEGINS + 6, planted(kind), level)
        found = [each for each in found_in(lines, BEGINS - 20) if each[1] == finding]
        assert found, (seed, kind)
        at, _, onset = found[0]
        assert BEGINS <= at < BEGINS + delay + 1
        # What grows step by step had its best days a little before.
        assert BEGINS - 5 <= onset <= at


def test_a_finding_stays_until_what_it_speaks_of_is_over() -> None:
    def change(k: int, rewards: np.ndarray, line: Line) -> np.ndarray:
        return -rewards if BEGINS <= k < BEGINS + 10 else rewards

    found = found_in(learning(1, BEGINS + 16, change, 0.9), BEGINS - 20)
    at = [k for k, kind, _ in found if kind == "level_shift"]
    assert at == list(range(BEGINS, BEGINS + 10))


def test_what_is_missing_or_no_number_is_no_finding() -> None:
    """Iterations without an update have no entropy, and not all that is told is finite."""

    def change(k: int, rewards: np.ndarray, line: Line) -> np.ndarray:
        for name in ("update/entropy", "update/grad_norm"):
            if k < 55:
                del line[name]
            elif k % 7 == 0:
                line[name] = math.nan
        return rewards - 3.0 if k >= BEGINS else rewards

    kinds = {kind for _, kind, _ in found_in(learning(3, BEGINS + 12, change, 0.9))}
    # Contexts do grow here.
    assert kinds == {"level_shift", "context_growth"}


def test_a_detector_that_fails_says_so_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = learning(1, BEGINS + 1, planted("flipped"), 0.9)
    monkeypatch.setitem(vars(detectors)["DETECTORS"], "sample_size", lambda *given: [][1])
    found = {each.kind: each for each in detect(lines[:-1], lines[-1], Settings())}
    assert found.keys() == {"level_shift", NOT_JUDGED}
    assert found[NOT_JUDGED].onset == BEGINS
    assert found[NOT_JUDGED].text.startswith("the guard could not look at sample_size: IndexError")


def test_an_iteration_with_few_of_its_groups_is_no_finding() -> None:
    """A curriculum gives another environment most of them."""
    for seed in range(40):
        lines = learning(seed, BEGINS + 12, fewer_groups, 0.7)
        assert found_in(lines, BEGINS - 20) == []


def fewer_groups(k: int, rewards: np.ndarray, line: Line) -> np.ndarray:
    return rewards[:1] if k >= BEGINS else rewards


def test_what_other_settings_gave_is_not_compared_with() -> None:
    *history, now = learning(1, BEGINS + 1, planted("flipped"), 0.9)
    assert detect(history, now, Settings())
    assert detect(list(map(without_sources, history)), now, Settings()) == []


def test_every_detector_says_what_it_is_for() -> None:
    assert all(each.__doc__ for each in DETECTORS.values())


def test_rewards_outside_are_named_up_to_half() -> None:
    rewards = np.linspace(0, 1, 64).reshape(16, 4)
    rewards[0] = 1e30
    rewards[1, 0] = -7.0
    flat, groups = rewards.ravel(), np.repeat(np.arange(16), 4)
    prompts = [("sums", 100 + int(group)) for group in groups]
    given = Given(flat, np.arange(64), groups, prompts, invalid=[70])
    found = Seen.of(given, (0.0, 1.0))
    assert found.outside == [0, 1, 2, 3, 4]
    assert found.worst == 1e30
    assert found.prompts == [("sums", 100)]
    assert not found.mostly_outside
    assert (found.low, found.high) == (rewards[1, 1], 1.0)
    assert found.invalid == 1
    numbers = np.arange(64)
    halves = [
        Seen.of(Given(flat[at], numbers[at], groups[at], prompts[at]), (0.0, 1.0))
        for at in (slice(0, 20), slice(20, 64))
    ]
    both = halves[0].merge(halves[1])
    assert both.outside == found.outside
    assert both.episodes.mean == pytest.approx(found.episodes.mean)
    whole: dict[str, Any] = both.numbers
    for name, value in found.numbers.items():
        assert whole[name] == pytest.approx(value)
    most = Seen.of(given, (0.9, 1.0))
    assert most.mostly_outside
    assert not can_leave({"environment": most})
    assert len(shortened({"environment": most})["environment"].outside) == 32


def test_sources_together_leave_out_fewer_than_half_or_nothing() -> None:
    """None of two functions is wrong for half of the episodes, and both together are. An
    environment that is wrong wholly is left out where it is a small part."""

    def source(wrong: range, among: range, label: str = "") -> Seen:
        at = np.arange(among.start, among.stop)
        rewards = np.where(np.isin(at, list(wrong)), 9.0, 0.5)
        return Seen.of(Given(rewards, at, at // 4, [(label, n // 4) for n in at]), (0.0, 1.0))

    every = range(200)
    seen = {
        "environment": source(range(0), every),
        "function f": source(range(80), every),
        "function g": source(range(60, 140), every),
    }
    assert not any(each.mostly_outside for each in seen.values())
    assert not can_leave(seen)
    assert {s: len(each.outside) for s, each in shortened(seen).items()} == {
        "environment": 0,
        "function f": 32,
        "function g": 32,
    }
    # What was left out of a seal says so, too.
    assert not can_leave(shortened(seen))
    parts = {
        "environment big": source(range(0), every, "big"),
        "environment small": source(range(200, 260), range(200, 260), "small"),
    }
    assert parts["environment small"].mostly_outside
    assert can_leave(parts)
    assert len(shortened(parts)["environment small"].outside) == 60


def test_prompts_are_named_where_they_are_few() -> None:
    """Leaving out all prompts of a small data set would end the run."""
    at = np.arange(40)
    prompts = [("", int(number) // 4) for number in at]
    named = {}
    for wrong in (8, 40):
        given = Given(np.where(at < wrong, 1e30, 0.5), at, at // 4, prompts)
        seen = {"function f": Seen.of(given, (0.0, 1.0))}
        (found,) = reward_findings(3, seen, 0, {"function f": (0.0, 1.0)}, {})
        named[wrong] = found.prompts
    assert named == {8: (("", 0), ("", 1)), 40: ()}


def test_bounds_of_what_was_seen_are_wide_and_no_single_iteration_moves_them() -> None:
    lines: list[Line] = [
        {"iteration": k, "guard/of/function f/low": 0.0, "guard/of/function f/high": 1.0}
        for k in range(10)
    ]
    assert seen_bounds(lines[:5], "function f") == HUGE
    lines[7]["guard/of/function f/high"] = 1e9
    low, high = seen_bounds(lines, "function f")
    assert low < -100
    assert 100 < high < 1e6
