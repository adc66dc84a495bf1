"""What the site has besides the files of docs/: pages of other folders, and a generated one.

Pages link to each other as files of the repository do. Links to files that the site has not become
their text and the file's path, because a site cannot know where the repository is read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from flows.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
COMMAND_LINE = "reference/command-line.md"
_LINK = re.compile(r"(?<!!)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)


def outside() -> dict[str, Path]:
    """Pages of other folders: where the site has them, and their files."""
    results = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    examples = sorted((ROOT / "examples").glob("**/README.md"))
    files = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md"]
    return {file.relative_to(ROOT).as_posix(): file for file in (*files, *examples, *results)}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the examples and the benchmarks' results to the navigation."""
    examples: list[Any] = next(each["Examples"] for each in config.nav if "Examples" in each)
    examples += [
        name for name in outside() if name.startswith("examples/") and name not in examples
    ]
    results = [name for name in outside() if name.startswith("benchmarks/results/")]
    benchmarks: list[Any] = next(each["Benchmarks"] for each in config.nav if "Benchmarks" in each)
    benchmarks += [name for name in results if name not in benchmarks]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    for name, path in outside().items():
        files.append(File.generated(config, name, content=path.read_text()))
    for picture in sorted((ROOT / "examples").glob("*/*.svg")):
        name = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, content=picture.read_text()))
    files.append(File.generated(config, COMMAND_LINE, content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between pages."""
    here = _in_repository(page.file.src_uri)

    def turned(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        path = os.path.normpath(os.path.join(os.path.dirname(here), target))
        uri = _on_site(path)
        if uri is not None and files.get_file_from_path(uri) is not None:
            relative = os.path.relpath(uri, os.path.dirname(page.file.src_uri) or ".")
            return f"[{text}]({relative}{anchor})"
        return f"{text} (`{path}`)" if (ROOT / path).exists() else found[0]

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(turned, part) for part in parts)


def command_line() -> str:
    """The page of the commands, from what `earl --help` shows."""
    command: Any = typer.main.get_command(app)
    context = typer.Context(command, info_name="earl")
    return get_docs_for_click(obj=command, ctx=context, name="earl", title="Command line")


def _in_repository(uri: str) -> str:
    return uri if uri in outside() else f"docs/{uri}"


def _on_site(path: str) -> str | None:
    if path == "examples":
        return "examples/README.md"
    if path == "benchmarks/results":
        return "benchmarks/README.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path in outside() else None
