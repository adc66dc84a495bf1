"""What a worker group promises, of the one in the controller's own process, as far as one rank and
no process of its own can."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.errors import WorkerCallFailed
from earl_core.cluster.in_process import InProcessGroup
from tests.cluster.conftest import TARGET, MakeGroup
from tests.cluster.test_contract import (  # noqa: F401  (pytest runs them here, too)
    test_a_group_that_does_not_run_says_so,
    test_a_progress_callback_that_raises_cancels_the_call,
    test_calls_from_two_callers_take_turns,
    test_calls_of_two_groups_run_side_by_side,
    test_json_comes_back_as_it_went,
    test_what_is_not_json_or_too_large_is_refused_and_the_group_lives,
)

Site = dict[str, Any]


@pytest.fixture
def make_group(tmp_path: Path) -> Iterator[MakeGroup]:
    made: list[InProcessGroup] = []

    def make(role: str = "w", target: str = TARGET, **settings: Any) -> InProcessGroup:
        group = InProcessGroup(role, target, log_directory=tmp_path, **settings)
        made.append(group)
        return group

    yield make
    for group in made:
        group.stop()


def test_the_target_runs_in_the_calling_thread(
    make_group: MakeGroup, site: Site, tmp_path: Path
) -> None:
    group = make_group()
    group.start({"tensor_parallel": 1}, {"closed_path": str(tmp_path / "closed")})
    (told,) = group.call("describe", **site)
    assert told["thread"] == (threading.current_thread() is threading.main_thread())
    assert [told["pid"]] == group.pids
    assert (told["stage"], told["iteration"]) == ("rollout", 7)
    assert group.reshard({"shard": 1}, **site) == [{"rank": 0}]
    assert group.deployment == {"shard": 1}
    group.stop()
    assert not group.alive
    assert (tmp_path / "closed").read_text() == "rank 0 closed"


def test_errors_travel_as_from_a_process(make_group: MakeGroup, site: Site) -> None:
    group = make_group()
    group.start({}, {})
    with pytest.raises(WorkerCallFailed, match=r"'fail'.*no room") as caught:
        group.call("fail", message="no room", payload={"needed_bytes": 5}, **site)
    assert caught.value.payload == {"needed_bytes": 5}
    with pytest.raises(WorkerCallFailed, match="cannot be laid out so"):
        group.reshard({"fails_on": 0}, **site)
    assert not group.alive
    with pytest.raises(WorkerCallFailed, match=r"'start'.*too big"):
        group.start({}, {"fail_with": "too big"})
    assert not group.alive
    with pytest.raises(ValueError, match="2 ranks of w need processes"):
        group.start({}, {}, world_size=2)
