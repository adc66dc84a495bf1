"""What a worker group promises: starts, calls, errors, resharding."""

from __future__ import annotations

import math
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.errors import WorkerCallFailed, WorkerLost
from earl_core.cluster.host import Host
from earl_core.system.frames import WireError
from tests.cluster.conftest import MakeGroup, gone_within

Site = dict[str, Any]


def test_a_target_knows_its_rank_and_what_it_is_called_for(
    make_group: MakeGroup, site: Site
) -> None:
    group = make_group(environment={"EXTRA": "given"})
    assert not group.alive
    assert group.pids == []
    assert group.deployment is None
    group.start({"tensor_parallel": 1}, {"seed": 3})
    (told,) = group.call("describe", **site)
    assert told["pid"] == group.pids[0]
    assert group.alive
    assert (told["rank"], told["world_size"], told["role"]) == (0, 1, "w")
    assert (told["stage"], told["iteration"]) == ("rollout", 7)
    assert told["deployment"] == group.deployment == {"tensor_parallel": 1}
    assert told["arguments"] == {"seed": 3}
    assert told["environment"]["EXTRA"] == "given"
    assert told["thread"]
    assert group.call("describe", **site)[0]["calls"] == 2
    assert group.memory[0].rss_bytes > 1 << 20
    group.stop()
    assert not group.alive
    assert group.pids == []
    assert group.deployment is None
    assert gone_within([told["pid"]], 20)


def test_two_ranks_answer_in_rank_order(make_group: MakeGroup, host: Host, site: Site) -> None:
    group = make_group()
    group.start({}, {}, world_size=2)
    first, second = group.call("describe", **site)
    assert [first["pid"], second["pid"]] == group.pids
    for rank, told in enumerate((first, second)):
        environment = told["environment"]
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == host.address
        assert Path(told["log_path"]).name == f"w-{rank}.log"
    assert first["environment"]["MASTER_PORT"] == second["environment"]["MASTER_PORT"]


def test_json_comes_back_as_it_went(make_group: MakeGroup, site: Site) -> None:
    group = make_group()
    group.start({}, {})
    value = {"a": [1, 2.5, None, True], "ü": "\ud800 ✓", "nested": {"b": []}, "inf": math.inf}
    assert group.call("echo", value=value, **site) == [value]
    assert math.isnan(group.call("echo", value=math.nan, **site)[0])
    assert len(group.call("blob", size=8 << 20, **site)[0]) == 8 << 20


def test_what_is_not_json_or_too_large_is_refused_and_the_group_lives(
    make_group: MakeGroup, site: Site
) -> None:
    group = make_group()
    group.start({}, {})
    for value in (object(), {1: "a"}, {"deep": [{None: 1}]}, b"bytes"):
        with pytest.raises(WireError, match="JSON"):
            group.call("echo", value=value, **site)
    with pytest.raises(WireError, match="over the limit"):
        group.call("echo", value="x" * (65 << 20), **site)
    with pytest.raises(WorkerCallFailed, match="JSON") as caught:
        group.call("unsendable", **site)
    assert caught.value.kind is WireError
    with pytest.raises(WorkerCallFailed, match="over the limit"):
        group.call("blob", size=65 << 20, **site)
    assert group.alive
    assert group.call("echo", value=1, **site) == [1]


def test_an_exception_travels_with_its_payload_log_and_traceback(
    make_group: MakeGroup, site: Site
) -> None:
    group = make_group()
    group.start({}, {})
    group.call("log_and_print", lines=50, **site)
    with pytest.raises(WorkerCallFailed) as caught:
        group.call("fail", message="no room", payload={"needed_bytes": 5}, **site)
    error = caught.value
    assert error.raised.type == "OutOfRoomError"
    assert error.raised.module == "tests.cluster.targets"
    assert error.raised.message == "no room"
    assert error.payload == {"needed_bytes": 5}
    assert "raise ValueError(message) if payload is None" in error.raised.traceback
    text = str(error)
    for part in ("'w'", "rank 0", "'fail'", "'rollout'", "iteration 7", "no room", "a warning"):
        assert part in text
    assert 1 < len(error.log_tail.splitlines()) <= 40
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == text
    assert again.payload == error.payload
    with pytest.raises(WorkerCallFailed, match="no attribute 'missing'"):
        group.call("missing", **site)
    with pytest.raises(WorkerCallFailed, match="unexpected keyword"):
        group.call("echo", wrong=1, **site)
    assert group.alive


def test_progress_arrives_in_order_before_the_result(
    make_group: MakeGroup, site: Site, tmp_path: Path
) -> None:
    group = make_group()
    group.start({}, {}, world_size=2)
    seen: list[dict[str, Any]] = []
    assert group.call("count", to=50, on_progress=seen.append, **site) == [50, 50]
    for rank in (0, 1):
        assert [p["done"] for p in seen if p["rank"] == rank] == list(range(1, 51))
    answer, whole = tmp_path / "answer", tmp_path / "whole"

    def reply(progress: dict[str, Any]) -> None:
        whole.write_text("heard")
        whole.replace(answer)

    told = group.call("ask", path=str(answer), on_progress=reply, **site)
    assert told == ["heard", "heard"]


def test_async_methods_share_one_loop_that_turns_between_calls(
    make_group: MakeGroup, site: Site
) -> None:
    group = make_group()
    group.start({}, {})
    assert group.call("loop_id", **site) == group.call("loop_id", **site)
    group.call("start_ticking", **site)

    def ticks_meanwhile() -> int:
        before: int = group.call("ticks_now", **site)[0]
        time.sleep(0.3)
        now: int = group.call("ticks_now", **site)[0]
        return now - before

    assert any(ticks_meanwhile() > 5 for _ in range(20))
    assert group.call("own_loop", **site) == [42]


def test_a_deadline_ends_the_group_and_shows_where_it_hung(
    make_group: MakeGroup, site: Site
) -> None:
    group = make_group()
    group.start({}, {}, world_size=2)
    pids = group.pids
    begin = time.monotonic()
    # In which a paused machine begins the call, too.
    with pytest.raises(WorkerLost, match=r"(?s)deadline of 4\.5 s.*_hang_here") as caught:
        group.call("sleep", seconds=600, **{**site, "deadline_seconds": 4.5})
    assert time.monotonic() - begin < 60
    assert "iteration 7" in str(caught.value)
    assert not group.alive
    assert caught.value.how == "deadline"
    with pytest.raises(WorkerLost, match=r"deadline of 4\.5 s"):
        group.call("echo", value=1, **site)
    assert gone_within(pids, 60)
    group.start({}, {})
    assert group.call("echo", value=1, **site) == [1]


def test_a_target_that_cannot_be_made_is_a_clear_error(make_group: MakeGroup) -> None:
    cases = {
        "tests.cluster.no_such_module:Target": "ModuleNotFoundError: .*no_such_module",
        "tests.cluster.targets:NoSuch": "AttributeError: .*NoSuch",
        "tests.cluster.targets": "package.module:Class",
    }
    for target, message in cases.items():
        group = make_group(target=target)
        with pytest.raises(WorkerCallFailed, match=f"'start'.*{message}"):
            group.start({}, {})
        assert not group.alive
    group = make_group()
    with pytest.raises(WorkerCallFailed, match="too big") as caught:
        group.start({}, {"fail_with": "too big"}, world_size=2)
    assert caught.value.payload == {"needed_bytes": 123}
    assert "Traceback" in caught.value.log_tail
    with pytest.raises(WireError):
        group.start({"plan": object()}, {})


def test_a_start_that_takes_too_long_is_ended(make_group: MakeGroup) -> None:
    group = make_group(start_timeout_seconds=0.6)
    with pytest.raises(WorkerLost, match=r"deadline of 0\.6 s"):
        group.start({}, {"hang_seconds": 600})
    assert not group.alive


def test_a_group_that_does_not_run_says_so(make_group: MakeGroup, site: Site) -> None:
    group = make_group()
    group.stop()
    with pytest.raises(WorkerLost, match=r"call start\(\) first"):
        group.call("echo", value=1, **site)
    group.start({}, {})
    group.stop()
    group.stop()
    with pytest.raises(WorkerLost, match=r"call start\(\) first"):
        group.call("echo", value=1, **site)


def test_stop_closes_targets_plain_and_async(make_group: MakeGroup, tmp_path: Path) -> None:
    group = make_group()
    group.start({}, {"closed_path": str(tmp_path / "plain")})
    group.stop()
    assert (tmp_path / "plain").read_text() == "rank 0 closed"
    group = make_group(target="tests.cluster.targets:AsyncClose")
    group.start({}, {"path": str(tmp_path / "async")})
    group.start({}, {"path": str(tmp_path / "again")})
    assert (tmp_path / "async").read_text() == "closed"
    group.stop()
    assert (tmp_path / "again").read_text() == "closed"
    group = make_group(target="tests.cluster.targets:SlowClose")
    group.start({}, {})
    pids = group.pids
    begin = time.monotonic()
    group.stop(grace_seconds=0.3)
    assert time.monotonic() - begin < 60
    assert gone_within(pids, 0)


def test_a_reshard_keeps_the_ranks_and_is_the_deployment_from_then_on(
    make_group: MakeGroup, site: Site
) -> None:
    group = make_group()
    group.start({"tensor_parallel": 2}, {}, world_size=2)
    pids = group.pids
    assert group.reshard({"shard": 2}, **site) == [{"rank": 0}, {"rank": 1}]
    assert group.pids == pids
    assert group.deployment == {"shard": 2}
    for told in group.call("describe", **site):
        assert told["deployment"] == {"shard": 2}
        assert told["calls"] == 2


def test_a_reshard_that_fails_on_a_rank_costs_the_group(make_group: MakeGroup, site: Site) -> None:
    group = make_group()
    with pytest.raises(WorkerLost, match=r"call start\(\) first"):
        group.reshard({"shard": 2}, **site)
    group.start({"tensor_parallel": 2}, {}, world_size=2)
    pids = group.pids
    with pytest.raises(WorkerCallFailed, match="rank 1 cannot be laid out so") as caught:
        group.reshard({"shard": 2, "fails_on": 1}, **site)
    for part in ("rank 1", "'reshard'", "'rollout'", "iteration 7"):
        assert part in str(caught.value)
    assert not group.alive
    assert group.deployment is None
    assert gone_within(pids, 20)


def test_calls_of_two_groups_run_side_by_side(
    make_group: MakeGroup, site: Site, tmp_path: Path
) -> None:
    """Each call waits for what is written once both have begun."""
    groups = {name: make_group(name) for name in "ab"}
    for group in groups.values():
        group.start({}, {})
    begun: set[str] = set()
    answer, whole = tmp_path / "answer", tmp_path / "whole"

    def asked(name: str) -> list[Any]:
        def tell(progress: dict[str, Any]) -> None:
            begun.add(name)
            if begun == {*groups}:
                whole.write_text("both have begun")
                whole.replace(answer)

        return groups[name].call("ask", path=str(answer), on_progress=tell, **site)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(asked, groups)) == [["both have begun"]] * 2


def test_calls_from_two_callers_take_turns(make_group: MakeGroup, site: Site) -> None:
    group = make_group()
    group.start({}, {})
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(group.call, "count", to=n, pause=0.02, **site) for n in range(1, 6)]
        assert [call.result() for call in calls] == [[1], [2], [3], [4], [5]]


def test_a_caller_that_calls_again_and_again_lets_others_in_between(
    make_group: MakeGroup, site: Site
) -> None:
    group = make_group()
    group.start({}, {})
    done = threading.Event()

    def again_and_again() -> None:
        while not done.is_set():
            group.call("count", to=1, pause=0.1, **site)

    with ThreadPoolExecutor() as pool:
        endless = pool.submit(again_and_again)
        for _ in range(5):
            before = group.call("describe", **site)[0]["calls"]
            assert group.call("describe", **site)[0]["calls"] <= before + 2
        done.set()
        endless.result()


def test_an_aborted_call_leaves_the_group_idle(make_group: MakeGroup, site: Site) -> None:
    group = make_group()
    group.start({}, {})
    pids = group.pids
    begun, abort = threading.Event(), threading.Event()
    with ThreadPoolExecutor() as pool:
        call = pool.submit(
            group.call,
            "until_cancelled",
            give_up_after=30,
            on_progress=lambda _: begun.set(),
            abort=abort,
            **site,
        )
        assert begun.wait(120)
        waiting = pool.submit(group.call, "echo", value=2, **site)
        abort.set()
        with pytest.raises(WorkerLost, match="cancelled"):
            call.result()
        assert waiting.result() == [2]
    assert group.pids == pids
    assert group.call("until_cancelled", give_up_after=0.05, **site) == ["ran out"]


def test_an_aborted_call_that_does_not_return_costs_the_group(
    make_group: MakeGroup, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("earl_core.cluster.rpc.CANCEL_SECONDS", 0.3)
    group = make_group()
    group.start({}, {})
    pids, abort = group.pids, threading.Event()
    threading.Timer(0.2, abort.set).start()
    with pytest.raises(WorkerLost, match="cancelled"):
        group.call("sleep", seconds=600, abort=abort, **site)
    assert not group.alive
    assert gone_within(pids, 60)
    with pytest.raises(WorkerLost, match="cancelled"):
        group.call("echo", value=1, **site)


def test_a_progress_callback_that_raises_cancels_the_call(
    make_group: MakeGroup, site: Site
) -> None:
    group = make_group()
    group.start({}, {})

    def interrupt(progress: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.call("until_cancelled", give_up_after=30, on_progress=interrupt, **site)
    assert group.alive
    assert group.call("echo", value=3, **site) == [3]
