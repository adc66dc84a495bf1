"""A model of the model hub: downloaded once, before anything else of a run starts.

Runs in a process of its own, the only one of EARL's that may ask the hub. The files lie in
huggingface_hub's own cache, which other programs share; a link with the model's name points there
from the working directory, and keeps the revision.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from earl_core.models.progress import Progress, quiet, ticking
from earl_core.pretrained.model_directory import needed_files
from earl_core.system.errors import EarlError


def build(directory: Path, progress: Progress = quiet) -> None:
    """Download the model `org/name`, which is also the relative path of the link that is made.

    progress: told of the megabytes. Does nothing when there is a model already. Raises `EarlError`
    with what to do when the hub cannot be reached, has no such model, or refuses it to this user.
    """
    if (directory / "config.json").is_file():
        return
    snapshot = _download(directory.as_posix(), progress)
    if directory.is_symlink():
        directory.unlink()  # to a snapshot that was removed from the cache
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.symlink_to(snapshot, target_is_directory=True)
    except OSError as error:
        raise EarlError(
            f"{directory} cannot be made ({error.strerror}): move what is there out of the way, or "
            f"set model.path to {snapshot}, where the model lies now"
        ) from error


def _download(name: str, progress: Progress) -> Path:
    # Read when the library is imported, which this process has not done yet.
    os.environ["HF_HUB_OFFLINE"] = "0"
    os.environ.pop("TRANSFORMERS_OFFLINE", None)
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        found = HfApi().model_info(name, files_metadata=True)
        sizes = {item.rfilename: item.size or 0 for item in found.siblings or ()}
        files = needed_files([*sizes])
        blobs = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs")
        with _told(blobs, sum(sizes[file] for file in files), progress):
            return Path(snapshot_download(name, revision=found.sha, allow_patterns=files))
    except RepositoryNotFoundError as error:  # or one that wants a token
        raise EarlError(
            f"model.path {name!r} is no directory here, and the model hub gives this user no model "
            "of that name: correct model.path, or, where the model's licence must be accepted "
            "first, accept it there and set HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        why = f"answered with {error.response.status_code}"
    except Exception as error:  # of whichever HTTP library it uses
        why = f"cannot be reached: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    raise EarlError(
        f"model.path {name!r} is no directory here, and the model hub, from which a model of that "
        f"name would be downloaded, {why}. Set model.path to a directory with a model, or copy "
        f"the model into ./{name}"
    )


@contextmanager
def _told(blobs: Path, total: int, progress: Progress) -> Iterator[None]:
    """Tell once a second how much lies in a folder into which something is downloaded."""

    def tell() -> None:
        with suppress(OSError):
            there = sum(file.stat().st_size for file in blobs.glob("*"))
            progress({"MB_done": min(there, total) / 1e6, "MB": total / 1e6})

    tell()
    with ticking(tell):
        yield
