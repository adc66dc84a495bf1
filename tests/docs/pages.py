"""The pages' code: Python files and settings, and commands, which are run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"((?:^<!-- [^\n]* -->\n)*)^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TESTED = "<!-- tested -->"
_NOTE = re.compile(r"<!-- (shows|Ctrl-C after): (.*) -->")
_FILE = re.compile(r"# ([\w/.]+\.(?:py|yaml))\b")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block."""
    return [(language, text) for _, language, text in BLOCK.findall(page.read_text())]


class Page:
    """A page's Python files, written to a directory that is on the path, and its settings."""

    def __init__(self, name: str, directory: Path) -> None:
        self.settings: dict[str, Any] = {}
        self.snippets: list[str] = []
        for language, text in blocks(DOCS / "how-to" / name):
            if language == "yaml":
                self.settings |= yaml.safe_load(text)
            if language == "python" and not write_file(text, directory):
                self.snippets.append(text)


def write_file(text: str, directory: Path) -> bool:
    """Write a block whose first line is a comment with a file's name; False where it is not."""
    file = _FILE.match(text)
    if file is not None:
        (directory / file[1]).parent.mkdir(parents=True, exist_ok=True)
        (directory / file[1]).write_text(text)
    return file is not None


@dataclass(frozen=True)
class Step:
    """A block of a tested page: a file, or commands.

    shows: what their output must contain. interrupt: Ctrl-C is pressed when it has this.
    """

    language: str
    text: str
    shows: tuple[str, ...] = ()
    interrupt: str | None = None


def tested_pages() -> list[str]:
    """Pages that say that their blocks are run, relative to docs/; the tutorial makes the model."""
    pages = [page for page in DOCS.rglob("*.md") if page.read_text().startswith(TESTED)]
    names = [page.relative_to(DOCS).as_posix() for page in pages]
    return sorted(names, key=lambda name: (name != "tutorial.md", name))


def steps(name: str) -> list[Step]:
    """The blocks of a tested page, in order."""
    found = []
    for notes, language, text in BLOCK.findall((DOCS / name).read_text()):
        told = _NOTE.findall(notes)
        shows = tuple(words for kind, words in told if kind == "shows")
        interrupt = next((words for kind, words in told if kind == "Ctrl-C after"), None)
        found.append(Step(language, text, shows, interrupt))
    return [step for step in found if step.language in ("bash", "yaml", "python")]


class Reader:
    """Somebody who does what a page says, in one directory."""

    def __init__(self, directory: Path, environment: dict[str, str], seconds: float) -> None:
        self.directory = directory
        self._deadline = time.monotonic() + seconds
        programs = directory / ".programs"
        programs.mkdir(exist_ok=True)
        for name, module in (("earl", "-m flows.cli"), ("pytest", "-m pytest"), ("python", "")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
            program.chmod(0o755)
        path = f"{programs}:{os.environ['PATH']}"
        self._environment = {**environment, "PATH": path, "PYTHONPATH": str(ROOT)}

    def follow(self, step: Step) -> str:
        """Do what a block says; returns what it printed."""
        if step.language != "bash":
            write_file(step.text, self.directory)
            return ""
        output = self.directory / ".output"
        with output.open("w") as file:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", step.text],
                cwd=self.directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._await(shell, output, step)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGTERM)
                shell.wait(30)
        said = output.read_text()
        for words in step.shows:
            assert words in said, f"{step.text}\nshows no {words!r}, but\n{said}"
        return said

    def _await(self, shell: subprocess.Popen[bytes], output: Path, step: Step) -> None:
        pressed = False
        while shell.poll() is None:
            assert time.monotonic() < self._deadline, f"{step.text}\n{output.read_text()}"
            if step.interrupt and not pressed and step.interrupt in output.read_text():
                os.killpg(shell.pid, signal.SIGINT)
                pressed = True
            try:
                shell.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        assert pressed == (step.interrupt is not None), output.read_text()
        assert pressed or shell.returncode == 0, f"{step.text}\n{output.read_text()}"
