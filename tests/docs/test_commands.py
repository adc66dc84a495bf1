"""Commands and options that pages name exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from flows.cli.app import app
from tests.docs.pages import DOCS, ROOT

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / ".github").rglob("*.yml")),
]
_GONE = {"CHANGELOG.md"}
"""It names commands that there were."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page: Path) -> None:
    if page.name in _GONE:
        return
    wrong = [line for line in _commands(page.read_text()) if not _known(line)]
    assert wrong == []


def test_pages_name_commands() -> None:
    assert len(_commands((ROOT / "AGENTS.md").read_text())) > 15
    assert not _known("earl trian x")
    assert not _known("earl train x --quite")
    assert _known("earl shards list --directory x")
    assert _known("earl config schema > file")


def _commands(text: str) -> list[str]:
    """Those in code spans, and the lines of blocks that begin with one."""
    spans = re.findall(r"`(earl [^`]+)`", text)
    lines = re.findall(r"^(?:\.venv/bin/)?(earl [a-z].*)$", text, re.MULTILINE)
    return [re.sub(r"\s+", " ", each) for each in (*spans, *lines)]


def _known(line: str) -> bool:
    """Whether the words up to the first that is no command, and all long options, exist."""
    words = re.split(r"\s+(?:#|\||>|&&|;)", line)[0].split()[1:]
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0).rstrip(",.:")
        if re.search(r"\W|[A-Z]", name):
            return True  # a placeholder, or several at once
        found = command.commands.get(name)
        if found is None:
            return False
        command = found
    options = {option for each in command.params for option in each.opts}
    given = {word.split("=")[0].rstrip(",.)") for word in words if word.startswith("--")}
    return given <= options | {"--help", "--install-completion"}
