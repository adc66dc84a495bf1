"""What happens when processes of a group, or the controller, are killed, stopped or starved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.errors import WorkerCallFailed, WorkerLost
from earl_core.cluster.fork_server import fork_server
from earl_core.system.processes import inspect
from tests.cgroup import memory_cgroup
from tests.cluster.conftest import HERE, MakeGroup, gone_within

Site = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
KINDS = ("child", "orphan", "fork", "stubborn")
SILENT_SECONDS = 2.5
"""Without a heartbeat, which a rank that starts on a busy machine is not."""


@pytest.fixture
def controllers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def start_controller(
    started: list[subprocess.Popen[bytes]], path: Path, mode: str
) -> tuple[subprocess.Popen[bytes], dict[str, list[int]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.controller_script", str(path), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    started.append(process)
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    assert len(told["pids"]) == 8
    assert all(inspect(pid) is not None for pid in told["pids"] + told["supervisors"])
    return process, told


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("call", signal.SIGKILL),
        ("wait", signal.SIGKILL),
        ("wait", signal.SIGTERM),
        ("call", signal.SIGINT),
    ],
)
def test_a_killed_controller_takes_everything_along(
    mode: str, number: int, tmp_path: Path, controllers: list[subprocess.Popen[bytes]]
) -> None:
    process, told = start_controller(controllers, tmp_path, mode)
    process.send_signal(number)
    if number == signal.SIGINT:
        # The call cannot be cancelled, and costs the group; a second Ctrl-C does not wait for that.
        time.sleep(0.3)
        process.send_signal(number)
    assert gone_within(told["pids"] + told["supervisors"], 60)


def parent_of(pid: int) -> int:
    process = inspect(pid)
    assert process is not None
    return process.parent


def test_a_fork_of_the_controller_does_not_keep_workers(
    tmp_path: Path, controllers: list[subprocess.Popen[bytes]]
) -> None:
    process, told = start_controller(controllers, tmp_path, "fork")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (server,) = {parent_of(pid) for pid in told["supervisors"]}
    (fork,) = {int(pid) for pid in children} - {server}
    process.kill()
    try:
        assert gone_within([server, *told["pids"], *told["supervisors"]], 60)
        assert inspect(fork) is not None
    finally:
        os.kill(fork, signal.SIGKILL)


@HERE
def test_a_killed_fork_server_costs_no_rank_and_the_next_start_has_another(
    make_group: MakeGroup, site: Site
) -> None:
    group, other = make_group(), make_group()
    group.start({}, {})
    (rank,) = group.pids
    server = fork_server()
    os.kill(server.pid, signal.SIGKILL)
    assert gone_within([server.pid], 60)
    # Longer than supervisors take to look whether their controller lives.
    group.call("sleep", seconds=1.2, **site)
    other.start({}, {})
    assert fork_server().pid != server.pid
    # A server that is killed as it is asked is replaced for the one who asks.
    os.kill(fork_server().pid, signal.SIGSTOP)
    killer = threading.Timer(0.3, os.kill, (fork_server().pid, signal.SIGKILL))
    killer.start()
    other.start({}, {})
    killer.join()
    assert group.call("echo", value=1, **site) == other.call("echo", value=1, **site) == [1]
    assert group.pids == [rank]
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="signal 9"):
        group.call("echo", value=1, **site)


def test_a_fork_server_that_imports_ends_with_its_controller() -> None:
    code = (
        "from earl_core.cluster.fork_server import fork_server; "
        "fork_server().preload('earl_core.learner.update_worker'); "
        "print(fork_server().pid, flush=True); import os; os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True)
    assert gone_within([int(done.stdout)], 60)


def test_a_controller_that_fails_leaves_nothing(
    tmp_path: Path, controllers: list[subprocess.Popen[bytes]]
) -> None:
    process, told = start_controller(controllers, tmp_path, "raise")
    process.wait(60)
    assert gone_within(told["pids"] + told["supervisors"], 60)


@pytest.mark.parametrize("mode", ["call", "wait"])
def test_controller_and_supervisors_killed_together(
    mode: str, tmp_path: Path, controllers: list[subprocess.Popen[bytes]]
) -> None:
    process, told = start_controller(controllers, tmp_path, mode)
    time.sleep(0.2)
    process.send_signal(signal.SIGSTOP)
    for pid in told["supervisors"]:
        os.kill(pid, signal.SIGKILL)
    process.kill()
    assert gone_within(told["pids"], 60)


@HERE
def test_a_killed_supervisor_is_a_lost_worker(make_group: MakeGroup, site: Site) -> None:
    group = make_group()
    group.start({}, {})
    pids = group.pids + [group.call("spawn", kind=kind, **site)[0] for kind in KINDS[:3]]
    supervisor = group._monitor.ranks[0].process.supervisor.pid
    threading.Timer(0.2, os.kill, (supervisor, signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(WorkerLost, match="supervisor process was killed by signal 9"):
        group.call("sleep", seconds=600, **site)
    assert time.monotonic() - begin < 60
    assert gone_within(pids, 60)
    group.start({}, {})
    assert group.call("echo", value=1, **site) == [1]


def test_a_killed_rank_is_named_with_its_log_and_its_children_go(
    make_group: MakeGroup, site: Site
) -> None:
    group = make_group()
    group.start({}, {})
    pids = group.pids + [group.call("spawn", kind=kind, **site)[0] for kind in KINDS]
    begin = time.monotonic()
    with pytest.raises(WorkerLost, match=r"signal 9 \(SIGKILL\)") as caught:
        group.call("kill_self", number=signal.SIGKILL, **site)
    assert time.monotonic() - begin < 60
    error = caught.value
    assert error.ended == -9
    assert not error.out_of_memory
    assert "about to be killed" in error.log_tail
    assert "stage 'rollout' of iteration 7" in str(error)
    assert not group.alive
    assert gone_within(pids, 60)


def test_a_loss_between_calls_is_seen_without_a_call(make_group: MakeGroup, site: Site) -> None:
    group = make_group()
    group.start({}, {}, world_size=2)
    pids = group.pids
    os.kill(pids[1], signal.SIGTERM)
    limit = time.monotonic() + 60
    while group.alive and time.monotonic() < limit:
        time.sleep(0.01)
    assert not group.alive
    with pytest.raises(WorkerLost, match="SIGTERM") as caught:
        group.call("echo", value=1, **site)
    assert caught.value.rank == 1
    assert gone_within(pids, 60)


@pytest.mark.parametrize("method", ["leave", "quit"])
def test_an_exit_is_named_by_its_code(method: str, make_group: MakeGroup, site: Site) -> None:
    group = make_group()
    group.start({}, {})
    with pytest.raises(WorkerLost, match="exited with code 3") as caught:
        group.call(method, code=3, **site)
    assert caught.value.ended == 3


def test_a_crash_in_c_shows_the_stack(make_group: MakeGroup, site: Site) -> None:
    group = make_group()
    group.start({}, {})
    with pytest.raises(WorkerLost, match=r"(?s)SIGSEGV.*Current thread.*in kill_self"):
        group.call("kill_self", number=signal.SIGSEGV, **site)


def test_a_stopped_rank_is_stalled(make_group: MakeGroup, site: Site) -> None:
    group = make_group(heartbeat_timeout_seconds=SILENT_SECONDS)
    group.start({}, {})
    pids = group.pids
    pids += group.call("spawn", kind="child", **site)
    begin = time.monotonic()
    with pytest.raises(WorkerLost, match=r"(?s)no heartbeat.*stop_heartbeat") as caught:
        group.call("stop_heartbeat", **site)
    assert caught.value.how == "stalled"
    assert time.monotonic() - begin < 60
    assert gone_within(pids, 60)


def test_a_stopped_rank_does_not_block_a_large_message(make_group: MakeGroup, site: Site) -> None:
    group = make_group(heartbeat_timeout_seconds=SILENT_SECONDS)
    group.start({}, {})
    os.kill(group.pids[0], signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(WorkerLost) as caught:
        group.call("echo", value="x" * (32 << 20), **site)
    assert caught.value.how == "stalled"
    assert time.monotonic() - begin < 60


def test_a_stopped_rank_holds_up_no_other_group(make_group: MakeGroup, site: Site) -> None:
    stopped, other = make_group("a"), make_group("b")
    stopped.start({}, {})
    other.start({}, {})
    os.kill(stopped.pids[0], signal.SIGSTOP)
    text = "x" * (32 << 20)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(stopped.call, "echo", value=text, **{**site, "deadline_seconds": 300})
        time.sleep(1.0)
        assert other.call("echo", value=1, **site) == [1]
        assert not call.done()
        os.kill(stopped.pids[0], signal.SIGCONT)
        assert call.result() == [text]


def test_a_busy_rank_is_not_stalled(make_group: MakeGroup, site: Site) -> None:
    group = make_group(heartbeat_timeout_seconds=SILENT_SECONDS)
    group.start({}, {})
    group.call("sleep", seconds=SILENT_SECONDS + 0.3, **site)
    time.sleep(SILENT_SECONDS + 0.3)
    assert group.alive


def test_one_rank_fails_while_the_other_hangs(
    make_group: MakeGroup, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("earl_core.cluster.rpc.STRAGGLER_SECONDS", 60.0)
    group = make_group()
    group.start({}, {}, world_size=2)
    pids = group.pids
    with pytest.raises(WorkerCallFailed, match="rank 1 cannot go on") as caught:
        group.call("fail_on", rank=1, others_seconds=0.2, **site)
    assert caught.value.rank == 1
    assert group.alive
    monkeypatch.setattr("earl_core.cluster.rpc.STRAGGLER_SECONDS", 0.5)
    with pytest.raises(WorkerCallFailed, match="rank 0 cannot go on") as caught:
        group.call("fail_on", rank=0, others_seconds=600, **site)
    assert caught.value.rank == 0
    assert not group.alive
    assert gone_within(pids, 60)


def test_a_lost_rank_is_blamed_rather_than_the_one_it_upset(
    make_group: MakeGroup, site: Site
) -> None:
    group = make_group()
    group.start({}, {}, world_size=2)
    victim = group.pids[1]
    threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
    # Rank 0 fails first, as it would when a collective breaks off.
    with pytest.raises(WorkerLost, match="SIGKILL") as caught:
        group.call("fail_on", rank=0, others_seconds=600, **site)
    assert caught.value.rank == 1


def test_stop_from_another_thread_ends_a_call(make_group: MakeGroup, site: Site) -> None:
    group = make_group()
    group.start({}, {})
    threading.Timer(0.3, group.stop, (0.3,)).start()
    with pytest.raises(WorkerLost):
        group.call("sleep", seconds=600, **site)
    group.stop()
    assert not group.alive


def test_stop_from_another_thread_ends_a_start(make_group: MakeGroup) -> None:
    group = make_group()
    threading.Timer(0.5, group.stop).start()
    begin = time.monotonic()
    with pytest.raises(WorkerLost, match="the start was cancelled"):
        group.start({}, {"hang_seconds": 600})
    assert time.monotonic() - begin < 60
    assert not group.alive


def test_an_out_of_memory_kill_is_named(make_group: MakeGroup, site: Site) -> None:
    with memory_cgroup(64 << 20) as cgroup:
        group = make_group()
        group.start({}, {})
        with pytest.raises(WorkerLost, match="out-of-memory killer") as caught:
            group.call("allocate_in_cgroup", cgroup=str(cgroup), megabytes=256, **site)
        assert caught.value.out_of_memory
        group.stop()


def test_peak_memory_is_of_the_last_call(make_group: MakeGroup, site: Site) -> None:
    group = make_group()
    group.start({}, {})
    group.call("echo", value=1, **site)
    # All that the imports took counts: Linux shows pages that a fork shares as private.
    idle = group.memory[0].tree_peak_bytes
    group.call("allocate", megabytes=200, seconds=1.0, **site)
    assert idle + (190 << 20) <= group.memory[0].tree_peak_bytes < idle + (260 << 20)
    group.call("echo", value=1, **site)
    assert group.memory[0].tree_peak_bytes < idle + (60 << 20)


@HERE
def test_ctrl_c_on_the_terminal_does_not_reach_workers(make_group: MakeGroup) -> None:
    group = make_group()
    group.start({}, {})
    supervisor = group._monitor.ranks[0].process.supervisor.pid
    sessions = {os.getsid(0), os.getsid(supervisor), os.getsid(group.pids[0])}
    assert len(sessions) == 3


def test_the_log_tail_is_of_this_start_and_the_file_keeps_all(
    make_group: MakeGroup, site: Site, tmp_path: Path
) -> None:
    group = make_group()
    group.start({}, {})
    group.call("log_and_print", lines=3, **site)
    group.start({}, {})
    with pytest.raises(WorkerLost) as caught:
        group.call("leave", code=1, **site)
    assert "leaving now" in caught.value.log_tail
    assert "printed line" not in caught.value.log_tail
    text = (tmp_path / "logs" / "w-0.log").read_text()
    assert "printed line 2" in text
    assert "leaving now" in text


@HERE
def test_twenty_starts_leave_no_descriptor_thread_or_process(
    make_group: MakeGroup, site: Site
) -> None:
    group = make_group()

    def round_trip() -> None:
        group.start({}, {})
        assert group.call("echo", value=1, **site) == [1]
        group.stop()

    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    # Other tests' fixtures (a shared server) and helpers of the interpreter may be alive.
    round_trip()
    before = sorted(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    elsewhere = children()
    for _ in range(20):
        round_trip()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads
    assert children() <= elsewhere
