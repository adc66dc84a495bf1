"""Memory of the processes of a run, at the moment of each stage when they hold most.

Proportional set sizes from `/proc/<pid>/smaps`: a page that n processes map counts 1/n to each, so
that the table's sum is what the machine has less. Columns: `code` are the files of programs and
libraries, `shared` is shared memory (published weights, shards, buffers of vLLM), `own` is what a
process has written itself (heap, stacks, tensors).

    python -m tools.memory --markdown TABLE.md -- .venv/bin/earl demo --plain --iterations 2

A stage begins with the line that the command prints for it (`iteration 1: update started`).
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tools.harness import Report, Row, parser, publish
from tools.process_tree import proportional_bytes

_MIB = 2**20
_PAUSE = 0.5
_LOOKED_AT_AGAIN = 1.02
"""So many times the largest sum so far: reading all mappings takes ten times as long as the sum."""
_KINDS = ("own", "code", "shared")
_STARTED = re.compile(r"iteration \d+: (\w+) started")
_BEFORE = "start"

Held = dict[str, Counter[str]]
"""Bytes of each kind by process."""


def kind_of(mapping: str) -> str:
    """The column of a mapping, by its name in smaps; empty for memory without a name."""
    if mapping.startswith(("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")):
        return "shared"
    return "code" if mapping.startswith("/") else "own"


def held(smaps: str) -> dict[str, int]:
    """Bytes of each kind in the text of a smaps file. Pages of a private mapping of a file that
    were written are the process's own."""
    sums: Counter[str] = Counter()
    kind, file_bytes = "own", 0
    for line in smaps.splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            parts = line.split(maxsplit=5)
            kind = kind_of(parts[5] if len(parts) > 5 else "")
        elif first == "Pss:":
            file_bytes = int(rest.split()[0]) * 1024
            sums[kind] += file_bytes
        elif first == "Pss_Anon:" and kind == "code":
            written = int(rest.split()[0]) * 1024
            sums["code"] -= written
            sums["own"] += written
    return dict(sums)


def tree(root: int) -> list[psutil.Process]:
    """A process and all that come from it."""
    with suppress(psutil.Error):
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    return []


def title(process: psutil.Process) -> str:
    """A short name for a row: the module and what it says of itself, else the program."""
    words = process.cmdline()
    modules = [word for word in words if word.startswith(("earl_core.", "flows.", "tasks."))]
    if modules:
        return " ".join(words[words.index(modules[0]) :])[:60]
    return " ".join([Path(words[0]).name, *words[1:]])[:60] if words else process.name()


def look(root: int) -> Held:
    """Bytes of each kind by title, now; processes of one title together."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for process in tree(root):
        with suppress(OSError, psutil.Error):
            smaps = Path(f"/proc/{process.pid}/smaps").read_text(encoding="utf-8")
            found[title(process)].update({**held(smaps), "processes": 1})
    return dict(found)


class Stage:
    """The stage that a command's output speaks of; passes the output on."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.name = _BEFORE
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(line, end="", flush=True)
            if started := _STARTED.match(line):
                self.name = started[1]


def watch(command: list[str]) -> dict[str, Held]:
    """Run a command; what its processes held when they held most, by stage."""
    best: dict[str, Held] = {}
    most: Counter[str] = Counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    stage = Stage(process.stdout)
    try:
        while process.poll() is None:
            name, now = stage.name, sum(proportional_bytes(x.pid) for x in tree(process.pid))
            if now > most[name] * _LOOKED_AT_AGAIN:
                best[name], most[name] = look(process.pid), now
            time.sleep(_PAUSE)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    return best


def report(found: Mapping[str, Held]) -> Report:
    """A table for each stage, the largest process first, and its sum."""
    made = Report("memory", "What the processes of a run hold")
    for stage, processes in found.items():
        sizes = {name: [held[kind] / _MIB for kind in _KINDS] for name, held in processes.items()}
        sizes["all"] = [sum(parts) for parts in zip(*sizes.values(), strict=True)]
        for name, parts in sorted(sizes.items(), key=lambda each: -sum(each[1])):
            columns = zip((f"{kind} MiB" for kind in _KINDS), map(round, parts), strict=True)
            row: Row = {"stage": stage, "process": name, "MiB": round(sum(parts)), **dict(columns)}
            made.rows.append(row)
    sums = [float(row["MiB"] or 0) for row in made.rows if row["process"] == "all"]
    made.headline["peak_mib"] = max(sums, default=0.0)
    return made


def main() -> None:
    """Run the command after `--` and print the table."""
    made = parser(__doc__ or "")
    made.add_argument("command", nargs="+", help="after --")
    options = made.parse_args()
    publish(report(watch(options.command)), options)


if __name__ == "__main__":
    main()
