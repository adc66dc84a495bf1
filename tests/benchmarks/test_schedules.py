"""The simulated engines and schedules of benchmarks, where times are known in closed form."""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.schedules import Engine, Speed, Stream, pinned, play


def test_sequences_slow_each_other_down() -> None:
    """Alone 1 and 3 seconds: both for 1 of them, then one."""
    assert play([3.0, 1.0], Speed(0.5, 2)) == pytest.approx(1 * 2.0 + 2 * 1.5)
    assert play([3.0, 1.0], Speed(0.5, 1)) == pytest.approx(4 * 1.5)
    assert play([], Speed(0.5, 1)) == 0


def test_the_short_way_is_the_engines() -> None:
    drawn = random.Random(1)
    for running in (1, 3, 20):
        lengths = [drawn.lognormvariate(0, 1) for _ in range(12)]
        engine = Engine(Speed(0.1, running))
        for length in lengths:
            engine.add(length)
        while engine.live:
            engine.end()
        assert engine.time == pytest.approx(play(lengths, Speed(0.1, running)))


def test_pinned_iterations_wait_for_what_they_must() -> None:
    rollouts, training = [[4.0, 2.0]] * 3, [3.0] * 3
    in_turn = [7.0, 14.0, 21.0]
    assert pinned(rollouts, training, 0, side_by_side=False) == in_turn
    assert pinned(rollouts, training, 1, side_by_side=False) == in_turn
    assert pinned(rollouts, training, 0, side_by_side=True) == in_turn
    # Rollout 1 goes from 4 to 8, rollout 2 waits for version 1 at 7, which is no wait.
    assert pinned(rollouts, training, 1, side_by_side=True) == [7.0, 11.0, 15.0]
    # Engine 1 goes on while engine 0 plays.
    uneven = [[4.0, 2.0], [2.0, 4.0], [4.0, 2.0]]
    assert pinned(uneven, [1.0] * 3, 2, side_by_side=True) == [5.0, 7.0, 11.0]


def streamed(staleness: int, side_by_side: bool, engines: int = 1) -> list[float]:
    groups = [[1.0, 5.0], [1.0, 1.0], [2.0, 2.0]]
    made = [Engine(Speed(0.0, 2)) for _ in range(engines)]
    return Stream(groups, [1.0] * 3, staleness, side_by_side, 4, made).run()


def test_a_stream_goes_on_where_it_stood() -> None:
    # One sequence ends at 5, those of group 1 at 2 and 3, those of group 2, begun under version 0
    # (staleness 2), at 5 and 7.
    assert streamed(2, side_by_side=False) == [6.0, 7.0, 10.0]
    assert streamed(2, side_by_side=True) == [6.0, 7.0, 8.0]
    # Without room to run ahead group 1 begins after version 1, and group 2 after version 2.
    assert streamed(0, side_by_side=False) == [6.0, 8.0, 11.0]


def test_no_batch_waits_for_others_than_its_groups() -> None:
    """And no group is admitted before its bound: with as many engines as groups, and staleness s,
    batch k cannot end before version k - s."""
    drawn = random.Random(2)
    groups = [[drawn.lognormvariate(0, 1) for _ in range(4)] for _ in range(32)]
    longest = [max(group) for group in groups]
    for staleness in (0, 1, 3):
        made = [Engine(Speed(0.0, 4)) for _ in range(32)]
        published = Stream(groups, [0.5] * 8, staleness, True, 4, made).run()
        assert all(a < b for a, b in itertools.pairwise(published))
        for k, end in enumerate(published):
            begin = published[k - staleness - 1] if k > staleness else 0.0
            ready = begin + max(longest[4 * k : 4 * k + 4])
            before = published[k - 1] if k else 0.0
            assert end == pytest.approx(max(ready, before) + 0.5)
