"""A run whose environment has a secret: it is used, found again by a resume, and stored nowhere."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.flows.runs import Runs

SECRET = "sesame, open up"


def holding(directory: Path) -> set[str]:
    """Files in which the secret stands."""
    found = set()
    for path in directory.rglob("*"):
        # The server is still running, and removes files of its own.
        with suppress(FileNotFoundError):
            if path.is_file() and SECRET.encode() in path.read_bytes():
                found.add(path.name)
    return found


@pytest.mark.slow
def test_a_secret_is_used_and_stored_nowhere(runs: Runs) -> None:
    kept = runs.directory / "kept" / "key"
    kept.parent.mkdir()
    kept.write_text(SECRET)
    kept.chmod(0o600)
    settings = (
        "environment.name=tests.rollout.environments:LockedGame",
        f"environment.options={{key: 'file:{kept}'}}",
        "rollout.max_failed_share=1.0",
        "tracking.enabled=true",
        f"tracking.uri=sqlite:///{runs.directory / 'runs' / 'mlflow.db'}",
    )
    # The server's own home is beside; its database holds parameters, logs and artifacts.
    home = Path(runs.environment["PREFECT_HOME"])
    runs.train("iterations=1", *settings)
    runs.train("iterations=2", *settings)
    assert [line["iteration"] for line in runs.metrics()] == [0, 1]
    logs = [path.read_text() for path in (runs.run() / "logs").rglob("*") if path.is_file()]
    assert any("opened with (hidden)" in text for text in logs)
    assert holding(runs.directory) == {"key"}
    assert holding(home) == set()
    stored = (runs.run() / "config.yaml").read_text()
    assert f"key: file:{kept}" in stored
    assert runs.run().stat().st_mode & 0o777 == 0o700
    top = ("config.yaml", "run.json", "*.jsonl", "iterations/*/*.json", "logs/*/*.log")
    private = [path for pattern in top for path in runs.run().glob(pattern)]
    assert {path.stat().st_mode & 0o077 for path in private} == {0}
