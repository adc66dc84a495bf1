"""Ray's ways: its object store, and a single controller that gathers, splits and sends."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dispatch_local_batch import COLUMNS, Size, Source, check
from benchmarks.dispatch_local_group import phase, timed
from benchmarks.dispatch_local_peers import Way

_LEAST_STORE = 512 * 2**20


class StoreWorker:
    """An actor that puts its share into the object store, or gets all shares from there."""

    def __init__(self, size: Size, rank: int) -> None:
        self._size, self._rank = size, rank
        self._rows: dict[str, list[np.ndarray]] = {}

    def make(self) -> None:
        """The source."""
        source = Source(self._size, self._rank)
        self._source = {name: source.whole(name) for name in COLUMNS}

    def publish(self) -> tuple[float, float, Any]:
        """Put the share; the answer holds its reference."""
        import ray

        return timed(lambda: [ray.put(self._source)])

    def fetch(self, references: list[list[Any]]) -> tuple[float, float, Any]:
        """Get all shares, which copies nothing, and take views of this consumer's rows."""
        import ray

        def run() -> None:
            shards = ray.get([reference for (reference,) in references])
            share = self._size.share
            wanted = self._size.wanted_by(self._rank).tolist()
            self._rows = {
                name: [shards[w // share][name][w % share] for w in wanted] for name in COLUMNS
            }

        return timed(run)

    def check(self) -> None:
        """Raise unless every value arrived."""
        for name, rows in self._rows.items():
            check(self._size, self._size.wanted_by(self._rank), name, rows)

    def drop(self) -> None:
        """Let the shares go."""
        self._rows = {}


class ObjectStore:
    """Producers put, consumers get."""

    def __init__(self, producers: list[Any], consumers: list[Any]) -> None:
        self._producers, self._consumers = producers, consumers

    def move(self) -> tuple[float, float]:
        """One batch."""
        import ray

        ray.get([worker.drop.remote() for worker in self._consumers])
        published = phase(ray.get([worker.publish.remote() for worker in self._producers]))
        references = published.results
        fetched = ray.get([worker.fetch.remote(references) for worker in self._consumers])
        return published.seconds, phase(fetched).seconds

    def check(self) -> None:
        """Raise unless every value arrived."""
        import ray

        ray.get([worker.check.remote() for worker in self._consumers])


class ProtoWorker:
    """An actor of a single controller: gives its share as a result, takes rows as an argument."""

    def __init__(self, size: Size, rank: int, mode: str) -> None:
        from benchmarks.dispatch_local_proto import NUMPY_MODE

        os.environ[NUMPY_MODE] = mode
        self._size, self._rank = size, rank

    def make(self) -> None:
        """The source."""
        import torch

        from benchmarks.dispatch_local_proto import make

        source = Source(self._size, self._rank)
        self._source = make({name: torch.from_numpy(source.whole(name)) for name in COLUMNS})

    def give(self) -> Any:
        """The share."""
        return self._source

    def take(self, part: Any) -> None:
        """Rows for this consumer, which Ray has deserialised."""
        self._part = part

    def check(self) -> None:
        """Raise unless every value arrived."""
        from benchmarks.dispatch_local_proto import column

        for name in COLUMNS:
            rows = list(column(self._part, name))
            check(self._size, self._size.wanted_by(self._rank), name, rows)


class SingleController:
    """Gather to the driver, concatenate, reorder, split, send."""

    def __init__(self, producers: list[Any], consumers: list[Any], size: Size) -> None:
        self._producers, self._consumers = producers, consumers
        each = [size.wanted_by(rank) for rank in range(size.workers)]
        self._order = np.concatenate(each)

    def move(self) -> tuple[float, float]:
        """One batch: seconds until it is whole at the driver, and from there to the consumers."""
        import ray

        from benchmarks.dispatch_local_proto import concatenate, reorder, split

        start = time.perf_counter()
        whole = concatenate(ray.get([worker.give.remote() for worker in self._producers]))
        gathered = time.perf_counter()
        parts = split(reorder(whole, self._order), len(self._consumers))
        pairs = zip(self._consumers, parts, strict=True)
        ray.get([worker.take.remote(part) for worker, part in pairs])
        return gathered - start, time.perf_counter() - gathered

    def check(self) -> None:
        """Raise unless every value arrived."""
        import ray

        ray.get([worker.check.remote() for worker in self._consumers])


@contextlib.contextmanager
def ray_cluster(workers: int, largest: int) -> Iterator[None]:
    """Ray on this machine, with an object store for three batches of `largest` bytes."""
    with _own_token():
        import ray  # it reads its settings when it is imported

        ray.init(
            address="local",
            num_cpus=4 * workers + 1,
            object_store_memory=max(_LEAST_STORE, 3 * largest),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _own_token() -> Iterator[None]:
    """Ray's processes ask each other for a token: one of this benchmark, which goes with it.

    Otherwise Ray makes one for good, in the user's home.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "token"
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32), encoding="utf-8")
        settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


@contextlib.contextmanager
def object_store_way(size: Size) -> Iterator[Way]:
    """Ray's object store; a cluster must be there."""
    with _actors(StoreWorker, size) as (producers, consumers):
        yield ObjectStore(producers, consumers)


@contextlib.contextmanager
def controller_way(size: Size, mode: str) -> Iterator[Way]:
    """A single controller. mode: "numpy" or "", the serialisation of its batches."""
    from benchmarks.dispatch_local_proto import NUMPY_MODE

    before = os.environ.get(NUMPY_MODE)
    os.environ[NUMPY_MODE] = mode
    try:
        with _actors(ProtoWorker, size, mode) as (producers, consumers):
            yield SingleController(producers, consumers, size)
    finally:
        os.environ.pop(NUMPY_MODE)
        if before is not None:
            os.environ[NUMPY_MODE] = before


@contextlib.contextmanager
def _actors(kind: type, size: Size, *arguments: object) -> Iterator[tuple[list[Any], list[Any]]]:
    import ray

    actor: Any = ray.remote(kind)
    groups: list[list[Any]] = [
        [actor.remote(size, rank, *arguments) for rank in range(size.workers)] for _ in range(2)
    ]
    producers, consumers = groups
    ray.get([worker.make.remote() for worker in producers])
    try:
        yield producers, consumers
    finally:
        for worker in (*producers, *consumers):
            ray.kill(worker)
