"""Whatever removes files leaves those of others whole: random trees, links and names."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from earl_core.config import ConfigError
from earl_core.dispatch.segments.pool import SegmentPool
from earl_core.dispatch.segments.pool_directory import MARK, write_mark
from earl_core.dispatch.spill.spiller import Spiller
from earl_core.dispatch.spill.storage import Spill, SpillError
from earl_core.run import RunDirectory
from earl_core.run.record import RunDamaged, read_record, write_record
from earl_core.run.run_stores import run_store, sweep, sweep_unneeded
from earl_core.weights.publish import publish
from flows.cli.shards import sweep_shards
from tests.run.test_run_directory import config_in, seal

_OURS = [
    "000003-rollout-0-17.arrow",
    "fetch-0123456789abcdef-3.part",
    "weights-00000004.safetensors",
    ".free.16384.77",
    ".writing.0123456789ab_1_2.17",
    ".writing.not-a-process.17",
    ".pool.lock",
    ".live",
    ".fetch.lock",
    ".fetch-0123456789abcdef.0.done",
]
_FOREIGN = ["notes.txt", "model.arrow", ".free.me", "weights.safetensors", ".writing.", "é x.arrow"]
_FOLDERS = ["work", "0123456789ab", "abcdef012345", ".free.16384.5", "000003-rollout-0-9.arrow"]
_KINDS = ["file", "link", "dangling", "folder link", "folder", "pipe"]
_MARKS = [None, "copied", "empty", "linked", "other format", "other user"]

entries = st.lists(
    st.tuples(st.sampled_from(_OURS + _FOREIGN), st.sampled_from(_KINDS)), max_size=6
)
folders = st.lists(
    st.tuples(st.sampled_from(_FOLDERS), st.sampled_from(_MARKS), entries),
    max_size=4,
    unique_by=lambda folder: folder[0],
)


class Trees:
    """Two runs of ours among what others have; knows what must stay."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.root = place / "shm"
        self.outside = place / "outside"
        self.outside.mkdir()
        self.foreign: dict[Path, tuple[int, bytes | str | None]] = {}
        self.config = config_in(place, name="ours")
        self.live = RunDirectory.open(config_in(place, name="live"))
        run = RunDirectory.open(self.config)
        seal(run, 0, "rollout", "key")
        run.store.release(seal(run, 1, "rollout", "key").shards[0])
        publish({"a": torch.zeros(9)}, run.store.directory, 3, "float32")
        run._unlock()  # as a process that was killed
        self.store = run.store

    def put(self, directory: Path, given: list[tuple[str, str]], spare: set[str]) -> None:
        """Put entries of others into a directory. spare: names that are ours there."""
        for name, kind in given:
            path = directory / name
            if os.path.lexists(path) or (kind == "file" and name in spare):
                continue
            target = self.outside / f"{len(self.foreign)}"
            if kind in ("file", "link"):
                made = path if kind == "file" else target
                made.write_text(f"of others {len(self.foreign)}")
                self.keep(made)
            if kind in ("folder", "folder link"):
                made = path if kind == "folder" else target
                made.mkdir()
                (made / _OURS[0]).write_text("inside")
                self.keep(made / _OURS[0])
            if kind == "pipe":
                os.mkfifo(path)
            if "link" in kind or kind == "dangling":
                path.symlink_to(target)
            self.keep(path)

    def put_folder(self, name: str, mark: str | None, given: list[tuple[str, str]]) -> None:
        """Put a folder of others beside the stores, with something like a mark."""
        directory = self.root / name
        directory.mkdir()
        self.put(directory, given, set())
        path = directory / MARK
        if mark == "copied":
            shutil.copy(self.store.directory / MARK, path)
        elif mark == "empty":
            path.touch()
        elif mark == "linked":
            write_mark(directory, None)
            path.rename(self.outside / f"mark-{name}")
            path.symlink_to(self.outside / f"mark-{name}")
        elif mark is not None:
            write_mark(directory, None)
            wrong = {"format": "x/1"} if mark == "other format" else {"user": os.geteuid() + 1}
            path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
        if mark is not None:
            self.keep(path)

    def link_store(self) -> None:
        """A link to another place's store, marked for the name of the link."""
        elsewhere = self.outside / "fedcba987654"
        elsewhere.mkdir()
        write_mark(elsewhere, None)
        (elsewhere / _OURS[0]).write_text("x")
        self.keep(elsewhere / _OURS[0])
        (self.root / "fedcba987654").symlink_to(elsewhere)
        self.keep(self.root / "fedcba987654")

    def keep(self, path: Path) -> None:
        self.foreign[path] = self._look(path)

    def changed(self) -> list[Path]:
        return [path for path, was in self.foreign.items() if self._look(path) != was]

    @staticmethod
    def _look(path: Path) -> tuple[int, bytes | str | None]:
        try:
            status = os.lstat(path)
        except OSError:
            return -1, None
        if path.is_symlink():
            return status.st_ino, os.readlink(path)
        return status.st_ino, path.read_bytes() if path.is_file() else None


def _open_and_finish(trees: Trees) -> None:
    run = RunDirectory.open(trees.config)
    sweep_unneeded(trees.root, trees.config.dispatch)
    run.finish()
    run.close()


def _open_and_close(trees: Trees) -> None:
    run = RunDirectory.open(trees.config)
    run.mark_stable(0) if run.checkpoint_path(0).mkdir(parents=True, exist_ok=True) else None
    run.release_through(5)
    run.close()


WAYS = {
    "start and end of a run": _open_and_finish,
    "start and stop of a run": _open_and_close,
    "release": lambda trees: [
        trees.store.pool.release(path)
        for path in trees.store.directory.iterdir()
        if not path.name.startswith(".")
    ],
    "adopt": lambda trees: trees.store.adopt(set()),
    "trim": lambda trees: trees.store.pool.trim(),
    "trim of a folder": lambda trees: [
        SegmentPool(path, 2**30).trim() for path in trees.root.iterdir()
    ],
    "publish weights": lambda trees: publish(
        {"a": torch.zeros(9)}, trees.store.directory, 4, "float32"
    ),
    "sweep": lambda trees: sweep(trees.root),
    "shards sweep": lambda trees: sweep_shards(trees.root),
    "remove": lambda trees: trees.store.remove(),
}


@given(
    beside=folders,
    within=entries,
    ways=st.lists(st.sampled_from(sorted(WAYS)), min_size=1, max_size=4),
)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_files_of_others_stay_whatever_removes(
    beside: list[tuple[str, Any, list[tuple[str, str]]]],
    within: list[tuple[str, str]],
    ways: list[str],
) -> None:
    said: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        trees = Trees(Path(place))
        try:
            live = sorted(path.name for path in trees.live.store.directory.iterdir())
            for name, mark, given_entries in beside:
                trees.put_folder(name, mark, given_entries)
            trees.link_store()
            trees.put(trees.store.directory, within, set(_OURS))
            for way in ways:
                try:
                    WAYS[way](trees)
                except (ConfigError, OSError) as error:
                    # What stands in the place of a file of ours may stop a run, in one sentence.
                    said.append(str(error))
                assert trees.changed() == [], way
            kept = sorted(path.name for path in trees.live.store.directory.iterdir())
            assert kept == live, "the live run's"
            assert not any("\n" in sentence for sentence in said)
        finally:
            trees.live.close()


def test_a_sweep_empties_what_is_ours_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trees = Trees(tmp_path)
    for name in ("work", "photos", "0123456789ab", "mail", "x"):
        trees.put_folder(name, None, [("000003-rollout-0-17.arrow", "file")])
    trees.put(trees.store.directory, [("notes.txt", "file")], set())
    assert sweep(trees.root) == [trees.store.directory]
    assert sorted(os.listdir(trees.store.directory)) == [".live", MARK, "notes.txt"]
    (trees.store.directory / "notes.txt").unlink()
    assert sweep(trees.root) == [trees.store.directory]
    assert not trees.store.directory.exists()
    warned = [r.getMessage() for r in caplog.records if "left alone" in r.getMessage()]
    assert len(warned) == 2
    assert "0123456789ab, mail, photos and 2 more" in warned[0]
    trees.live.close()


@pytest.mark.parametrize("uid", ["../x", "", "abc", "0123456789AB", 3, None, "0123456789ab/.."])
def test_a_uid_that_is_none_becomes_no_path(tmp_path: Path, uid: object) -> None:
    config = config_in(tmp_path)
    RunDirectory.open(config).close()
    victim = tmp_path / "x"
    victim.mkdir()
    (victim / "000003-rollout-0-17.arrow").write_text("x")
    run = tmp_path / "runs" / "a"
    write_record(run, {**read_record(run), "uid": uid})
    for use in (lambda: RunDirectory.open(config), lambda: run_store(run, config)):
        with pytest.raises(RunDamaged, match="is damaged: its uid"):
            use()
    with pytest.raises(ValueError, match="no uid"):
        Spill(f"file://{tmp_path}/spill", uid)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no uid"):
        Spiller(f"file://{tmp_path}/spill", uid, tmp_path)  # type: ignore[arg-type]
    assert (victim / "000003-rollout-0-17.arrow").exists()


_UID = "0123456789ab"


@given(within=entries, marked=st.booleans(), linked=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_spill_removes_only_its_own_objects(
    within: list[tuple[str, str]], marked: bool, linked: bool
) -> None:
    said: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        trees = Trees(Path(place))
        trees.live.close()
        entry = seal(trees.live, 0, "rollout", "key").shards[0]
        folder, other = Path(place) / "spill" / _UID, Path(place) / "spill" / "ba9876543210"
        spill = Spill(f"file://{place}/spill", _UID)
        if marked:
            spill.put(trees.live.store.path(entry), entry)
        else:
            folder.mkdir(parents=True)
        other.mkdir(parents=True)
        trees.put(other, [(_OURS[0], "file")], set())
        trees.put(folder, within, {_OURS[0]} if marked else set())
        if linked:
            folder.rename(trees.outside / "spill")
            folder.symlink_to(trees.outside / "spill")
            trees.foreign = {
                trees.outside / "spill" / p.name if p.parent == folder else p: was
                for p, was in trees.foreign.items()
            }
        before = trees.changed()
        assert before == [] or linked
        for use in (
            lambda: spill.put(trees.live.store.path(entry), entry),
            lambda: spill.delete([name for name, _ in within] + [entry.file]),
            spill.remove,
        ):
            try:
                use()
            except SpillError as error:
                said.append(str(error))
            assert trees.changed() == before
        assert not any("\n" in sentence for sentence in said)
        if marked and not linked:
            assert not (folder / entry.file).exists()
            assert folder.exists() == bool(within and os.listdir(folder))
