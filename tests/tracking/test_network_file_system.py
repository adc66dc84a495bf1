"""SQLite databases on file systems of the network."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from earl_core.config import ConfigError, load_config
from flows.server import configure
from tasks.tracking.mlflow_client import check_tracker

Mount = namedtuple("Mount", ("mountpoint", "fstype"))


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Looks like an NFS mount with a local disk below it."""
    folder = tmp_path / "shared"
    (folder / "disk").mkdir(parents=True)
    mounts = [Mount("/", "ext4"), Mount(str(folder), "nfs4"), Mount(str(folder / "disk"), "xfs")]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    monkeypatch.setenv("PREFECT_HOME", str(folder / "prefect"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with patch.dict(os.environ):  # what `configure` sets is for this test alone
        yield folder


def test_databases_there_are_refused_with_what_to_do(shared: Path) -> None:
    config = load_config("tictactoe_tiny", [f"runs_directory={shared / 'runs'}"])
    with pytest.raises(ConfigError, match=r"mlflow\.db .*nfs4.*start an MLflow server"):
        check_tracker(config)
    with pytest.raises(ConfigError, match=r"prefect\.db .*nfs4.*set PREFECT_HOME"):
        configure(shared / "runs")


def test_servers_and_local_disks_are_not(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = f"runs_directory={shared / 'runs'}"
    check_tracker(load_config("tictactoe_tiny", [runs, "tracking.enabled=false"]))
    check_tracker(load_config("tictactoe_tiny", [runs, "tracking.uri=http://127.0.0.1:5000"]))
    check_tracker(load_config("tictactoe_tiny", [f"runs_directory={shared / 'disk' / 'runs'}"]))
    monkeypatch.setenv("PREFECT_HOME", str(shared / "disk" / "prefect"))
    configure(shared / "runs")
