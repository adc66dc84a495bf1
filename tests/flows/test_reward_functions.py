"""Whole runs whose episodes are scored by functions."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.flows.runs import KILLED, Runs


@pytest.mark.slow
def test_scoring_is_repeated_and_the_rollout_is_not(runs: Runs) -> None:
    """The judge is down; it is up again, and the run is stopped as it seals; it goes on."""
    seen = runs.directory / "seen.txt"

    def functions(**options: object) -> tuple[str, ...]:
        turns = {
            "function": "tests.experience.scoring_functions:turns",
            "weight": 0.5,
            "options": {"seen": str(seen), **options},
        }
        return "reward.retries=0", f"reward.functions={json.dumps([turns])}"

    first, second, last = runs.train_here(
        {"overrides": functions(down=True)},
        {"overrides": functions(), "fault": "reward.seal@1=raise"},
        {"overrides": functions()},
    )
    assert "episodes have no reward" in str(first)
    assert "ConnectionError: the judge is down" in str(first)
    assert "injected failure" in str(second)
    assert last is None
    sealed = Counter(runs.executed("sealed"))
    for iteration in range(2):
        assert sealed[iteration, "rollout"] == sealed[iteration, "reward"] == 1
    numbers = Counter(map(int, seen.read_text().split()))
    assert numbers == {number: 1 if number < 16 else 2 for number in range(32)}
    for iteration, metrics in enumerate(runs.metrics()):
        kept = pq.read_table(runs.run() / f"iterations/{iteration:06d}/episodes.parquet")
        rows = kept.to_pylist()
        assert len(rows) == 16
        for row in rows:
            assert json.loads(row["scores"]) == {"turns": row["turns"] / 10}
            total = sum(row["turn_rewards"]) + 0.5 * row["turns"] / 10
            assert row["reward"] == pytest.approx(total, abs=1e-6)
        means = {name: sum(row[name] for row in rows) / 16 for name in ("turns", "reward")}
        assert metrics["reward/of/turns/mean"] == pytest.approx(means["turns"] / 10)
        assert metrics["reward/mean"] == pytest.approx(means["reward"], abs=1e-6)
        assert metrics["reward/episodes_failed"] == 0
    runs.assert_learnt()
    assert runs.shared_memory() == []


class _Raters(BaseHTTPRequestHandler):
    """Rates episodes after a time that their names tell, so in any order; those that are held, when
    they are no longer."""

    def do_GET(self) -> None:
        name, raters = self.path.rpartition("/")[2], self._raters
        status = 404
        if name in raters.told:
            early = time.monotonic() < raters.told[name] + drawn(name, 5) / 4
            held = raters.holding and number_of(name) >= 16 and number_of(name) % 2
            status = 202 if early or held else 200
        self.answer(status, name)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._raters.told.setdefault(body["id"], time.monotonic())
        self.answer(202, body["id"])

    @property
    def _raters(self) -> Any:
        return self.server

    def answer(self, status: int, name: str) -> None:
        self._raters.asked[self.command, status, name] += 1
        body = json.dumps({"score": drawn(name, 7) / 8}).encode() if status == 200 else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def drawn(name: str, most: int) -> int:
    return hashlib.sha256(name.encode()).digest()[0] % most


def number_of(name: str) -> int:
    return int(name.partition("-")[0])


@pytest.fixture
def raters() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Raters)
    server.told, server.asked, server.holding = {}, Counter(), True
    threading.Thread(target=server.serve_forever).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_ratings_come_in_any_order_to_several_ranks_and_after_a_kill(
    runs: Runs, raters: Any
) -> None:
    """What has come is kept: nobody is asked twice, and each stage is sealed once."""
    url = f"http://127.0.0.1:{raters.server_address[1]}/rate"
    options = {"url": url, "poll_seconds": 0.1, "deadline_seconds": 400}
    later = {"function": "later", "label": "people", "weight": 0.5, "options": options}
    overrides = (
        f"reward.functions={json.dumps([later])}",
        "stages.rollout.replicas=2",
        "experience.ranks=2",
    )
    kept = runs.run() / "later"

    def scores() -> list[str]:
        return [line for path in kept.glob("*.jsonl") for line in path.read_text().splitlines()]

    process = runs.start(*overrides)
    while len(scores()) < 24:
        assert process.poll() is None, runs.output_path(0).read_text()
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60) == KILLED
    runs.wait_for_workers_to_end()
    raters.holding = False
    runs.train(*overrides)
    assert sorted(path.name for path in kept.iterdir()) == ["0.jsonl", "1.jsonl"]
    assert sorted(number_of(name) for name in raters.told) == [*range(32)]
    for name in raters.told:
        assert raters.asked["POST", 202, name] == raters.asked["GET", 200, name] == 1
    sealed = Counter(runs.executed("sealed"))
    for iteration, metrics in enumerate(runs.metrics()):
        assert sealed[iteration, "rollout"] == sealed[iteration, "reward"] == 1
        assert metrics["rollout/replicas"] == 2
        path = runs.run() / f"iterations/{iteration:06d}/episodes.parquet"
        rows = pq.read_table(path).to_pylist()
        of = {number_of(name): drawn(name, 7) / 8 for name in raters.told}
        for row in rows:
            assert json.loads(row["scores"]) == {"people": of[row["episode_id"]]}
            total = sum(row["turn_rewards"]) + 0.5 * of[row["episode_id"]]
            assert row["reward"] == pytest.approx(total, abs=1e-6)
    runs.assert_learnt()
    assert runs.shared_memory() == []
