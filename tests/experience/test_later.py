"""Scores that come later: waited for until a deadline, kept, and never asked for twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.errors import WorkerLost
from earl_core.config import RunConfig
from earl_core.config.reward import RewardFunctionConfig
from earl_core.dispatch import Batch, ShardEntry
from earl_core.environments.base import EnvironmentFailed, StepResult
from earl_core.environments.hosting.check import check_environments
from earl_core.environments.later import NOT_YET, Later, episode_key
from earl_core.experience.reward import merge_rewards
from earl_core.experience.waiting import NO_ANSWER, KeptScores, Waiting
from earl_core.system.errors import ConfigError, EarlError
from earl_core.trajectory.samples import SAMPLE_BITS, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA
from tests.experience.test_distributed import Ranks, configuration, sealed, written
from tests.experience.test_scoring import EPISODES, RIGHT, rank_alone, scores_of

FOUR = EPISODES[:4]
OWN = [1.0, 2.0, 3.0, 1.0]
"""Sums of their turns' rewards."""
QUICK = {"poll_seconds": 0.02, "deadline_seconds": 2.0}


def later(tmp_path: Path, reward: dict[str, Any] | None = None, **options: Any) -> RunConfig:
    function = {"function": "later", "label": "people", "weight": 2.0, "options": QUICK | options}
    given = {"functions": [RIGHT, function], "retries": 0, "max_failed_share": 0.0}
    return configuration(tmp_path, given | (reward or {}))


async def rewarded(tmp_path: Path, config: RunConfig) -> tuple[list[float], dict[str, Any], Any]:
    """Rewards of the four episodes in a worker of its own, the merged result, and progress."""
    heard: list[dict[str, Any]] = []
    async with rank_alone(tmp_path, config) as (run, worker, context):
        context._send_progress = heard.append
        manifest = written(run.store, "rollout", ROLLOUT_SCHEMA, [rollout_rows(FOUR)])
        result = await worker.reward([run.seal(manifest).model_dump(mode="json")])
        merged = merge_rewards([result], config)
        entries = [ShardEntry.model_validate(each) for each in merged["shards"]]
        with Batch(run.store, [sealed("reward", entries)]) as batch:
            rewards = batch.scalars("reward").tolist()[::2]
    return rewards, merged, heard


async def test_ratings_in_files_are_waited_for_and_kept_for_a_resume(tmp_path: Path) -> None:
    directory = tmp_path / "ratings"
    config = later(tmp_path, directory=str(directory), deadline_seconds=8.0)

    async def rate(numbers: list[int]) -> list[Path]:
        given: list[Path] = []
        while len(given) < len(numbers):
            await asyncio.sleep(0.03)
            for asked in directory.glob("episodes/*.json"):
                episode = json.loads(asked.read_text())
                number = episode["episode_id"]
                scored = directory / "scores" / asked.name
                if number in numbers and scored not in given:
                    assert episode["messages"][-1]["content"] == "x" * number
                    scored.write_text(json.dumps({"score": number / 4}))
                    given.append(scored)
        return given

    rating = asyncio.create_task(rate([0, 1, 2]))
    with pytest.raises(EarlError) as caught:
        await rewarded(tmp_path, config)
    assert str(caught.value).startswith(
        "'people' has given no score for episodes 3 (no score came within 8 s): have 'people' "
        "score them, or raise its deadline_seconds, and resume"
    )
    assert caught.value.payload["lacking"] == [3]
    # Whoever rates them again would say something else.
    for each in await rating:
        each.write_text('{"score": 100}')
    rating = asyncio.create_task(rate([3]))
    rewards, merged, heard = await rewarded(tmp_path, config)
    await rating
    assert rewards == pytest.approx(
        [own + 2 * at / 4 + 2 * (at == 2) for at, own in enumerate(OWN)]
    )
    assert heard[-1] == {"episodes_done": 4, "episodes": 4}
    assert merged["metrics"]["of/people/mean"] == pytest.approx(6 / 16)


def test_ranks_wait_each_for_its_own_and_a_killed_one_loses_no_score(tmp_path: Path) -> None:
    directory = tmp_path / "ratings"
    options = QUICK | {"directory": str(directory), "deadline_seconds": 120.0}
    config = configuration(tmp_path, {"functions": [{"function": "later", "options": options}]})
    ranks = Ranks(tmp_path, config)
    manifest = written(ranks.store, "rollout", ROLLOUT_SCHEMA, [rollout_rows(EPISODES)])
    kept = ranks.run.path / "later"

    def rate(first: int, after: int, score: float) -> None:
        """Rate episodes of these numbers as soon as they are asked for, if nobody has yet."""
        rated: set[str] = set()
        while len(rated) < after - first and not over.wait(0.02):
            for asked in directory.glob("episodes/*.json"):
                number = json.loads(asked.read_text())["episode_id"]
                if first <= number < after and asked.name not in rated:
                    rated.add(asked.name)
                    (directory / "scores" / asked.name).write_text(json.dumps({"score": score}))

    def kill_when_kept() -> None:
        while not over.wait(0.02):
            lines = [line for path in kept.glob("*.jsonl") for line in path.open()]
            if len(lines) == 3:
                os.kill(ranks.group.pids[0], signal.SIGKILL)
                return

    def beside(*work: Any) -> None:
        over.clear()
        threads = [threading.Thread(target=each) for each in work]
        for thread in threads:
            thread.start()
        try:
            results.append(ranks.call("reward", [manifest]))
        finally:
            over.set()
            for thread in threads:
                thread.join()

    over, results = threading.Event(), list[list[dict[str, Any]]]()
    try:
        with pytest.raises(WorkerLost):
            beside(partial(rate, 0, 3, 0.25), kill_when_kept)
        # Who rates again would say something else.
        for path in directory.glob("scores/*.json"):
            path.write_text('{"score": 100}')
        ranks.begin()
        beside(partial(rate, 3, len(EPISODES), 0.5))
        merged = merge_rewards(results[-1], config)
        assert sum(bool(each["shards"]) for each in results[-1]) > 1
        entries = [ShardEntry.model_validate(each) for each in merged["shards"]]
        with Batch(ranks.store, [sealed("reward", entries)]) as batch:
            numbers = (batch.rows >> SAMPLE_BITS).tolist()
            rewards = dict(zip(numbers, batch.scalars("reward").tolist(), strict=False))
    finally:
        ranks.close()
    own = {each.episode_id: each.total_reward for each in EPISODES}
    assert rewards == pytest.approx({n: own[n] + (0.25 if n < 3 else 0.5) for n in own})


class _Grader(BaseHTTPRequestHandler):
    def answer(self, id_: str, known: bool) -> None:
        state: Any = self.server
        number = int(id_.partition("-")[0])
        state.asked[self.command, number] += 1
        looks = state.asked["GET", number]
        status, body = 202, b""
        if not known:
            status = 404
        elif state.busy or (number == 0 and looks == 2):
            status = 503
        elif looks > 2 or not state.slow:
            status, body = 200, state.says[number]
        if self.headers["Authorization"] != "Bearer k-e-y":
            status = 401
        self.send_response(status)
        stalls = state.slow and number == 1 and looks == 3
        self.send_header("Content-Length", str(len(body) + stalls))
        self.end_headers()
        self.wfile.write(body)
        if stalls:
            time.sleep(4)

    def do_GET(self) -> None:
        id_ = self.path.rpartition("/")[2]
        self.answer(id_, id_ in self.server.known)  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["episode"]["messages"]
        self.server.known.add(body["id"])  # type: ignore[attr-defined]
        self.answer(body["id"], True)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_KEY", "k-e-y")
    monkeypatch.setenv("OTHER_KEY", "o-t-h-e-r")


@pytest.fixture
def grader() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Grader)
    server.asked, server.known, server.slow, server.busy = Counter(), set(), True, False
    server.says = [b'{"score": 0.5}'] * 4
    server.url = f"http://127.0.0.1:{server.server_address[1]}/grade"
    threading.Thread(target=server.serve_forever).start()
    yield server
    server.shutdown()
    server.server_close()


async def test_a_slow_grader_is_asked_once_for_each_episode(tmp_path: Path, grader: Any) -> None:
    """One that stops amid an answer, for longer than a look may take, is asked for it again."""
    options = {"url": grader.url, "api_key": "env:GRADER_KEY", "deadline_seconds": 20}
    config = later(tmp_path, {"timeout_seconds": 2.0}, **options)
    rewards, _, _ = await rewarded(tmp_path, config)
    assert grader.asked["GET", 1] > 3
    assert rewards == pytest.approx([own + 1.0 + 2 * (at == 2) for at, own in enumerate(OWN)])
    assert [grader.asked["POST", number] for number in range(4)] == [1] * 4
    before = dict(grader.asked)
    again, _, _ = await rewarded(tmp_path, config)
    assert again == rewards
    assert dict(grader.asked) == before


def test_a_busy_endpoint_is_told_once(grader: Any, capsys: pytest.CaptureFixture[str]) -> None:
    grader.slow = False
    ask = Later(url=grader.url, api_key="k-e-y", timeout_seconds=5)
    episodes = [
        {"episode_id": number, "messages": [{"role": "user"}], "closing": "", "scoring": None}
        for number in range(3)
    ]
    for each in episodes:
        ask(each)
    for _ in range(2):
        grader.busy = True
        assert [ask(each) for each in episodes] == [NOT_YET] * 3
        assert capsys.readouterr().err.count("503") == 1
        grader.busy = False
        assert ask(episodes[2])


async def test_what_came_is_kept_at_once_and_no_look_outlasts_the_deadline(tmp_path: Path) -> None:
    """Where a kill tore a line before, too; and a look that failed by its host is repeated."""
    function = RewardFunctionConfig(function="later", options={**QUICK, "deadline_seconds": 1.0})
    numbers = range(3)
    episodes = [
        {"episode_id": number, "messages": [], "closing": "", "scoring": None} for number in numbers
    ]
    keys = [episode_key(each) for each in episodes]
    failures = list(NO_ANSWER)
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "0.jsonl").write_text('["lat')

    async def ask(text: str) -> StepResult | EnvironmentFailed:
        number = json.loads(text)["episode_id"]
        if number == 0:
            await asyncio.sleep(1000)
        if number == 1 and failures:
            return EnvironmentFailed(1, failures.pop(), "its host was slow")
        return StepResult([], number / 4, True, {"metrics": {}})

    waiting = Waiting(function, KeptScores(tmp_path, 0), ask, look_seconds=60.0)
    task = asyncio.create_task(waiting.wait(episodes, lambda _: None))
    while KeptScores(tmp_path, 1).of(function, keys[2]) is None:
        assert not task.done()
        await asyncio.sleep(0.01)
    began = time.monotonic()
    await task
    assert time.monotonic() - began < 50
    assert waiting.found == {2: 0.5}
    assert waiting.failures == {
        0: "no score came within 1 s",
        1: "no score came within 1 s; the last look: host_died: its host was slow",
    }
    # Nobody waits for the slow one here, so that the deadline may be far.
    patient = RewardFunctionConfig(function="later", options=QUICK | {"deadline_seconds": 60.0})
    again = Waiting(patient, KeptScores(tmp_path, 0), ask, look_seconds=60.0)
    await again.wait(episodes[1:], lambda _: None)
    assert (again.found, again.failures, failures) == ({1: 0.25, 2: 0.5}, {}, [])


def test_what_is_no_score_costs_its_own_episode(tmp_path: Path, grader: Any) -> None:
    grader.slow = False
    grader.says = [b'{"score": true}', b'{"score": NaN}', b'{"score": "1"}', b"[1]"]
    function = {
        "function": "later",
        # Nothing is waited for: that long may the answers take.
        "options": {
            **QUICK, "deadline_seconds": 60.0, "url": grader.url, "api_key": "env:GRADER_KEY",
        },
    }  # fmt: skip
    found = scores_of(tmp_path, [function], 4)
    assert not found.given
    for number, told in enumerate(
        ("is True: give a number", "not nan", "not '1'", "is [1]: give an object with `score`")
    ):
        assert told in found.failures[number]
    function["options"] = {**function["options"], "api_key": "env:OTHER_KEY"}
    found = scores_of(tmp_path / "other", [function], 1)
    assert "answered with status 401" in found.failures[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline_seconds": "soon"}, "deadline_seconds is 'soon': give a number of seconds"),
        ({"poll_seconds": True}, "poll_seconds is True: give a number of seconds"),
        ({"deadline_seconds": 3540}, "a stage may take 3600 s: raise deadlines.stage above 3630"),
        ({"timeout_seconds": 61}, r"give a number of seconds up to reward.timeout_seconds \(60\)"),
        ({"timeout_seconds": "9"}, "has timeout_seconds '9': give a number of seconds"),
    ],
)
def test_a_wait_that_cannot_be_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        later(tmp_path, directory="ratings", **options)


async def test_what_cannot_be_asked_is_refused_before_work(tmp_path: Path) -> None:
    for options, message in (
        ({}, "directory or url is missing, or both are given"),
        ({"directory": "a", "url": "http://x"}, "or both are given"),
        ({"url": "ftp://x"}, "begin it with http:// or https://"),
        ({"directory": "a", "api_key": "env:GRADER_KEY"}, "api_key is for a url: leave it out"),
    ):
        with pytest.raises(ConfigError, match=message):
            await check_environments(later(tmp_path, **options))
    raw = later(tmp_path, directory="a").model_dump()
    suite = {"label": "s", "name": "tic_tac_toe", "prompts": 1, "scored_by": ["people"]}
    raw["evaluation"] = {"suites": [suite]}
    with pytest.raises(ValueError, match="'people', which nobody waits for in an evaluation"):
        RunConfig.model_validate(raw)
