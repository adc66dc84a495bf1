"""A disk that is full, a quota, a file system that can only be read, too many open files: the error
names the file and says what to do, whoever writes."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.errors import Raised
from earl_core.cluster.host import Launch, LocalHost
from earl_core.run.record import Journal
from earl_core.system.files import FileLock, make_directory, write_atomic
from earl_core.system.storage_errors import NotWritten, full_disks
from flows.cli.errors import describe

WRITERS: dict[str, Callable[[Path], object]] = {
    "a whole file": lambda path: write_atomic(path, b"x"),
    "a journal": lambda path: Journal(path).append({"a": 1}),
    "a lock": FileLock,
    "a rank's log": lambda path: LocalHost().start(Launch("earl_core.run.worker", path, {})),
}

REFUSALS = {
    errno.ENOSPC: "No space left on device): free space on its file system",
    errno.EDQUOT: "Disk quota exceeded): the quota is used up: remove files",
    errno.EROFS: "Read-only file system): its file system can only be read: mount it",
    errno.EMFILE: "Too many open files): this process has too many files open: raise",
    errno.ENFILE: "Too many open files in system): the machine has too many",
    errno.EIO: "Input/output error): its disk reports an error",
    errno.EACCES: "Permission denied): let this user write there",
}


@pytest.mark.parametrize("number", REFUSALS)
@pytest.mark.parametrize("writer", WRITERS)
def test_what_the_system_refuses_names_the_file_and_the_remedy(
    writer: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, really = tmp_path / "file", os.open

    def refuse(name: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_CREAT and "file" in str(name):
            raise OSError(number, os.strerror(number))
        return really(name, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="cannot be written") as caught:
        WRITERS[writer](path)
    assert caught.value.errno == number
    assert describe(caught.value).startswith(f"error: {path} cannot be written ({REFUSALS[number]}")
    # Also from another process.
    raised = Raised.of(caught.value)
    assert raised.expected
    assert str(path) in raised.message


def fill(journal: Journal) -> None:
    while True:
        journal.append({"text": "x" * 4096})


def test_a_disk_that_is_full_and_one_that_is_read_only(tmp_path: Path) -> None:
    """Real ones: a file system in memory of 64 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        journal = Journal(place / "metrics.jsonl")
        with pytest.raises(NotWritten, match=r"metrics\.jsonl cannot be written \(No space left"):
            fill(journal)
        assert full_disks([place / "below", tmp_path]) == [str(place / "below")]
        with pytest.raises(NotWritten, match=r"run\.json cannot be written \(No space left"):
            write_atomic(place / "run.json", b"x" * 8192)
        assert not list(place.glob(".run.json*"))
        # What was whole before is whole.
        assert all(line["text"] == "x" * 4096 for line in journal.read())
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(NotWritten, match=r"more cannot be written \(Read-only file system\)"):
            make_directory(place / "more")
    finally:
        subprocess.run(["umount", str(place)], check=True)
