"""`python -m tests.durability.edits [--edits N] [--seed S] [--results FILE]`: edits of a run.

Each edit changes one thing of a stopped run: bytes or lines of a file, a file or folder gone, or
another thing in its place (a folder, a link, a FIFO, another file). Then everything that reads runs
looks at it, within a minute each: the library, and now and then `earl shards list`, `earl shards
show`, `earl plan`, `earl doctor` and `earl resume`; and the run lives on. Either it is refused with
an error that its command shows as one sentence, or it ends with the weights of an undisturbed life,
unless it said that a setting changed. With a results file the campaign goes on where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import random
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from earl_core.config import RunConfig
from earl_core.control.policy_player import find_checkpoint
from earl_core.run.record import stored_config
from earl_core.run.run_stores import list_stores
from earl_core.system.errors import EarlError
from flows.cli.app import app
from flows.cli.errors import describe
from flows.cli.found_runs import evaluations_of, iterations_of, tracking_uri
from tests.durability.crash_sweep import SweepFailed, import_ahead, in_child
from tests.durability.life import Life, life_config, open_run, weights_of
from tests.shared import MEMORY, memory_place

ITERATIONS = 3
_SECONDS = 60.0


class Template:
    """A stopped run: two iterations STABLE, the third half done. Put back after each edit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = life_config(root, iterations=ITERATIONS, checkpoint={"keep_last": 2})
        import_ahead()
        in_child(self._live)
        self.run = root / "runs" / "run"
        self.store = next(iter((root / "shm").iterdir()))
        self._kept = [_snapshot(self.run), _snapshot(self.store)]
        self.expected = in_child(lambda: live_on(root))
        self.restore()

    def _live(self) -> str:
        run = open_run(self.config)
        life = Life(run)
        for number in range(ITERATIONS - 1):
            life.iterate(number)
        life.prepare(ITERATIONS - 1)
        run.close()
        return ""

    def restore(self) -> None:
        """Have everything as it was."""
        for path, kept in zip((self.run, self.store), self._kept, strict=True):
            _clear(path)
            _write(path, kept)
        for other in (self.root / "shm").iterdir():
            if other != self.store:
                _clear(other)

    def targets(self) -> list[Path]:
        """Every file and folder of the run and of its shards."""
        found = [self.run, self.store, *self.run.rglob("*"), *self.store.rglob("*")]
        return sorted(path for path in found if path not in (self.run, self.store))


def live_on(root: Path) -> str:
    """Open the run as `earl resume` does and live to its end; the weights, or the refusal.

    An equal sign before the weights of a run that said that a setting changed.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("earl_core").addHandler(handler)
    logging.getLogger("earl_core").propagate = False
    run_path = root / "runs" / "run"
    outcome: list[str] = []

    def work() -> None:
        config = stored_config(run_path, [])
        if not _stays_inside(config, root):
            outcome.append("changed")
            return
        run = open_run(config)
        try:
            Life(run).go_on()
            weights = weights_of(run, run.config.iterations - 1)
            run.metrics()
            run.finish()
        finally:
            run.close()
        changed = any("changed setting" in line for line in said)
        outcome.append("changed" if changed else weights)

    refusal = _sentence(work)
    return refusal or outcome[0]


def _stays_inside(config: RunConfig, root: Path) -> bool:
    """Whether an edited configuration still writes into the campaign's own folder."""
    return Path(config.dispatch.directory) == root / "shm" and config.dispatch.spill_url is None


def look(root: Path) -> str:
    """Read the run in every way that takes nothing."""
    run = root / "runs" / "run"
    looks: list[Callable[[], Any]] = [
        lambda: list(list_stores(root / "shm")),
        lambda: iterations_of(run),
        lambda: evaluations_of(run),
        lambda: tracking_uri(run),
        lambda: find_checkpoint(run, stored_config(run, [])),
    ]
    return "; ".join(filter(None, (_sentence(each) for each in looks)))


def _sentence(work: Callable[[], Any]) -> str:
    """How a command would refuse; empty when it does not. Raises what no command explains."""
    try:
        work()
    except Exception as error:
        known = isinstance(error, OSError) or (isinstance(error, EarlError) and error.expected)
        if not known or "Traceback" in describe(error):
            raise
        return f"refused: {describe(error)}"
    return ""


COMMANDS = (
    ("shards", "list", "--directory", "{shm}"),
    ("shards", "show", "run@2/rollout", "--runs-directory", "{runs}"),
    ("plan", "run@0", "--runs-directory", "{runs}"),
    ("doctor", "{run}/config.yaml"),
    ("resume", "run", "--runs-directory", "{runs}", "--plain"),
)


def command(root: Path, words: tuple[str, ...]) -> str:
    """A whole command; its exit code. Raises when it shows a traceback or is not explained."""
    places = {"shm": root / "shm", "runs": root / "runs", "run": root / "runs" / "run"}
    arguments = [word.format(**places) for word in words]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = app(arguments, standalone_mode=False) or 0
        except SystemExit as ended:
            code = ended.code
    text = out.getvalue()
    if "Traceback" in text or code not in (0, 1, 2):
        raise SweepFailed(f"earl {' '.join(arguments)} ended with {code}:\n{text[-2000:]}")
    return str(code)


def edit(template: Template, draw: random.Random) -> str:
    """Change one thing; what was done to what."""
    path = draw.choice(template.targets())
    kinds = _IN_PLACE if path.is_dir() else (*_BYTES, *_BYTES, *_LINES, *_IN_PLACE)
    kind = draw.choice(kinds)
    kind(path, template, draw)
    return f"{kind.__name__} {path.relative_to(template.root)}"


def flip(path: Path, template: Template, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 4))):
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    _put(path, bytes(data))


def cut(path: Path, template: Template, draw: random.Random) -> None:
    data = path.read_bytes()
    _put(path, data[: draw.randint(0, len(data))])


def drop(path: Path, template: Template, draw: random.Random) -> None:
    data = path.read_bytes()
    start = draw.randint(0, len(data))
    _put(path, data[:start] + data[start + draw.randint(1, 40) :])


def insert(path: Path, template: Template, draw: random.Random) -> None:
    data = path.read_bytes()
    start = draw.randint(0, len(data))
    _put(path, data[:start] + draw.randbytes(draw.randint(1, 40)) + data[start:])


def digit(path: Path, template: Template, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    digits = [index for index, byte in enumerate(data[:4000]) if chr(byte).isdigit()]
    if digits:
        data[draw.choice(digits)] = ord(draw.choice("0123456789"))
    _put(path, bytes(data))


def swap(path: Path, template: Template, draw: random.Random) -> None:
    other = draw.choice([each for each in template.targets() if each.is_file()])
    _put(path, other.read_bytes())


def lines(path: Path, template: Template, draw: random.Random) -> None:
    found = path.read_bytes().splitlines(keepends=True)
    at = draw.randrange(len(found) + 1)
    change = draw.choice(("drop", "repeat", "move"))
    if change == "drop":
        del found[at : at + 1]
    elif change == "repeat":
        found[at:at] = found[at : at + 1]
    else:
        draw.shuffle(found)
    _put(path, b"".join(found))


def gone(path: Path, template: Template, draw: random.Random) -> None:
    _clear(path)


def folder(path: Path, template: Template, draw: random.Random) -> None:
    _clear(path)
    path.mkdir()


def fifo(path: Path, template: Template, draw: random.Random) -> None:
    _clear(path)
    os.mkfifo(path)


def link(path: Path, template: Template, draw: random.Random) -> None:
    kept = template.root / "elsewhere"
    _clear(kept)
    where = draw.choice((kept, kept, template.root / "nowhere", path))
    if where == kept:
        os.rename(path, kept)
    else:
        _clear(path)
    path.symlink_to(where)


def file(path: Path, template: Template, draw: random.Random) -> None:
    _clear(path)
    path.write_bytes(draw.randbytes(draw.randint(0, 40)))


_BYTES = (flip, cut, drop, insert, digit, swap)
_LINES = (lines,)
_IN_PLACE = (gone, folder, fifo, link, file)


def campaign(edits: int, seed: int, results: Path | None, commands: int = 20) -> Counter[str]:
    """Do the edits that the results lack; how all ended. commands: one of this many edits is
    looked at by whole commands, too."""
    done = _done(results)
    ends: Counter[str] = Counter(done.values())
    scratch = Path(tempfile.mkdtemp(prefix=memory_place("edits-").name, dir=MEMORY))
    try:
        template = Template(scratch)
        for number in range(edits):
            if number in done:
                continue
            end = _one(template, random.Random(f"{seed} {number}"), number % commands == 0)
            ends[end] += 1
            if results is not None:
                with results.open("a") as stream:
                    stream.write(json.dumps([number, end]) + "\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return ends


def _done(results: Path | None) -> dict[int, str]:
    if results is None or not results.exists():
        return {}
    return dict(json.loads(line) for line in results.read_text().splitlines())


def _one(template: Template, draw: random.Random, commands: bool) -> str:
    what = edit(template, draw)
    steps: list[Callable[[], str]] = [lambda: look(template.root)]
    if commands:
        steps += [lambda words=words: command(template.root, words) for words in COMMANDS]  # type: ignore[misc]
    try:
        for step in steps:
            in_child(step, _SECONDS)
        found = in_child(lambda: live_on(template.root), _SECONDS)
    except SweepFailed as failure:
        return f"failed: {what}: {failure}"
    finally:
        template.restore()
    if found == template.expected:
        return "equal"
    if found == "changed" or found.startswith("refused: "):
        return found.partition(":")[0]
    return f"failed: {what}: ended with {found!r} and said nothing"


def _put(path: Path, data: bytes) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    path.write_bytes(data)
    path.chmod(mode)


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


Kept = tuple[int, "bytes | dict[str, Kept]"]


def _snapshot(path: Path) -> Kept:
    mode = stat.S_IMODE(path.stat().st_mode)
    if path.is_dir():
        return mode, {child.name: _snapshot(child) for child in path.iterdir()}
    return mode, path.read_bytes()


def _write(path: Path, kept: Kept) -> None:
    mode, content = kept
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.mkdir()
        for name, child in content.items():
            _write(path / name, child)
    path.chmod(mode)


def main() -> None:
    """The campaign, as told on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edits", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    started = time.monotonic()
    ends = campaign(given.edits, given.seed, given.results)
    for end in ends:
        if end.startswith("failed"):
            print(end)
    counted = {name: count for name, count in ends.items() if not name.startswith("failed")}
    print(json.dumps({"ends": counted, "seconds": round(time.monotonic() - started)}))
    sys.exit(1 if len(counted) < len(ends) else 0)


if __name__ == "__main__":
    main()
