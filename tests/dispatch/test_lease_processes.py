"""Leases of other processes: killed, forked and spawned ones, and races with writers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from earl_core.dispatch.segments.leases import (
    map_shared,
)
from earl_core.dispatch.segments.pool import SegmentPool
from tests.dispatch.segments import MIB, Child, sealed, visible

pytestmark = pytest.mark.usefixtures("nothing_mapped")


def _lease_until_told(pipe: Connection, path: Path, size: int) -> None:
    mapped = map_shared(path, size)
    pipe.send(mapped.memory[0])
    pipe.recv()


def test_a_killed_reader_frees_its_lease(pool: SegmentPool) -> None:
    path, size = sealed(pool, 1, fill=2)
    with Child(_lease_until_told, path, size) as child:
        assert child.hear() == 2
        assert not pool.release(path)
        child.kill()
    assert pool.release(path)


def _close_inherited(pipe: Connection, path: Path, size: int) -> None:
    mapped = _inherited.pop()
    pipe.send(mapped.memory[0])
    mapped.close()
    with closing(map_shared(path, size)) as own:
        pipe.send(own.memory[0])
    pipe.send("closed")
    pipe.recv()


_inherited: list = []


def test_a_forked_child_neither_ends_nor_prolongs_the_parents_lease(pool: SegmentPool) -> None:
    path, size = sealed(pool, 1, fill=2)
    mapped = map_shared(path, size)
    _inherited.append(mapped)
    with Child(_close_inherited, path, size) as child:
        _inherited.clear()
        assert [child.hear() for _ in range(3)] == [2, 2, "closed"]
        assert not pool.release(path), "the child's close did not end the parent's lease"
        mapped.close()
        assert pool.release(path), "the child does not keep what the parent gave back"


def _lease_and_fork(pipe: Connection, path: Path, size: int) -> None:
    mapped = map_shared(path, size)
    view = np.frombuffer(mapped.memory, dtype=np.uint8)
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(1)
    pipe.send((child, int(view[0])))
    pipe.recv()


def test_a_child_of_a_killed_reader_does_not_keep_its_lease(pool: SegmentPool) -> None:
    path, size = sealed(pool, 1, fill=2)
    with Child(_lease_and_fork, path, size) as reader:
        orphan, value = reader.hear()
        try:
            assert value == 2
            assert not pool.release(path)
            reader.kill()
            assert pool.release(path)
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_fork_with_busy_threads(pool: SegmentPool) -> None:
    path, size = sealed(pool, 1, fill=2)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            map_shared(path, size).close()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            with Child(_lease_until_told, path, size) as child:
                assert child.hear() == 2
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert pool.release(path)


def _churn(pipe: Connection, directory: Path, number: int) -> None:
    """Seal segments of one class, each filled with the number in its name, and release them."""
    pool = SegmentPool(directory, 64 * MIB, wait_seconds=30, poison=bool(number % 2))
    pipe.send("ready")
    turn = 0
    while not pipe.poll():
        turn += 1
        fill = 1 + (turn * 2 + number) % 150
        path, _ = sealed(pool, 20_000, fill=fill, name=f"{fill:03d}-{number}")
        if turn % 3 == 0:
            time.sleep(0.0005)
        while not pool.release(path) and not pipe.poll():
            pass
    pipe.send(turn)


def _chase(pipe: Connection, directory: Path) -> None:
    """Read whatever is visible; what is leased must be what its name says."""
    pipe.send("ready")
    read = gone = 0
    patience = time.monotonic() + 60
    while not pipe.poll() or (not gone and time.monotonic() < patience):
        for name in visible(directory):
            try:
                with closing(map_shared(directory / name, 20_480)) as mapped:
                    data = np.frombuffer(mapped.memory, dtype=np.uint8)
                    before = data.copy()
                    time.sleep(0.0005 * (read % 2))
                    after = data.copy()
                    del data
            except FileNotFoundError:
                gone += 1
                continue
            assert (before == int(name[7:10])).all(), name
            assert (after == before).all(), name
            read += 1
    pipe.send((read, gone))


def test_readers_never_see_another_generation(pool: SegmentPool) -> None:
    pool.directory.mkdir()
    writers = [Child(_churn, pool.directory, number) for number in range(2)]
    readers = [Child(_chase, pool.directory) for _ in range(3)]
    try:
        for child in (*writers, *readers):
            assert child.hear() == "ready"
        time.sleep(3)
        for child in readers:
            child.pipe.send("stop")
        counts = [reader.hear() for reader in readers]
        for child in writers:
            child.pipe.send("stop")
        turns = [writer.hear() for writer in writers]
    finally:
        for child in (*writers, *readers):
            child.__exit__()
    assert sum(read for read, _ in counts) > 100
    assert sum(gone for _, gone in counts) > 0, "the race was never run"
    assert sum(turns) > 100
    for name in visible(pool.directory):
        assert pool.release(pool.directory / name)
    assert pool.used_bytes() <= 4 * 20_480, "few segments served all turns"


def _read_spawned(path: Path, size: int) -> None:
    with closing(map_shared(path, size)) as mapped:
        assert mapped.memory[0] == 3


def test_a_spawned_reader(pool: SegmentPool) -> None:
    path, size = sealed(pool, 1, fill=3)
    mapped = map_shared(path, size)
    process = multiprocessing.get_context("spawn").Process(target=_read_spawned, args=(path, size))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert not pool.release(path)
    mapped.close()
    assert pool.release(path)
