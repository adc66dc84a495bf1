"""The worker of demonstrations: what it writes, and what it refuses before a run starts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.rank_process import WorkerContext
from earl_core.config import ConfigError
from earl_core.imitation.demonstration_worker import DemonstrationWorker
from earl_core.imitation.drawing import drawn
from earl_core.models.tiny import build
from earl_core.run.record import write_record
from earl_core.run.run_stores import run_store
from tests.flows.test_refused_runs import config_in

GAME = [{"name": "tic_tac_toe", "options": {"style": "compact"}}]
USER, ANSWER = {"role": "user", "content": "123|456|789"}, {"role": "assistant", "content": "5"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 64 positions."""
    place = tmp_path_factory.mktemp("model") / "tiny"
    build(
        place,
        environments=GAME,
        hidden=16,
        layers=1,
        heads=2,
        warm_start_steps=0,
        max_position_embeddings=64,
    )
    return place


def worker(scratch: Path, model: Path, iteration: int = 0, **imitation: Any) -> DemonstrationWorker:
    run = scratch / "run"
    if not run.exists():
        run.mkdir()
        write_record(run, {"uid": "0123456789ab"})
    imitation = {"iterations": 2, "episodes_per_iteration": 4, **imitation}
    config = config_in(scratch, model, imitation=imitation)
    context = WorkerContext(
        rank=0,
        world_size=1,
        role="demonstrations",
        log_path=scratch / "log",
        iteration=iteration,
        _send_progress=lambda event: None,
    )
    told = {"config": config.model_dump(mode="json"), "run_directory": str(run)}
    return DemonstrationWorker(context, {"stage": "demonstrate"}, **told)


def chats(place: Path, *rows: dict[str, Any]) -> str:
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(place)


def test_iterations_write_the_rows_of_a_rollout(tmp_path: Path, model: Path) -> None:
    rows = [{"messages": [USER, {**ANSWER, "content": str(at)}]} for at in range(1, 7)]
    data = chats(tmp_path / "chats.jsonl", *rows)
    tables = []
    for iteration in range(2):
        each = worker(tmp_path, model, iteration, data=data)
        found = asyncio.run(each.demonstrate(4 * iteration))
        assert found["metrics"]["epochs"] == pytest.approx((iteration + 1) * 4 / 6)
        (entry,) = found["shards"]
        store = run_store(tmp_path / "run", each._config)
        (path,) = store.directory.rglob(entry["file"])
        tables.append(_read(path))
    assert [table["episode_id"].to_pylist() for table in tables] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    said = [json.loads(text)[1] for table in tables for text in table["texts"].to_pylist()]
    # Six different ones come before any comes again.
    assert sorted(said[:6]) == [*map(str, range(1, 7))]
    assert said != sorted(said)
    again = asyncio.run(worker(tmp_path, model, 1, data=data).demonstrate(4))
    assert again["shards"][0]["checksum"] == found["shards"][0]["checksum"]
    assert again["outputs"] == found["outputs"]
    chats(tmp_path / "chats.jsonl", *reversed(rows))
    other = asyncio.run(worker(tmp_path, model, 1, data=data).demonstrate(4))
    assert other["outputs"] != found["outputs"]


def _read(path: Path) -> Any:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too long": (
        {"messages": [USER, ANSWER] * 5},
        r"row 1 of .* has \d+ tokens, more than the 64 positions of the model: leave it out",
    ),
    "no answer": ({"messages": [USER]}, "row 1 of .* has no turn of the assistant"),
    "nothing said": (
        {"messages": [USER, {**ANSWER, "content": ""}]},
        "row 1 of .* an answer that says nothing, so there is nothing to learn",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_every_chat_that_will_be_imitated_is_looked_at(
    tmp_path: Path, model: Path, name: str
) -> None:
    row, problem = BAD[name]
    data = chats(tmp_path / "chats.jsonl", {"messages": [USER, ANSWER]}, row)
    with pytest.raises(ConfigError, match=problem):
        asyncio.run(worker(tmp_path, model, data=data).check(0, 0))
    # What no iteration takes is not: the first one takes the good chat alone.
    few = worker(tmp_path, model, data=data, iterations=1, episodes_per_iteration=1)
    assert drawn(2, 0, range(1)) == [0]
    assert asyncio.run(few.check(0, 0)) == {"episodes": 1}


def test_data_that_cannot_be_read_is_named(tmp_path: Path, model: Path) -> None:
    (tmp_path / "chats.txt").write_text("a,b\n")
    (tmp_path / "empty").mkdir()
    for source, problem in (
        (
            {"data": str(tmp_path / "chats.txt")},
            r"^imitation.data: '.*txt' has no known format",
        ),
        ({"data": str(tmp_path / "none.jsonl")}, r"^imitation.data: the data set .* be read: Fi"),
        (
            {"data": str(tmp_path / "empty")},
            r"^imitation.data: '.*' holds no .jsonl, .json, .csv or",
        ),
        ({"run": "none"}, r"^imitation.run: .*/none has no kept episodes: name a run"),
    ):
        with pytest.raises(ConfigError, match=problem):
            asyncio.run(worker(tmp_path, model, **source).check(0, 0))
