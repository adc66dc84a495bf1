"""What no episode sees of the host: tasks with their tests, their history, and secrets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from earl_core.environments.task_directories.task import FORMS
from earl_core.system.errors import ConfigError
from earl_core.system.private_paths import private_paths


def hidden_paths(path: Path, needed: Sequence[str]) -> list[str]:
    """The folder of the tasks, wherever links in it lead, or each task where the agent lies among
    them, the histories of their repositories, and files of secrets.

    needed: paths of the host that the agent needs. Raises `ConfigError` where one is hidden.
    """
    whole = os.path.realpath(path)
    single = any((path / form).exists() for form in FORMS)
    inner = [] if single else sorted(path.iterdir())
    # Also those that are not played: they may be held out.
    tasks = {whole} if single else {os.path.realpath(each) for each in inner if _is_task(each)}
    secret = private_paths()
    for folders, what, remedy in (
        (tasks, "the task directory {}, whose tests", "move it out"),
        (secret, "{}, whose secrets", "move it out, choose another runs_directory"),
    ):
        for folder in sorted(folders):
            if _holds(folder, needed):
                raise ConfigError(
                    f"the agent, or the folder of the run, lies in {what.format(repr(folder))} it "
                    "must not see",
                    remedy=f"{remedy}, or begin the run in another folder",
                )
    if not _holds(whole, needed):
        tasks.add(whole)
    return sorted({*tasks, *_histories(tasks | {whole}), *secret})


def _is_task(folder: Path) -> bool:
    return any((folder / each).exists() for each in (*FORMS, "instruction.md", "tests"))


def _holds(folder: str, needed: Sequence[str]) -> bool:
    return any(each == folder or each.startswith(f"{folder}/") for each in needed)


def _histories(folders: Iterable[str]) -> set[str]:
    """Folders of git's that have versions of what lies in these."""
    found = set()
    for above in {above for each in folders for above in (Path(each), *Path(each).parents)}:
        git = above / ".git"
        if git.is_file():
            # Of a work tree or a submodule: it names the place, which may name another.
            named = _text(git).partition("gitdir:")[2].strip()
            git = above / named
            found.add(os.path.realpath(git / (_text(git / "commondir").strip() or ".")))
        if git.is_dir():
            found.add(os.path.realpath(git))
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
