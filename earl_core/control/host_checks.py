"""Check, before a run begins, that its hosts agree on what they must have in common."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from earl_core.cluster.host import Host
from earl_core.cluster.host_view import HostView
from earl_core.config import ConfigError, RunConfig
from earl_core.system.files import existing

_VIEW = "earl_core.cluster.host_view:HostView"
_CLOCK_SECONDS = 5.0
_LEAST_SHARED_MEMORY = 1 << 30


class Disagreement(NamedTuple):
    """A difference between a host and this one. blocks: true when a run would fail, or compute
    something else."""

    host: str
    problem: str
    remedy: str
    blocks: bool = True


def check_agreement(config: RunConfig, hosts: Sequence[Host]) -> None:
    """Raise `ConfigError` when a host has not what the run needs of it."""
    found = [each for each in disagreements(config, hosts) if each.blocks]
    if found:
        told = "; ".join(f"host {each.host}: {each.problem}" for each in found[:4])
        raise ConfigError(told, remedy=found[0].remedy)


def disagreements(config: RunConfig, hosts: Sequence[Host]) -> list[Disagreement]:
    """Compare all hosts with the one that this process runs on; asked side by side."""
    asks = {host.name: ask for host in hosts if (ask := host.keep(_VIEW)) is not None}
    if not asks:
        return []
    here = HostView()
    with _left_for_others(config, here) as (folder, text), ThreadPoolExecutor(16) as pool:
        found = pool.map(
            lambda item: list(_of_host(config, here, folder, text, *item)), asks.items()
        )
        return [each for of_host in found for each in of_host]


@contextmanager
def _left_for_others(config: RunConfig, here: HostView) -> Iterator[tuple[Path, str]]:
    """A file in the folder of the runs, or in the nearest one above it, and what it says."""
    folder, text = existing(Path(config.runs_directory)).absolute(), uuid.uuid4().hex
    try:
        here.write(str(folder / f".{text}"), text)
        yield folder, text
    finally:
        for path in folder.glob(f".{text}*"):
            with suppress(OSError):
                path.unlink()


def _of_host(
    config: RunConfig,
    here: HostView,
    folder: Path,
    text: str,
    name: str,
    ask: Callable[..., Any],
) -> Iterator[Disagreement]:
    theirs = ask("versions")
    for package, version in here.versions().items():
        if theirs.get(package) != version:
            told = f"{package} is {theirs.get(package)}, and {version} here"
            yield Disagreement(name, told, "install the same versions on all hosts")
    shared = "use a file system that all hosts share"
    if not ask("reads", str(folder / f".{text}"), text):
        yield Disagreement(name, f"does not see what is written to {folder} here", shared)
    else:
        ask("write", str(folder / f".{text}-{name}"), name)
        if not here.reads(str(folder / f".{text}-{name}"), name):
            yield Disagreement(name, f"what it writes to {folder} is not seen here", shared)
    model = config.model.path
    if (Path(model) / "config.json").is_file() and ask("model", model) != here.model(model):
        remedy = "copy the model, or use a file system that all hosts share"
        yield Disagreement(name, f"has other files in {model}", remedy)
    before = time.time()
    ahead = ask("time") - (before + time.time()) / 2
    if abs(ahead) > _CLOCK_SECONDS:
        remedy = "let a time service set the clocks"
        told = f"its clock differs by {abs(ahead):.0f} s"
        yield Disagreement(name, told, remedy, blocks=False)
    if (free := ask("free_bytes", config.dispatch.directory)) < _LEAST_SHARED_MEMORY:
        told = f"has only {free / 2**20:.0f} MiB free for shards in {config.dispatch.directory}"
        yield Disagreement(name, told, "give it more shared memory", blocks=False)
