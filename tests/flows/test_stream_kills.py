"""SIGKILLs at random times over the processes of runs whose groups are played as a stream.

`EARL_KILLS` is their number over all runs. One group in twenty, drawn by its number, is thirty
times as long as the others: what is lost or dropped for being late would be those first.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from earl_core.run.checkpoints import verify_training_state
from earl_core.system.import_path import load_object
from tests.flows.runs import Process, Runs
from tests.flows.test_stream import BATCH, assert_once_and_young, stream

KILLS = int(os.environ.get("EARL_KILLS", "100"))
PAUSE_SECONDS = 3.0
"""Between two of them, on average."""

LENGTHS = "tests.rollout.environments:DrawnLengths"
"""By its path: other tests assert that nobody has imported it."""
STALENESS, ITERATIONS, SHARE, LONG = 2, 25, 20, 30
KINDS = ("controller", "rollout", "update", "environment host")
LEAST_CHANCE_STATISTIC = 10.83
"""Of chi-squared with one degree of freedom, which one true share in a thousand exceeds."""


def processes(runs: Runs, controller: Process) -> Iterator[tuple[str, int]]:
    """The run's processes that may be killed: their kinds and ids."""
    yield "controller", controller.pid
    ranks = {}
    for process in runs.workers():
        with suppress(OSError):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1")).name
            ranks[process.pid] = log.partition("-")[0]
    yield from ((kind, pid) for pid, kind in ranks.items() if kind in KINDS)
    for process in psutil.process_iter(["cmdline", "ppid"]):
        command = " ".join(process.info["cmdline"] or ())
        if "environments.hosting.host" in command and process.info["ppid"] in ranks:
            yield "environment host", process.pid


def kill_one(runs: Runs, controller: Process, chance: random.Random, run: Path) -> str:
    """Kill a process of a kind that is drawn; the kind, empty where nothing plays yet."""
    there: dict[str, list[int]] = {}
    for kind, pid in processes(runs, controller):
        there.setdefault(kind, []).append(pid)
    if "environment host" not in there or not (run / "groups.jsonl").exists():
        return ""
    kind = chance.choice(sorted(there))
    with suppress(ProcessLookupError):
        os.kill(chance.choice(sorted(there[kind])), signal.SIGKILL)
        return kind
    return ""


def killed_run(
    runs: Runs, name: str, overrides: tuple[str, ...], chance: random.Random, most: int
) -> Counter[str]:
    """Train to the end, beginning again after whatever ends the controller; the kills, at most so
    many."""
    kills: Counter[str] = Counter()
    controllers = 0
    while True:
        process = runs.start(*overrides)
        controllers += 1
        while process.poll() is None:
            until = time.monotonic() + chance.expovariate(1 / PAUSE_SECONDS)
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            if kills.total() < most and process.poll() is None:
                kind = kill_one(runs, process, chance, runs.run(name))
                kills.update([kind] if kind else [])
        runs.wait_for_workers_to_end()
        if process.returncode == 0:
            return kills
        assert controllers <= 2 * most + 2, runs.output_path(len(runs.started) - 1).read_text()


def lengths(run: Path) -> dict[int, set[int]]:
    """The turns of each trained group's episodes, from the kept rows of the shards."""
    found: dict[int, set[int]] = {}
    for k in range(ITERATIONS):
        table = pq.read_table(run / f"iterations/{k:06d}/episodes.parquet")
        for group, turns in zip(
            table["group_id"].to_pylist(), table["turns"].to_pylist(), strict=True
        ):
            found.setdefault(group, set()).add(turns)
    return found


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_random_kills_lose_and_repeat_no_group_and_the_long_keep_their_share(runs: Runs) -> None:
    kills: Counter[str] = Counter()
    trained, long, ages = 0, 0, set()
    number = 0
    while kills.total() < KILLS:
        name, options = f"run{number}", {"share": SHARE, "long": LONG, "salt": number}
        environment = {"name": LENGTHS, "options": options}
        overrides = (
            *stream(STALENESS, ITERATIONS),
            f"name={name}",
            f"environment={json.dumps(environment)}",
            f"stages.placement={('colocated', 'shared')[number % 2]}",
            "deadlines.repeats=9",
            "algorithm.kl={placement: loss, coefficient: 0.1}",
        )
        chance = random.Random(number)
        kills += killed_run(runs, name, overrides, chance, KILLS - kills.total())
        run = runs.run(name)
        ages |= set(assert_once_and_young(run, STALENESS, ITERATIONS).tolist())
        runs.assert_learnt(name)
        last = run / f"checkpoints/{ITERATIONS - 1:06d}"
        assert verify_training_state(last)["policy_version"] == ITERATIONS
        drawn = load_object(LENGTHS)(**options)
        found = lengths(run)
        assert found == {g: {drawn.turns(g)} for g in range(ITERATIONS * BATCH)}
        trained += len(found)
        long += sum(turns == {LONG} for turns in found.values())
        assert runs.shared_memory() == []
        print(
            f"{name}: {dict(kills)} kills so far, {long} of {trained} groups are long", flush=True
        )
        number += 1
    expected = np.array([trained / SHARE, trained - trained / SHARE])
    statistic = float(((np.array([long, trained - long]) - expected) ** 2 / expected).sum())
    print(f"{kills.total()} kills, chi-squared {statistic:.2f}, ages {sorted(ages)}")
    assert statistic < LEAST_CHANCE_STATISTIC
    assert ages == set(range(STALENESS + 1))
    assert set(kills) == set(KINDS) or 4 * len(KINDS) > KILLS
