"""Other ways from N producers to N consumers on one host: memory-mapped files, gloo collectives."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.dispatch_local_batch import COLUMNS, Size, Source, check
from benchmarks.dispatch_local_earl import SHARED_MEMORY
from benchmarks.dispatch_local_group import Group

_GLOO_SECONDS = 300


class Way(Protocol):
    """One way of moving batches, ready to move one of a given size."""

    def move(self) -> tuple[float, float]:
        """Seconds of publishing and of fetching, for one batch."""
        ...

    def check(self) -> None:
        """Raise `RuntimeError` unless the last batch arrived with all its values."""
        ...


class MappedWorker:
    """tensordict: a producer writes its columns as memory-mapped files, a consumer maps them."""

    def __init__(self, rank: int, size: Size) -> None:
        self._rank, self._size = rank, size
        self._rows: dict[str, list[np.ndarray]] = {}

    def make(self) -> None:
        """The source, as tensors."""
        import torch
        from tensordict import TensorDict

        source = Source(self._size, self._rank)
        tensors = {name: torch.from_numpy(source.whole(name)) for name in COLUMNS}
        self._source = TensorDict(tensors, batch_size=[self._size.share])

    def publish(self, directory: Path) -> None:
        """Write the files."""
        self._source.memmap(str(directory / str(self._rank)), num_threads=0)

    def fetch(self, directory: Path) -> None:
        """Map all producers' files and take views of this consumer's rows."""
        from tensordict import TensorDict

        shards = [
            TensorDict.load_memmap(directory / str(producer))
            for producer in range(self._size.workers)
        ]
        share, wanted = self._size.share, self._size.wanted_by(self._rank).tolist()
        self._rows = {}
        for name in COLUMNS:
            # Reading a column of a mapped TensorDict costs much more than a row of a tensor.
            columns = [shard[name].numpy() for shard in shards]
            self._rows[name] = [columns[w // share][w % share] for w in wanted]

    def check(self) -> None:
        """Raise unless every value arrived."""
        for name in COLUMNS:
            check(self._size, self._size.wanted_by(self._rank), name, self._rows[name])

    def drop(self) -> None:
        """Let the files go."""
        self._rows.clear()


class Mapped:
    """tensordict's memory-mapped files in shared memory, new ones for every batch as it makes."""

    def __init__(self, producers: Group, consumers: Group) -> None:
        self._producers, self._consumers = producers, consumers
        self._root = Path(tempfile.mkdtemp(prefix="earl-bench-", dir=SHARED_MEMORY))
        self._last: Path | None = None
        producers.call("make")

    def move(self) -> tuple[float, float]:
        """One batch; the files of the one before go first."""
        self._forget()
        self._last = Path(tempfile.mkdtemp(dir=self._root))
        published = self._producers.call("publish", self._last)
        return published.seconds, self._consumers.call("fetch", self._last).seconds

    def check(self) -> None:
        """Raise unless every value arrived."""
        self._consumers.call("check")

    def _forget(self) -> None:
        self._consumers.call("drop")
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)

    def close(self) -> None:
        """Remove all files."""
        shutil.rmtree(self._root, ignore_errors=True)


@contextlib.contextmanager
def tensordict_way(size: Size) -> Iterator[Way]:
    """tensordict, through memory-mapped files."""
    with (
        Group(MappedWorker, size.workers, size) as producers,
        Group(MappedWorker, size.workers, size) as consumers,
    ):
        way = Mapped(producers, consumers)
        try:
            yield way
        finally:
            way.close()


class GlooRank:
    """A rank that makes its share, gives it to rank 0 and gets other rows from there."""

    def __init__(self, rank: int, size: Size, meeting: Path) -> None:
        import torch
        from torch import distributed

        self._torch: Any = torch
        self._distributed: Any = distributed
        self._rank, self._size = rank, size
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=size.workers,
            timeout=datetime.timedelta(seconds=_GLOO_SECONDS),
        )
        source = Source(size, rank)
        self._source = {name: torch.from_numpy(source.whole(name)) for name in COLUMNS}
        self._got = {name: torch.ones_like(one) for name, one in self._source.items()}
        self._all: dict[str, Any] = {}
        if rank == 0:
            self._all = {
                name: torch.ones((size.samples, size.tokens), dtype=one.dtype)
                for name, one in self._source.items()
            }

    def gather(self) -> None:
        """All columns to rank 0, into memory that is there."""
        for name, column in self._source.items():
            into = None
            if self._rank == 0:
                into = list(self._all[name].chunk(self._size.workers))
            self._distributed.gather(column, into, dst=0)

    def scatter(self) -> None:
        """All columns from rank 0, each rank's rows."""
        for name, into in self._got.items():
            parts = None
            if self._rank == 0:
                each = [self._size.wanted_by(rank) for rank in range(self._size.workers)]
                parts = [self._all[name][self._torch.from_numpy(rows)] for rows in each]
            self._distributed.scatter(into, parts, src=0)

    def check(self) -> None:
        """Raise unless every value arrived."""
        for name, arrived in self._got.items():
            check(self._size, self._size.wanted_by(self._rank), name, list(arrived.numpy()))


class Gloo:
    """Gather to one rank, scatter from there; the N ranks are producers and consumers both."""

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks

    def move(self) -> tuple[float, float]:
        """One batch."""
        return self._ranks.call("gather").seconds, self._ranks.call("scatter").seconds

    def check(self) -> None:
        """Raise unless every value arrived."""
        self._ranks.call("check")


@contextlib.contextmanager
def gloo_way(size: Size) -> Iterator[Way]:
    """torch.distributed with gloo."""
    with (
        tempfile.TemporaryDirectory() as directory,
        Group(GlooRank, size.workers, size, Path(directory) / "meeting") as ranks,
    ):
        yield Gloo(ranks)
