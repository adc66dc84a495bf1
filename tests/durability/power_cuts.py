"""`python -m tests.durability.power_cuts DRAWS [EVERY]`: the power fails at writes of a run's life.

What no sync has reached is gone, or a part of it, and shared memory is. Whatever is left must open,
with the metrics of all that is STABLE, and end with the weights of an undisturbed life.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.durability.crash_sweep import SweepFailed, in_child, life_after, warm
from tests.durability.io_calls import CHANGES, intercepted
from tests.durability.life import life_config, live
from tests.shared import MEMORY, memory_place

Tree = dict[str, "Tree | bytes"]


class Disk:
    """What of a directory would survive a power cut, by what was synced of it.

    A file's bytes survive as they were at its last fsync, a folder's names as they were at its
    own. Descriptors are held, so that no inode's number is given out twice.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {os.stat(root).st_ino: {}}
        self._held: list[int] = []

    def synced(self, descriptor: int) -> None:
        """A descriptor was synced just now."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path != self._root and self._root not in path.parents:
            return
        number = self._hold(path)
        if path.is_dir():
            self._names[number] = {child.name: self._hold(child) for child in path.iterdir()}
        else:
            self._bytes[number] = path.read_bytes()

    def _hold(self, path: Path) -> int:
        self._held.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))
        return os.fstat(self._held[-1]).st_ino

    def left(self, draw: random.Random | None = None) -> Tree:
        """The tree after a power cut now. draw: some of what was not synced survives as well."""
        return self._tree(os.stat(self._root).st_ino, self._root, draw)

    def _tree(self, number: int, path: Path | None, draw: random.Random | None) -> Tree:
        names = dict(self._names.get(number, {}))
        for name, there in self._live(path).items() if draw else ():
            if draw.random() < 0.5:  # type: ignore[union-attr]
                names[name] = there
        tree: Tree = {}
        for name, child in names.items():
            below = path / name if path and self._live(path).get(name) == child else None
            if child in self._names or (below is not None and below.is_dir()):
                tree[name] = self._tree(child, below, draw)
            else:
                tree[name] = self._content(child, below, draw)
        return tree

    def _content(self, number: int, path: Path | None, draw: random.Random | None) -> bytes:
        if draw is not None and path is not None and draw.random() < 0.5:
            whole = path.read_bytes()
            return whole[: draw.randint(len(self._bytes.get(number, b"")), len(whole))]
        return self._bytes.get(number, b"")

    @staticmethod
    def _live(path: Path | None) -> dict[str, int]:
        return {child.name: os.lstat(child).st_ino for child in path.iterdir()} if path else {}


def write(tree: Any, path: Path) -> None:
    """Put a tree of `_texts` on the disk."""
    path.mkdir()
    for name, content in tree.items():
        if isinstance(content, str):
            (path / name).write_bytes(content.encode("latin-1"))
        else:
            write(content, path / name)


def record(root: Path, draws: int) -> list[tuple[Tree, list[str]]]:
    """Live in `root`: every tree that a power cut may leave, with what was promised by then.

    draws: for each call, trees in which some of what was not synced survives.
    """
    disk, draw = Disk(root / "runs"), random.Random(11)
    told: list[str] = []
    found: dict[str, tuple[Tree, list[str]]] = {}
    looking = False

    def look(name: str, real: Callable[..., Any], given: tuple[Any, ...], more: Any) -> Any:
        nonlocal looking
        if looking or name not in CHANGES | {"fsync"}:
            return real(*given, **more)
        looking = True
        try:
            for tree in (disk.left(), *(disk.left(draw) for _ in range(draws))):
                # The same tree may be left later, when more was promised.
                found[repr(tree)] = (tree, list(told))
            result = real(*given, **more)
            if name == "fsync":
                disk.synced(given[0])
            return result
        finally:
            looking = False

    with intercepted(look):
        live(life_config(root), told.append)
    return list(found.values())


def main(draws: int, every: int) -> None:
    """Record a life, then live on from all that a power cut may leave of it, or one in `every`."""
    scratch = Path(tempfile.mkdtemp(prefix=memory_place("power-").name, dir=MEMORY))
    root, states = scratch / "root", scratch / "states"
    try:
        (root / "runs").mkdir(parents=True)
        warm(scratch)
        weights = in_child(lambda: live(life_config(scratch / "other")))
        in_child(lambda: str(states.write_text(json.dumps(_texts(record(root, draws))))))
        cuts = json.loads(states.read_text())[::every]
        for number, (tree, told) in enumerate(cuts):
            shutil.rmtree(root)
            root.mkdir()
            write(tree, root / "runs")
            # What was sealed lay in shared memory.
            lines = [line.split() for line in told if not line.startswith("sealed")]
            try:
                found = in_child(functools.partial(life_after, root, lines))
                if found != weights:
                    raise SweepFailed(f"ended with the weights {found!r}, not {weights!r}")
            except SweepFailed as failure:
                raise SweepFailed(f"power cut {number} of {len(cuts)}: {failure}") from None
        print(json.dumps({"cuts": len(cuts)}))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _texts(value: Any) -> Any:
    """The trees with texts in place of bytes."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {name: _texts(each) for name, each in value.items()}
    return [_texts(each) for each in value] if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    main(int(sys.argv[1]), int(*sys.argv[2:3] or [1]))
