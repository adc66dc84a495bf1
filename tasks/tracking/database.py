"""MLflow's SQLite database beside the runs: its file, and its first use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from earl_core.system.files import FileLock

LOCKED_SECONDS = 25.0
"""Seconds that other writers are waited for."""


def sqlite_path(uri: str) -> Path | None:
    """The database file of an SQLite URI, absolute; None for every other tracker."""
    scheme, separator, path = uri.partition(":///")
    if not separator or scheme.partition("+")[0] != "sqlite":
        return None
    return Path(path.partition("?")[0]).resolve()


def _begin(uri: str) -> None:
    """Make the tables of a new SQLite database where MLflow itself could not: it writes the working
    directory into an SQL statement, in which a path with both kinds of quotes is an error."""
    database = sqlite_path(uri)
    if database is None or database.stat().st_size or not {"'", '"'} <= set(str(Path.cwd())):
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    make: Any = SqlAlchemyStore
    make(uri, (database.parent / "mlartifacts").as_uri())


@contextmanager
def first_use(uri: str) -> Iterator[None]:
    """Let one process at a time open an SQLite database: MLflow's creation of it is no
    transaction, and two at once break each other."""
    database = sqlite_path(uri)
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    path = database.parent / f".{database.name}.lock"
    try:
        lock = FileLock(path, LOCKED_SECONDS)
    except BlockingIOError:
        raise TimeoutError(
            f"another process holds {path} for too long: end it, or remove the file if no run is "
            "starting"
        ) from None
    try:
        # What environments said stands in it; SQLite's other files take its mode.
        os.close(os.open(database, os.O_RDWR | os.O_CREAT, 0o600))
        _begin(uri)
        yield
    finally:
        lock.release()
