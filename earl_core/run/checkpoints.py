"""The checkpoints of a run as files: description, markers, holding, removal, leftovers of a kill.

`state.json` describes a checkpoint: every file of it with size and checksum, every parameter with
its shape, and what the caller stored. It has a digest of its own. No torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import xxhash

from earl_core.config import ConfigError
from earl_core.dispatch.shards.manifest import Manifest, ManifestError, read_manifest
from earl_core.run.policy_versions import INITIAL_VERSION, PolicyVersions
from earl_core.system.errors import NotOurs
from earl_core.system.files import canonical_json, is_regular, read_file, sync
from earl_core.tensors.errors import CheckpointError

MARKER = "STABLE"

HANDOFFS = "handoff"
"""The folder of a run directory through which live learners are rebuilt."""

_UNFINISHED = re.compile(r"\.[0-9]+\.(building|retired|removed)")
_ASIDE = re.compile(r"\..+\.[0-9]+\.[0-9]+\.tmp")


def stable_checkpoints(run_directory: Path) -> list[int]:
    """Iterations whose checkpoint is whole, ascending. A marker is a file, nothing else."""
    found = (run_directory / "checkpoints").glob(f"*/{MARKER}")
    return sorted(
        int(path.parent.name)
        for path in found
        if re.fullmatch("[0-9]+", path.parent.name) and is_regular(path)
    )


def best_evaluated(run_directory: Path, returns: Mapping[int, float | None]) -> int | None:
    """The whole checkpoint of highest return, the last of equals; None where none was evaluated.
    returns: of evaluations by policy version."""
    versions = PolicyVersions(run_directory)
    held = {versions.update(each).made: each for each in stable_checkpoints(run_directory)}
    scored = [
        (mean, version) for version, mean in returns.items() if mean is not None and version in held
    ]
    return held[max(scored)[1]] if scored else None


def evaluated(run_directory: Path) -> list[Manifest]:
    """The sealed evaluations of a run, by ascending policy version; damaged ones are left out."""
    found: list[Manifest] = []
    for sealed in sorted((run_directory / "iterations").glob("*/evaluation.json")):
        with suppress(ManifestError):
            found.append(read_manifest(sealed))
    return found


def gated_returns(evaluations: Iterable[Manifest], gates: Sequence[str]) -> dict[int, float | None]:
    """The mean returns of evaluations by policy version, without those that a gate keeps out.

    gates: labels of suites, in which no fewer prompts may pass at the first attempt than the 95 %
    interval of policy version 0 allows. All are kept out by a gate of which that is not known.
    """
    found = {each.policy_version: each.metrics for each in evaluations}
    first = found.get(INITIAL_VERSION, {})
    least = {label: first.get(f"suite/{label}/pass_at_1/low", math.inf) for label in gates}
    return {
        version: metrics.get("return/mean")
        for version, metrics in found.items()
        if all(
            metrics.get(f"suite/{label}/pass_at_1", -math.inf) >= low
            for label, low in least.items()
        )
    }


def unmeasured_gates(evaluations: Iterable[Manifest], gates: Sequence[str]) -> list[str]:
    """Those of the gates of which nobody knows what policy version 0 passed."""
    first = [each.metrics for each in evaluations if each.policy_version == INITIAL_VERSION]
    return [
        label
        for label in gates
        if not any(f"suite/{label}/pass_at_1/low" in metrics for metrics in first)
    ]


def best_checkpoint(run_directory: Path, gates: Sequence[str]) -> int:
    """The whole checkpoint that was evaluated best. gates: as of `gated_returns`. Raises
    `ConfigError` where none was evaluated, or none passes the gates."""
    evaluations = evaluated(run_directory)
    found = best_evaluated(run_directory, gated_returns(evaluations, gates))
    if found is not None:
        return found
    another = "take the `last` one, or the number of one"
    if best_evaluated(run_directory, gated_returns(evaluations, ())) is None:
        raise ConfigError(
            f"no checkpoint of {run_directory} was evaluated: take the `last` one, or evaluate "
            "inside the training with evaluation.every"
        )
    if unknown := unmeasured_gates(evaluations, gates):
        raise ConfigError(
            f"{run_directory} has no evaluation (any more) of the first policy in the gated suites "
            f"{', '.join(unknown)}, so no checkpoint passes: {another}"
        )
    raise ConfigError(
        f"every evaluated checkpoint of {run_directory} falls behind the first policy in one "
        f"of the gated suites {', '.join(gates)}: {another}"
    )


def best_to_keep(
    run_directory: Path, evaluations: Sequence[Manifest], gates: Sequence[str]
) -> int | None:
    """The whole checkpoint that was evaluated best, None without one. gates: as of
    `gated_returns`; none counts while the first policy's evaluation, which may be put back, lacks.
    """
    known = () if unmeasured_gates(evaluations, gates) else gates
    return best_evaluated(run_directory, gated_returns(evaluations, known))


@contextmanager
def holding_checkpoint(marker: Path) -> Iterator[None]:
    """Keep a checkpoint from being pruned, by any process, while it is read. marker: its STABLE
    file. Raises `ConfigError` when it is gone already."""
    gone = ConfigError(
        f"the checkpoint {marker.parent} was removed just now, for the run goes on: name a later "
        "one, or keep more of them with checkpoint.keep_last"
    )
    try:
        descriptor = os.open(marker, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise gone from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            there = os.path.samestat(os.stat(marker), os.fstat(descriptor))
        except (BlockingIOError, FileNotFoundError):
            there = False
        if not there:
            # Removed since it was opened.
            raise gone
        yield
    finally:
        os.close(descriptor)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint unless somebody holds it. It is renamed first, so that a kill in the
    middle leaves what `remove_leftovers` knows."""
    descriptor = os.open(path / MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        aside = path.with_name(f".{path.name}.removed")
        os.rename(path, aside)
        sync(path.parent)
        shutil.rmtree(aside, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)


def remove_leftovers(run_directory: Path) -> None:
    """Remove what killed processes left in a run directory: checkpoints half written or half
    removed, states of learners that have ended with them, and files not yet renamed into place.
    Only by whoever holds the run's lock."""
    shutil.rmtree(run_directory / HANDOFFS, ignore_errors=True)
    for path in (run_directory / "checkpoints").glob(".*"):
        if _UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
    for folder in (".", "iterations/*", "checkpoints/*", "weights"):
        for path in run_directory.glob(f"{folder}/.*.tmp"):
            if _ASIDE.fullmatch(path.name) and is_regular(path):
                path.unlink(missing_ok=True)


FORMAT = "earl-training-state-2"

DESCRIPTION = "state.json"

_NOT_LISTED = (DESCRIPTION, MARKER)

CRITIC_FOLDER = "critic"
"""The folder of a checkpoint that holds the critic's training state, which is described apart."""

_APART = re.compile(rf"{CRITIC_FOLDER}|\.{CRITIC_FOLDER}\..*")
"""That, and what a process that was killed has left of one."""


BESIDE = "beside"
"""In the update's state: the other roles whose states its checkpoint has."""


def state_path(checkpoint: Path, role: str) -> Path:
    """Where a checkpoint has the training state of a role that trains a model."""
    return checkpoint / CRITIC_FOLDER if role == "critic" else checkpoint


def check_state(checkpoint: Path, role: str) -> Path:
    """`state_path`, which must be there. Raises `ConfigError`."""
    path = state_path(checkpoint, role)
    if not path.is_dir():
        raise ConfigError(
            f"the checkpoint {checkpoint} has no state of the {role}, which the run was without "
            "then: take the settings back, or begin a new run from it (model.from)"
        )
    return path


def describe_state(
    directory: Path,
    state: Mapping[str, Any],
    parameters: Mapping[str, list[int]],
    known: Mapping[str, str] | None = None,
) -> None:
    """Write `state.json` about all files that lie in the directory; call it last.

    state: JSON-able things of the caller. parameters: shapes by name. known: checksums of files,
    by name, which need not be read again.
    """
    known = known or {}
    files = {
        name: {
            "bytes": (directory / name).stat().st_size,
            "xxh3": known.get(name) or file_checksum(directory / name),
        }
        for name in sorted(_files_in(directory))
    }
    content = {"format": FORMAT, "state": state, "parameters": parameters, "files": files}
    content["digest"] = _digest(content)
    (directory / DESCRIPTION).write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_state(directory: Path) -> dict[str, Any]:
    """The content of `state.json`: state, parameters, files. Checks it, and that the files it
    lists are there at full size and no others; their bytes are `verify_files`'s.

    Raises `CheckpointError`.
    """
    content = _content(directory)
    found = _files_in(directory)
    for name in sorted(content["files"].keys() | found.keys()):
        listed = content["files"].get(name)
        if listed is None:
            raise _damaged(directory, f"{name} is not among the files that were written")
        if found.get(name) != listed["bytes"]:
            raise _damaged(directory, f"{name} is missing or not what was written")
    return content


def verify_files(directory: Path, files: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Compare files with the checksums of `read_state`; raises `CheckpointError`."""
    for name, listed in files:
        if file_checksum(directory / name) != listed["xxh3"]:
            raise _damaged(directory, f"{name} is missing or not what was written")


def verify_training_state(directory: Path) -> dict[str, Any]:
    """Check sizes and checksums of all files; returns the caller's `state`. Raises
    `CheckpointError` for a missing, damaged, foreign or additional file."""
    content = read_state(directory)
    verify_files(directory, content["files"].items())
    return cast(dict[str, Any], content["state"])


def verify_checkpoint(run_directory: Path, iteration: int) -> dict[str, Any]:
    """`verify_training_state` of the checkpoint of an iteration, which must be that iteration's,
    and of the critic's state in it."""
    directory = run_directory / "checkpoints" / f"{iteration:06d}"
    state, critic = verify_training_state(directory), state_path(directory, "critic")
    states = {directory: state}
    if critic.is_dir():
        states[critic] = verify_training_state(critic)
    elif "critic" in state.get(BESIDE, ()):
        raise _damaged(directory, f"its folder {CRITIC_FOLDER} is missing")
    made = PolicyVersions(run_directory).update(iteration).made
    for place, each in states.items():
        if (held := each.get("policy_version")) != made:
            raise _damaged(place, f"it holds policy version {held}, not {made}")
    return state


def _content(directory: Path) -> dict[str, Any]:
    path = directory / DESCRIPTION
    try:
        content = json.loads(read_file(path))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} is no complete checkpoint: it has no {DESCRIPTION}."
        ) from error
    except (NotOurs, NotADirectoryError, ValueError) as error:
        raise _damaged(directory, f"{DESCRIPTION} cannot be read ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{directory} is no training state of format {FORMAT}.")
    if content.pop("digest", None) != _digest(content):
        raise _damaged(directory, f"{DESCRIPTION} is not what was written")
    return content


def _files_in(directory: Path) -> dict[str, int]:
    """Sizes in bytes of all files, by path; -1 for what is no regular file, such as a link."""
    found = {}
    # A folder that cannot be listed is not an empty one.
    for folder, folders, names in os.walk(directory, onerror=_refuse):
        if Path(folder) == directory:
            folders[:] = [name for name in folders if not _APART.fullmatch(name)]
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in [*names, *links]:
            path = Path(folder) / name
            found[path.relative_to(directory).as_posix()] = (
                path.stat().st_size if is_regular(path) else -1
            )
    return {name: size for name, size in found.items() if name not in _NOT_LISTED}


def _refuse(error: OSError) -> None:
    raise error


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(canonical_json(content))


def file_checksum(path: Path) -> str:
    """xxh3_128 over a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _damaged(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint {directory} is damaged: {what}.")
