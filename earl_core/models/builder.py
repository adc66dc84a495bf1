"""Makes the initial model when `model.path` does not exist: in a worker."""

from __future__ import annotations

import fcntl
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from earl_core.config import ConfigError
from earl_core.models.foreseen import check_options
from earl_core.run.worker import RunWorker
from earl_core.secrets import resolve
from earl_core.system.import_path import import_object, refuse_library


class ModelBuilder(RunWorker):
    """The rank of the short-lived `model` worker group."""

    def build(self) -> dict[str, Any]:
        """Make the model directory; raises `ConfigError` when that cannot work."""
        model = self._config.model.made
        path, maker = Path(model.path), model.maker
        if maker is None:
            raise ConfigError(
                f"model.path {str(path)!r} is not a model directory (no config.json) and there is "
                "no model.builder that could make it: correct the path"
            )
        build = import_object(maker, "model.builder")
        try:
            # They are the builder's; the hub takes none.
            options = resolve(model.builder_options) if model.builder else {}
        except ConfigError as error:
            raise ConfigError(f"model.builder_options: {error}") from None
        signature = inspect.signature(build)
        check_options(signature, options, maker)
        if "progress" in signature.parameters:
            options = {"progress": self._context.report, **options}
        if "environments" in signature.parameters:
            given = [each.model_dump(mode="json") for each in self._config.played.values()]
            options = {"environments": given, **options}
        refuse_library(build, maker, "model.builder")
        with _alone(path):
            if not (path / "config.json").is_file():
                build(path, **options)
        if not (path / "config.json").is_file():
            raise ConfigError(f"model.builder {maker!r} made no model in {path}")
        return {"path": str(path)}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One run at a time makes a model; those that waited find it. Ends with the caller's deadline.
    The lock goes with its process, so that a killed run keeps nobody waiting."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
