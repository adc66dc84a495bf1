"""The shards of one run in shared memory: write, verify, release, sweep.

States of a shard's file: writing (a hidden name that carries its owner's boot id, pid and start
time) → sealed (renamed into place, never changed again) → released (unlinked, once no reader
holds a lease). A crash before the rename leaves nothing visible, and `sweep_unsealed` removes
what dead writers left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from pathlib import Path

import pyarrow as pa

from earl_core.dispatch.manifest import ManifestError, ShardEntry
from earl_core.dispatch.shard import checksum as buffers_checksum
from earl_core.dispatch.shard import describe_file, record_batch, write_file
from earl_core.process import ProcessId
from earl_core.trajectory.samples import Columns

_WRITING = ".writing."


class StoreFull(OSError):
    """Shared memory, or this run's share of it, is used up."""


class ShardStore:
    """All shards (and published weights) of one run on this host.

    `directory` is `<dispatch.directory>/<run uid>`, made on first use with mode 0700.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = Path(directory)
        self.max_bytes = max_bytes

    def prepare(self) -> None:
        """Make the directory; raise `StoreFull` or `OSError` with what to change if it cannot."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise OSError(
                error.errno,
                f"shared memory at {self.directory} cannot be used ({error.strerror}): set "
                "dispatch.directory to a folder you can write, best on tmpfs",
            ) from error

    def write(
        self, *, stage: str, iteration: int, rank: int, schema: pa.Schema, columns: Columns
    ) -> ShardEntry:
        """Write and seal one shard; returns its entry for the manifest.

        Raises `StoreFull` when it does not fit, `ValueError` when columns do not match.
        """
        self.prepare()
        batch = record_batch(schema, columns)
        self.reserve(batch.nbytes)
        generation = time.time_ns()
        aside = self.directory / f"{_WRITING}{ProcessId.current()}.{generation}"
        metadata = {
            "earl.stage": stage,
            "earl.iteration": str(iteration),
            "earl.rank": str(rank),
            "earl.generation": str(generation),
        }
        try:
            write_file(aside, batch, metadata)
            sealed = self.directory / f"{iteration:06d}-{stage}-{rank}-{generation}.arrow"
            os.rename(aside, sealed)
        except OSError as error:
            if error.errno == errno.ENOSPC or "No space left" in str(error):
                raise self._full(batch.nbytes, "the file system is full") from error
            raise
        finally:
            aside.unlink(missing_ok=True)
        return describe_file(sealed, generation)

    def reserve(self, size: int) -> None:
        """Check that `size` more bytes fit, in this run's share and on the file system."""
        if self.used_bytes() + size > self.max_bytes:
            raise self._full(size, f"dispatch.max_bytes is {self.max_bytes:,}")
        status = os.statvfs(self.directory)
        free = status.f_bavail * status.f_frsize
        if size > free:
            raise self._full(size, f"{free:,} bytes are free on the file system")

    def _full(self, size: int, why: str) -> StoreFull:
        holders = sorted(self._files(), key=lambda item: -item[1])[:5]
        listed = ", ".join(f"{path.name} ({used:,})" for path, used in holders) or "nothing"
        return StoreFull(
            errno.ENOSPC,
            f"{size:,} bytes do not fit into {self.directory}: {why}. It holds {listed}. Enlarge "
            "the shared memory, raise dispatch.max_bytes, or run `earl shards sweep`",
        )

    def used_bytes(self) -> int:
        """Bytes of all files of this run, unsealed ones included."""
        return sum(size for _, size in self._files())

    def _files(self) -> list[tuple[Path, int]]:
        found = []
        for path in self.directory.glob("*") if self.directory.exists() else ():
            try:
                found.append((path, path.stat().st_size))
            except FileNotFoundError:
                continue
        return found

    def path(self, entry: ShardEntry) -> Path:
        """Where an entry's file lies; the entry's name cannot leave the directory."""
        return self.directory / entry.file

    def verify(self, entry: ShardEntry, checksum: bool) -> None:
        """Raise `ManifestError` unless the shard is there, whole and of this generation."""
        path = self.path(entry)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ManifestError(f"the shard {path} is gone") from error
        if size != entry.bytes:
            raise ManifestError(
                f"the shard {path} has {size} bytes, its manifest says {entry.bytes}"
            )
        if not path.name.endswith(f"-{entry.generation}.arrow"):
            raise ManifestError(f"the shard {path} is of another generation than its manifest")
        if checksum:
            with pa.memory_map(str(path)) as source:
                found = buffers_checksum(memoryview(source.read_buffer()), entry.columns)
            if found != entry.checksum:
                raise ManifestError(f"the shard {path} is corrupt: its checksum does not match")

    def release(self, entry: ShardEntry) -> bool:
        """Unlink a shard; False when a reader still holds it."""
        return self.release_file(self.path(entry))

    def release_file(self, path: Path) -> bool:
        """Unlink any file of the store unless a reader holds a lease on it."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            path.unlink(missing_ok=True)
            return True
        finally:
            os.close(descriptor)

    def sweep_unsealed(self) -> int:
        """Remove what dead writers left; returns how many files."""
        removed = 0
        for path in self.directory.glob(f"{_WRITING}*") if self.directory.exists() else ():
            owner = ProcessId.parse(path.name.removeprefix(_WRITING).rpartition(".")[0])
            if owner is None or not owner.alive():
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def keep_only(self, files: set[str]) -> int:
        """Release every sealed file that is not in `files`; returns how many went."""
        self.sweep_unsealed()
        gone = 0
        for path, _ in self._files():
            if path.name not in files and not path.name.startswith(_WRITING):
                gone += self.release_file(path)
        return gone

    def remove(self) -> None:
        """Remove everything of this run; readers keep what they have mapped."""
        shutil.rmtree(self.directory, ignore_errors=True)
