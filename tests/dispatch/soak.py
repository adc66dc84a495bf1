"""A small run that can be killed anywhere: a controller, two producers, two consumers.

The controller does iterations over a real run directory: both producers write a rollout shard,
then a reward shard; the consumers join them and check every value under leases; then the iteration
is stable and its shards are released. A worker that dies is replaced and its call repeated.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from earl_core.config import RunConfig, parse_config
from earl_core.dispatch import Batch, Manifest, ShardEntry, ShardStore
from earl_core.run import RunDirectory
from earl_core.system.errors import InUse
from earl_core.trajectory.schema import per_token

WORKERS = 2
ROWS = 8
STAGES = {
    "rollout": pa.schema(
        [pa.field("sample_id", pa.int64(), nullable=False), per_token("tokens", pa.int32())]
    ),
    "reward": pa.schema(
        [pa.field("sample_id", pa.int64(), nullable=False), per_token("advantages", pa.float32())]
    ),
}
_COLUMN = {"rollout": "tokens", "reward": "advantages"}
_PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")


class Moment(IntEnum):
    """What a process does, for whoever chooses when to kill it."""

    IDLE = 0
    WRITING = 1
    SEALING = 2
    SEALED = 3
    LEASED = 4
    CONTROLLING = 5
    RELEASING = 6


class Board:
    """Shared with all processes: who they are, what they do, what was found wrong."""

    def __init__(self) -> None:
        slots = 1 + 2 * WORKERS
        self.pids = _FORK.Array("i", slots, lock=False)
        self.moments = _FORK.Array("i", slots, lock=False)
        self.wrong = _FORK.Value("i", 0)
        self.finish = _FORK.Value("i", 0)
        self.held = _FORK.Value("q", -1)


@dataclass(frozen=True)
class Answer:
    """What a worker says: a result, or that it died."""

    alive: bool
    value: Any = None


def config_in(directory: Path, shared: Path) -> RunConfig:
    """A run with a pool that fills up when shards are left behind."""
    return parse_config(
        {
            "name": "soak",
            "runs_directory": str(directory / "runs"),
            "iterations": 1000000,
            "model": {"path": "models/x"},
            "environment": {"name": "tic_tac_toe"},
            "rollout": {"prompts_per_iteration": 4, "group_size": 2, "max_turns": 5},
            "dispatch": {"directory": str(shared), "max_bytes": 2**26, "wait_seconds": 20},
        }
    )


def lengths_of(iteration: int, rank: int) -> np.ndarray:
    """int64 [ROWS]: tokens of each row; sizes change so that many size classes are used."""
    draw = np.random.default_rng((iteration, rank))
    return draw.integers(0, 2000 * (1 + iteration % 5), ROWS)


def values_of(stage: str, iteration: int, rank: int, row: int, length: int) -> np.ndarray:
    """What a row must hold."""
    seed = 7 * iteration + 31 * rank + 101 * row + (0 if stage == "rollout" else 13)
    return (np.arange(length) + seed) % 997


def produce(store: ShardStore, note: Callable[[Moment], None], **call: Any) -> str:
    """Write one shard, in several goes; its entry as JSON."""
    stage, iteration, rank = call["stage"], call["iteration"], call["rank"]
    lengths, column = lengths_of(iteration, rank), _COLUMN[stage]
    with store.create(
        stage=stage,
        iteration=iteration,
        rank=rank,
        schema=STAGES[stage],
        rows=ROWS,
        lengths={column: lengths},
    ) as writer:
        note(Moment.WRITING)
        writer.values("sample_id")[:] = np.arange(ROWS) + rank * ROWS
        for row, length in enumerate(lengths.tolist()):
            writer.rows(column)[row][:] = values_of(stage, iteration, rank, row, length)
            time.sleep(0.0003)
        note(Moment.SEALING)
        entry = writer.seal()
    note(Moment.SEALED)
    return store.complete(entry, 30).model_dump_json()


def consume(store: ShardStore, note: Callable[[Moment], None], **call: Any) -> bool:
    """Join both stages under leases; whether every value is right."""
    manifests = [Manifest.model_validate_json(text) for text in call["manifests"]]
    iteration = manifests[0].iteration
    with Batch(store, manifests, verify=call["verify"]) as batch:
        note(Moment.LEASED)
        time.sleep(0.002)
        return all(_row_is_right(batch, iteration, index) for index in range(len(batch)))


def _row_is_right(batch: Batch, iteration: int, index: int) -> bool:
    rank, row = divmod(int(batch.rows[index]), ROWS)
    length = int(lengths_of(iteration, rank)[row])
    return all(
        np.array_equal(batch.row(column, index), values_of(stage, iteration, rank, row, length))
        for stage, column in _COLUMN.items()
    )


class Worker:
    """A producer or consumer in a process of its own, which ends when the controller does."""

    def __init__(self, board: Board, slot: int, store: ShardStore) -> None:
        self._board, self._slot, self._store = board, slot, store
        self._start()

    def _start(self) -> None:
        self._end, theirs = _FORK.Pipe()
        arguments = (theirs, os.getpid(), self._board, self._slot, self._store)
        self._process = _FORK.Process(target=_work, args=arguments)
        self._process.start()
        theirs.close()
        self._board.pids[self._slot] = self._process.pid or 0

    def ask(self, **call: Any) -> None:
        """Send a call; a dead worker is found when it does not answer."""
        try:
            self._end.send(call)
        except OSError:
            return

    def answer(self) -> Answer:
        """The answer to the last call; a worker that died is replaced."""
        try:
            return Answer(True, self._end.recv())
        except (EOFError, OSError):
            self._board.pids[self._slot] = 0
            self._end.close()
            self._process.join()
            self._start()
            return Answer(False)

    def call(self, **call: Any) -> Any:
        """Ask until there is an answer."""
        while True:
            self.ask(**call)
            answer = self.answer()
            if answer.alive:
                return answer.value

    def stop(self) -> None:
        """End it: said, for its siblings have copies of this end."""
        self.ask()
        self._process.join(60)


def _work(end: Connection, parent: int, board: Board, slot: int, store: ShardStore) -> None:
    _die_with(parent)

    def note(moment: Moment) -> None:
        board.moments[slot] = moment

    while True:
        note(Moment.IDLE)
        try:
            call = end.recv()
        except (EOFError, OSError):
            os._exit(0)
        if not call:
            os._exit(0)
        do = produce if "stage" in call else consume
        end.send(do(store, note, **call))


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def control(board: Board, config: RunConfig, parent: int) -> None:
    """The controller: iterations until the board says to finish, then the run's end."""
    _die_with(parent)
    board.pids[0] = os.getpid()
    board.moments[0] = Moment.CONTROLLING
    run = _resume(config)
    workers = [Worker(board, 1 + slot, run.store) for slot in range(2 * WORKERS)]
    while not board.finish.value:
        _iterate(run, run.last_stable() + 1, workers[:WORKERS], workers[WORKERS:], board)
    for worker in workers:
        worker.stop()
    # What a killed producer sealed without its controller hearing of it.
    run.store.adopt(set())
    pool = run.store.pool
    segments = [path for path in pool.directory.iterdir() if path.suffix in (".arrow", ".part")]
    writing = pool.directory.glob(".writing*")
    board.held.value = sum(path.stat().st_size for path in [*segments, *writing])
    run.finish()
    run.close()


def _resume(config: RunConfig) -> RunDirectory:
    # A worker that was forked at the moment of the kill has the lock too until the signal that
    # follows its parent's death reaches it.
    deadline = time.monotonic() + 60
    while True:
        try:
            return RunDirectory.open(config)
        except InUse:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _iterate(
    run: RunDirectory,
    iteration: int,
    producers: list[Worker],
    consumers: list[Worker],
    board: Board,
) -> None:
    manifests = []
    for stage in STAGES:
        found = run.sealed(iteration, stage, f"key {iteration}")
        if found is None:
            found = run.seal(_stage(run, iteration, stage, producers))
        else:
            run.note(iteration, stage, "reused")
        manifests.append(found.model_dump_json())
    for number, consumer in enumerate(consumers):
        verify = bool((iteration + number) % 2)
        if not consumer.call(manifests=manifests, verify=verify):
            board.wrong.value += 1
    board.moments[0] = Moment.RELEASING
    run.checkpoint_path(iteration).mkdir(parents=True, exist_ok=True)
    run.mark_stable(iteration)
    run.prune_checkpoints()
    board.moments[0] = Moment.CONTROLLING


def _stage(run: RunDirectory, iteration: int, stage: str, producers: list[Worker]) -> Manifest:
    calls = [{"stage": stage, "iteration": iteration, "rank": rank} for rank in range(WORKERS)]
    for producer, call in zip(producers, calls, strict=True):
        producer.ask(**call)
    entries = []
    for producer, call in zip(producers, calls, strict=True):
        answer = producer.answer()
        text = answer.value if answer.alive else producer.call(**call)
        entries.append(ShardEntry.model_validate_json(text))
    return Manifest(
        run=run.uid,
        iteration=iteration,
        stage=stage,
        key=f"key {iteration}",
        policy_version=iteration,
        shards=tuple(entries),
    )
