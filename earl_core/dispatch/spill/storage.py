"""Spill: the same bytes as a shard in shared memory, on any storage that fsspec knows.

`<url>/<run uid>/<file>` holds the whole Arrow file, so any Arrow reader reads columns of it from
there. A shard that is restored is compared with its block table, whose checksum is in the manifest.

The folder carries a mark of ours, its first object. Only where it does, and only plain objects with
the name of a shard, are removed or written over: whatever else lies there belongs to others.

An object may be torn by a crash while it was written (local disk is not atomic). A torn object is
harmless: its size decides whether it counts as written, its checksums whether its bytes are used.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from earl_core.dispatch.segments.leases import map_shared
from earl_core.dispatch.segments.pool_directory import is_shard, is_uid
from earl_core.dispatch.shards.manifest import ManifestError, ShardEntry
from earl_core.dispatch.shards.shard import verify_body
from earl_core.secrets import redact, redact_error, resolve
from earl_core.system.errors import EarlError
from earl_core.system.files import private
from earl_core.system.processes import ProcessId
from earl_core.system.storage_errors import naming

_MARK = "earl-spill.json"
_FORMAT = "earl.spill/1"


class SpillError(EarlError):
    """The spill cannot be written or read; the message names it and says what to change."""

    expected = False


class Spill:
    """The shards of one run under `url`, which may be a reference to one (`env:NAME`, `file:PATH`).
    Credentials come from the storage's own environment.

    Raises `SpillError` for a missing package or what is no URL, `ValueError` for what is no uid.
    """

    def __init__(self, url: str, uid: str) -> None:
        if not is_uid(uid):
            raise ValueError(f"{uid!r} is no uid of a run, so it names no folder of a spill")
        self._mark = json.dumps({"format": _FORMAT, "run": uid}).encode()
        self._uid = uid
        self.url = f"{url.rstrip('/')}/{uid}"
        try:
            import fsspec
        except ImportError as error:
            raise SpillError(
                "dispatch.durability `spill` needs the package fsspec: install it, or choose "
                "`memory`"
            ) from error
        try:
            location = f"{resolve(url).rstrip('/')}/{uid}"
            self._storage, self._root = fsspec.core.url_to_fs(location)
        except (ImportError, ValueError) as error:
            # An unresolvable reference is a ValueError too.
            raise SpillError(
                f"dispatch.spill_url {url!r} cannot be used ({redact(str(error))}): install the "
                "storage's package (s3fs for s3://, gcsfs for gs://), or correct the URL"
            ) from redact_error(error)
        self._prepared = False

    def put(self, path: Path, entry: ShardEntry) -> bool:
        """Copy a sealed shard's file under a lease; harmless when it is there already. False when
        the shard was released meanwhile, so that nobody needs it. Raises `SpillError`."""
        try:
            lease = map_shared(path, entry.bytes)
        except FileNotFoundError:
            return False
        try:
            with self._storage_errors("written"):
                self._prepare()
                if self._size(entry) != entry.bytes:
                    self._storage.put_file(str(path), self._name(entry))
        except SpillError as error:
            if self._prepared:
                self._forget_partial(entry, error)
            raise
        finally:
            lease.close()
        return True

    def restore(self, entry: ShardEntry, path: Path) -> None:
        """Copy a shard back to where it lay, verified before it gets its name.

        The caller sees to it that there is room. Raises `ManifestError` for a shard that is missing
        or damaged, `SpillError`, and `OSError` when the directory cannot be written.
        """
        aside = path.with_name(f".writing.{ProcessId.current()}.{entry.generation}")
        try:
            with naming(path), open(aside, "w+b", opener=private) as stream:
                # A full tmpfs must be an error here and not a signal to whoever maps the file.
                os.posix_fallocate(stream.fileno(), 0, max(1, entry.bytes))
                self._copy(entry, stream)
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, f"{path} is in the way: remove it")
            os.rename(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def delete(self, files: Sequence[str]) -> None:
        """Remove shards by file name; harmless for those that are not there. Raises `SpillError`,
        and removes nothing, where the folder does not carry our mark."""
        with self._storage_errors("changed"):
            there = self._own_objects()
            for file in set(files):
                if there.get(file):
                    self._storage.rm_file(f"{self._root}/{file}")

    def remove(self) -> None:
        """Remove all shards of this run, then the mark, then the folder if it is empty. Objects of
        others stay, and the mark with them. Raises as `delete`."""
        with self._storage_errors("changed"):
            there = self._own_objects()
            for file in [file for file, own in there.items() if own]:
                self._storage.rm_file(f"{self._root}/{file}")
            if set(self._objects()) == {_MARK}:
                self._storage.rm_file(f"{self._root}/{_MARK}")
                with suppress(Exception):  # a storage without folders has nothing to remove
                    self._storage.rmdir(self._root)
        self._prepared = False

    def _prepare(self) -> None:
        """Make the folder and mark it, unless others have put something there."""
        if self._prepared:
            return
        self._storage.makedirs(self._root, exist_ok=True)
        there = self._objects()
        if not self._is_marked(there):
            # A mark that was cut off by a crash lies there alone.
            if not set(there) <= {_MARK} or not all(map(_is_plain, there.values())):
                raise self._foreign()
            self._storage.pipe_file(f"{self._root}/{_MARK}", self._mark)
        self._prepared = True

    def _own_objects(self) -> dict[str, bool]:
        """Map each object to true if it is a shard of ours; empty when the folder is not there."""
        there = self._objects()
        if there and not self._is_marked(there):
            raise self._foreign()
        return {name: is_shard(name) and _is_plain(info) for name, info in there.items()}

    def _is_marked(self, there: dict[str, dict[str, Any]]) -> bool:
        mark = there.get(_MARK)
        # Through a link, the folder is another's, whatever lies in it.
        if mark is None or not _is_plain(mark) or self._storage.info(self._root).get("islink"):
            return False
        return bool(self._storage.cat_file(f"{self._root}/{_MARK}") == self._mark)

    def _objects(self) -> dict[str, dict[str, Any]]:
        """Return what fsspec tells of each object in the folder, by name."""
        self._storage.invalidate_cache()
        try:
            found = self._storage.ls(self._root, detail=True)
        except FileNotFoundError:
            return {}
        named = {str(info["name"]).rstrip("/").rpartition("/")[2]: info for info in found}
        # Some storages list a folder as an object in itself.
        return {name: info for name, info in named.items() if name != self._uid}

    def _foreign(self) -> SpillError:
        return SpillError(
            f"the spill {self.url} does not carry the mark of this run ({_MARK}): what lies there "
            "is not of EARL and was left alone; set dispatch.spill_url to another place"
        )

    def _name(self, entry: ShardEntry) -> str:
        return f"{self._root}/{entry.file}"

    def _size(self, entry: ShardEntry) -> int:
        self._storage.invalidate_cache()
        try:
            info = self._storage.info(self._name(entry))
        except FileNotFoundError:
            return -1
        if not _is_plain(info):
            raise SpillError(f"{self._name(entry)} is no plain file of this user: remove it")
        return int(info["size"])

    def _forget_partial(self, entry: ShardEntry, error: SpillError) -> None:
        """Give a full storage its space back; nothing more can be done where that fails too."""
        try:
            self.delete([entry.file])
        except SpillError as again:
            error.add_note(str(again))

    def _copy(self, entry: ShardEntry, stream: Any) -> None:
        with self._storage_errors("read"):
            try:
                source = self._storage.open(self._name(entry), "rb")
            except FileNotFoundError as error:
                raise ManifestError(f"the shard {entry.file} is not in {self.url}") from error
            with source:
                left = entry.bytes
                while left and (part := source.read(min(left, 1 << 23))):
                    stream.write(part)
                    left -= len(part)
        stream.flush()
        mapping = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
        try:
            if left:
                raise ManifestError("its end is missing")
            verify_body(memoryview(mapping), entry)
        except ManifestError as error:
            raise ManifestError(
                f"the shard {entry.file} in {self.url} does not match its checksums: its stage is "
                "repeated"
            ) from error

    @contextmanager
    def _storage_errors(self, what: str) -> Iterator[None]:
        """Every storage has errors of its own: all become one, which names the spill."""
        try:
            yield
        except (SpillError, ManifestError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                advice = "it is full: free some space"
            else:
                advice = redact(f"{type(error).__name__}: {error}")
            raise SpillError(
                f"the spill {self.url} cannot be {what} ({advice}). Correct dispatch.spill_url or "
                "the storage behind it, or set dispatch.durability to `memory`"
            ) from error


def _is_plain(info: dict[str, Any]) -> bool:
    """Tell whether this is an object, and on a file system one of this user and no link."""
    own = info.get("uid", os.geteuid()) == os.geteuid()
    return info["type"] == "file" and not info.get("islink") and own
