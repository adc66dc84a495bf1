"""Nothing that a Prefect server hands out is unpickled, or taken for the end of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CONFIG, ROOT, Earl
from tests.cli.hostile_server import hostile_server, metadata, pickled_record


@pytest.mark.parametrize("data", [metadata("payload"), {"run": "done"}], ids=["stored", "inline"])
def test_train_refuses_the_result_of_a_hostile_server(
    fresh_earl: Earl, tmp_path: Path, data: dict[str, Any]
) -> None:
    mark = tmp_path / "executed"
    (tmp_path / "payload").write_bytes(pickled_record(mark))
    with hostile_server(tmp_path, data) as url:
        fresh_earl.environment["PREFECT_API_URL"] = url
        done = fresh_earl.run("train", str(CONFIG), "--plain", *fresh_earl.settings(), timeout=120)
    assert not mark.exists(), "the server's code ran"
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: the Prefect server handed out a result" in done.stderr
    assert "Traceback" not in done.stderr


ROUTES = """
import asyncio, sys, uuid
from pathlib import Path
import flows.running
from prefect import flow
from prefect._internal.result_records import ResultRecord, ResultRecordMetadata
from prefect.client.orchestration import get_client
from prefect.filesystems import LocalFileSystem
from prefect.results import ResultStore
from prefect.serializers import PickleSerializer
from prefect.states import Completed, Failed, get_state_exception
from prefect.transactions import transaction

directory, url = Path(sys.argv[1]), sys.argv[2]
content = (directory / "payload").read_bytes()
store = ResultStore(result_storage=LocalFileSystem(basepath=str(directory)))
beside = store.model_copy(update={"metadata_storage": LocalFileSystem(basepath=str(directory))})
named = ResultRecordMetadata(storage_key=str(directory / "payload"))
text = ResultRecord.model_validate_json(content).result.encode()

@flow
def inline():
    return 1

def cached():
    with transaction(key="payload", store=store) as found:
        return found.read().result

async def listed():
    async with get_client() as client:
        await client.read_flow_run(uuid.UUID("11111111-1111-4111-8111-111111111111"))

routes = {
    "read": lambda: store.read("payload"),
    "aread": lambda: asyncio.run(store.aread("payload")),
    "exists": lambda: store.exists("payload") and None,
    "aexists": lambda: asyncio.run(store.aexists("payload")),
    "metadata": lambda: asyncio.run(ResultStore._from_metadata(named)),
    "beside": lambda: beside.read("payload"),
    "transaction": cached,
    "result": lambda: Completed(data=named).result(_sync=True, retry_result_failure=False),
    "aresult": lambda: asyncio.run(Completed(data=named).aresult(retry_result_failure=False)),
    "exception": lambda: get_state_exception(Failed(data=named), _sync=True),
    "deserialize": lambda: ResultRecord.deserialize(content),
    "backup": lambda: ResultRecord.deserialize(text, backup_serializer=PickleSerializer()),
    "apart": lambda: ResultRecord.deserialize_from_result_and_metadata(text, named.dump_bytes()),
    "inline": inline,
}
for name, route in routes.items():
    try:
        route()
    except BaseException as error:
        print(name, type(error).__name__)
    else:
        print(name, "accepted")

# Plain results of an open run are read.
from tasks.result_security import SERIALIZER, result_directory
directory = result_directory(Path(sys.argv[1]))
store = ResultStore(result_storage=LocalFileSystem(basepath=str(directory)), serializer=SERIALIZER)
store.write({"stage": "rollout"}, key="mine")
again = ResultStore(result_storage=LocalFileSystem(basepath=str(directory)))
assert again.exists("mine") and again.read("mine").result == {"stage": "rollout"}
(directory / "foreign").write_bytes((Path(sys.argv[1]) / "payload").read_bytes())
assert not again.exists("foreign")
try:
    again.read("../payload")
except Exception as error:
    print("outside", type(error).__name__)
"""


def test_every_way_to_a_stored_result_refuses_what_is_not_ours_and_reads_what_is(
    tmp_path: Path, earl: Earl
) -> None:
    mark = tmp_path / "executed"
    (tmp_path / "payload").write_bytes(pickled_record(mark))
    with hostile_server(tmp_path, {"run": "done"}) as url:
        environment = {
            **earl.environment,
            "PREFECT_API_URL": url,
            "PREFECT_HOME": str(tmp_path / "home"),
            "PREFECT_LOCAL_STORAGE_PATH": str(tmp_path),
        }
        shown = subprocess.run(
            [sys.executable, "-c", ROUTES, tmp_path, url],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    found = dict(line.split() for line in shown.stdout.splitlines())
    assert len(found) == 15, shown.stderr
    assert set(found.values()) == {"EarlError"}, found
    assert not mark.exists()
