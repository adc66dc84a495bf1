"""Files that hold secrets of a run: programs of its episodes are not to read them."""

from __future__ import annotations

import os
from collections.abc import Iterable

_NAME = "EARL_PRIVATE_PATHS"
_OF_HOME = (
    ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".netrc", ".git-credentials", ".pypirc",
    ".npmrc", ".config/gcloud", ".config/gh", ".config/huggingface", ".cache/huggingface/token",
    ".cache/huggingface/stored_tokens", ".local/state/earl",
)  # fmt: skip


def note_private(paths: Iterable[str]) -> None:
    """Have this process, and those that it begins, know of them."""
    os.environ[_NAME] = "\n".join(os.path.realpath(os.path.expanduser(p)) for p in paths)


def private_paths() -> list[str]:
    """Real paths of the files and folders that are known, and of those in the user's home where
    programs keep keys and passwords."""
    found = os.environ.get(_NAME, "").split("\n")
    found += [os.path.expanduser(f"~/{each}") for each in _OF_HOME]
    found.append(os.environ.get("PREFECT_HOME", ""))
    if state := os.environ.get("XDG_STATE_HOME"):
        found.append(f"{state}/earl")
    return sorted({os.path.realpath(each) for each in found if each and os.path.exists(each)})
