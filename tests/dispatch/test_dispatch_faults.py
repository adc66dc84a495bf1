"""Processes are killed, bytes are damaged, memory and disks are full: nothing wrong is read."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from earl_core.dispatch import Batch, Manifest, PoolFull, ShardEntry, ShardStore
from earl_core.dispatch.spill.spiller import Spiller
from earl_core.run.record import read_lines
from tests.dispatch.soak import WORKERS, Board, Moment, config_in, control, produce, values_of
from tests.dispatch.spilled import UID
from tests.shared import memory_place

_PATIENCE = 60.0


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while any(alive(pid) for pid in pids if pid):
        assert time.monotonic() < deadline, "processes outlived their controller"
        time.sleep(0.002)


class Victims:
    """Kills one process of a soak at a time, at a moment that was wished for where it comes."""

    def __init__(self, board: Board, seed: int) -> None:
        self._board = board
        self._random = random.Random(seed)
        self.killed: dict[tuple[str, Moment], int] = {}

    def kill(self) -> bool:
        """Kill one; whether it was the controller."""
        draw = self._random
        slot = draw.choices(range(1 + 2 * WORKERS), [2] + [2] * 2 * WORKERS)[0]
        role = "controller" if slot == 0 else "producer" if slot <= WORKERS else "consumer"
        wishes = {
            "controller": [Moment.CONTROLLING, Moment.RELEASING],
            "producer": [Moment.WRITING, Moment.SEALING, Moment.SEALED],
            "consumer": [Moment.IDLE, Moment.LEASED, Moment.LEASED],
        }
        wish = draw.choice(wishes[role])
        time.sleep(draw.uniform(0, 0.03))
        until = time.monotonic() + 0.3
        while self._board.moments[slot] != wish and time.monotonic() < until:
            pass
        pid, moment = self._board.pids[slot], Moment(self._board.moments[slot])
        if pid <= 0 or not alive(pid):
            return False
        os.kill(pid, signal.SIGKILL)
        self.killed[role, moment] = self.killed.get((role, moment), 0) + 1
        return slot == 0

    @property
    def count(self) -> int:
        return sum(self.killed.values())

    @property
    def everywhere(self) -> bool:
        """Whether some were killed before, while or after sealing, and under leases."""
        sealing = self._of("producer", Moment.SEALING) + self._of("producer", Moment.SEALED)
        return bool(
            self._of("producer", Moment.WRITING) and sealing and self._of("consumer", Moment.LEASED)
        )

    def _of(self, *wanted: str | Moment) -> int:
        return sum(n for key, n in self.killed.items() if set(wanted) <= set(key))


def make_soak(tmp_path: Path) -> tuple[Path, Board]:
    shared = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    return shared / memory_place("soak").name, Board()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [50, pytest.param(200, marks=pytest.mark.campaign)])
def test_kills_at_any_moment_leave_nothing_behind(kills: int, tmp_path: Path) -> None:
    shared, board = make_soak(tmp_path)
    config = config_in(tmp_path, shared)
    context = multiprocessing.get_context("fork")
    victims = Victims(board, seed=11)
    seen: set[int] = set()
    restarts = 0
    controller = context.Process(target=control, args=(board, config, os.getpid()))
    controller.start()
    try:
        stuck = time.monotonic() + 540
        while victims.count < kills or not (restarts and victims.everywhere):
            assert time.monotonic() < stuck, "the run got stuck"
            seen |= set(board.pids)
            if victims.kill() or not controller.is_alive():
                controller.join()
                assert controller.exitcode == -signal.SIGKILL, "the controller failed by itself"
                wait_until_gone(list(board.pids))
                restarts += 1
                board.pids[:] = [0] * len(board.pids)
                controller = context.Process(target=control, args=(board, config, os.getpid()))
                controller.start()
        board.finish.value = 1
        controller.join(_PATIENCE)
        assert controller.exitcode == 0, "the last resume did not reach its end"
    finally:
        controller.kill()
        controller.join()
        # Whatever failed, nothing of it may fill the machine's memory.
        left = [path.name for path in shared.glob("*")]
        shutil.rmtree(shared, ignore_errors=True)
    assert board.wrong.value == 0, "a consumer read wrong values"
    assert board.held.value == 0, "segments were held after every release"
    assert left == [], "shared memory is not empty"
    assert not [pid for pid in seen | set(board.pids) if pid and alive(pid)]
    check_records(tmp_path / "runs" / "soak", restarts)


def check_records(run: Path, restarts: int) -> None:
    """Every iteration became stable, in order, and resumes used what was sealed."""
    lines = read_lines(run / "ledger.jsonl")
    stable = {line["iteration"] for line in lines if line["event"] == "stable"}
    for iteration in range(max(stable) + 1):
        attempts = {line["attempt"] for line in lines if line["iteration"] == iteration}
        # The ledger is no record of state: a kill between the marker and the line costs the line.
        # Then the next attempt has nothing to do with the iteration any more.
        assert iteration in stable or max(attempts) < lines[-1]["attempt"], iteration
    # One line for a kill at most.
    assert len(stable) >= max(stable) + 1 - restarts
    assert json.loads((run / "run.json").read_text())["finished"]
    assert {line["attempt"] for line in lines} <= set(range(1, restarts + 2))
    assert any(line["event"] == "reused" for line in lines)


# Full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "earl-test", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount: {made.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def publish(store: ShardStore, iteration: int) -> ShardEntry:
    call = {"stage": "rollout", "iteration": iteration, "rank": 0}
    return ShardEntry.model_validate_json(produce(store, lambda moment: None, **call))


def is_right(store: ShardStore, entry: ShardEntry, iteration: int) -> bool:
    manifest = Manifest(
        run="r", iteration=iteration, stage="rollout", key="k", policy_version=0, shards=(entry,)
    )
    with Batch(store, [manifest], verify=True) as batch:
        return all(
            np.array_equal(row, values_of("rollout", iteration, 0, number, len(row)))
            for number, row in enumerate(batch.list_rows("tokens"))
        )


def fill_up(store: ShardStore) -> tuple[list[ShardEntry], PoolFull]:
    """Publish until there is no room."""
    entries: list[ShardEntry] = []
    while len(entries) < 1000:
        try:
            entries.append(publish(store, len(entries)))
        except PoolFull as error:
            return entries, error
    raise AssertionError("the store never filled up")


def check_full(store: ShardStore, entries: list[ShardEntry], error: PoolFull) -> None:
    """What is there is whole, the error says who holds it, and a release makes room again."""
    assert len(entries) > 3
    assert error.errno == errno.ENOSPC
    assert max(entries, key=lambda entry: entry.bytes).file in str(error)
    assert "dispatch.max_bytes" in str(error)
    assert all(is_right(store, entry, number) for number, entry in enumerate(entries))
    assert not list(store.directory.glob(".writing*"))
    for entry in entries:
        assert store.release(entry)
    assert is_right(store, publish(store, 4), 4)
    store.remove()


def test_a_full_pool_loses_nothing(tmp_path: Path) -> None:
    store = ShardStore(tmp_path / "run", max_bytes=2**20)
    check_full(store, *fill_up(store))


def test_full_shared_memory_loses_nothing(small_disk: Path) -> None:
    store = ShardStore(small_disk / "run", max_bytes=2**30)
    check_full(store, *fill_up(store))


def test_a_full_disk_under_the_spill_loses_nothing(
    tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ShardStore(tmp_path / "shm" / "run", 2**28)
    entries = [publish(store, 4 + 5 * number) for number in range(8)]
    assert sum(entry.bytes for entry in entries) > 2**20
    spiller = Spiller(f"file://{small_disk}/spill", UID, store.directory)
    try:
        spiller.submit(entries)
        assert not spiller.drain(60)
        assert sum("is full: free some space" in record.message for record in caplog.records) == 1
        spilled = small_disk / "spill" / UID
        sizes = {file.name: file.stat().st_size for file in spilled.glob("*.arrow")}
        there = [entry for entry in entries if entry.file in sizes]
        assert spiller.spilled_bytes == sum(entry.bytes for entry in there) > 0
        assert spiller.lag_bytes == sum(e.bytes for e in entries) - spiller.spilled_bytes > 0
        assert sizes == {entry.file: entry.bytes for entry in there}, "no half copies stay"
        for number, entry in enumerate(entries):
            assert is_right(store, entry, 4 + 5 * number)
        # What is spilled can go from memory and comes back; what is not makes up for it later.
        assert store.release(there[0])
        spiller.restore(there[0], 60)
        assert is_right(store, there[0], 4 + 5 * entries.index(there[0]))
        spiller.release([entry.file for entry in there])
        last = publish(store, 0)
        spiller.submit([last])
        assert spiller.drain(60), "there is room now"
        later = {entry.file for entry in [last, *entries] if entry not in there}
        assert {file.name for file in spilled.glob("*.arrow")} == later
    finally:
        spiller.close(5)
        store.remove()
