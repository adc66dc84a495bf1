"""What a worker says reaches logs and errors without the secrets that are known."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.errors import WorkerCallFailed
from earl_core.cluster.rank_process import WorkerContext
from earl_core.secrets import resolve
from tests.cluster.conftest import HERE, MakeGroup

SITE: dict[str, Any] = {"stage": "rollout", "iteration": 0, "deadline_seconds": 300}
INHERITED = "sesame/open up"


class Talker:
    """Says what it should not in every way it has."""

    def __init__(self, context: WorkerContext, deployment: dict[str, Any]) -> None:
        pass

    def talk(self, reference: str) -> None:
        own = resolve(reference)
        for secret in (own, os.environ["DOOR_PASSWORD"]):
            print(f"printed {secret}")
            logging.getLogger("talker").error("logged %s", secret)
        os.write(1, f"written {INHERITED}\n".encode())
        raise ValueError(f"raised {own} and {INHERITED}")


@HERE
def test_logs_and_errors_of_workers_hold_no_secrets(
    make_group: MakeGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_text("read by the worker")
    own.chmod(0o600)
    monkeypatch.setenv("DOOR_PASSWORD", INHERITED)
    group = make_group(target=f"{__name__}:Talker")
    group.start({}, {})
    with pytest.raises(WorkerCallFailed) as caught:
        group.call("talk", reference=f"file:{own}", **SITE)
    error = caught.value
    assert error.raised.message == "raised (hidden) and (hidden)"
    assert "written (hidden)" in str(error)
    for text in (str(error), error.raised.traceback, repr(error.args)):
        assert INHERITED not in text
        assert "read by the worker" not in text
    log = tmp_path / "logs" / "w-0.log"
    stored = log.read_text()
    assert "printed (hidden)" in stored
    assert "logged (hidden)" in stored
    # What is not Python's passes; therefore only the owner may read the file.
    assert stored.count(INHERITED) == 1
    assert "read by the worker" not in stored
    assert log.stat().st_mode & 0o777 == 0o600
