"""CONTRIBUTING says what is true of the packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT

CORE = ROOT / "earl_core"


def test_packages_import_only_those_above_them_in_the_table() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("Packages of `earl_core`")[2]
    order = re.findall(r"^\| `(\w+)/` \|", text.partition("\n## ")[0], re.MULTILINE)
    assert sorted(order) == sorted(
        path.name for path in CORE.iterdir() if path.is_dir() and path.name != "__pycache__"
    )
    below = {
        f"{package} imports {other}"
        for place, package in enumerate(order)
        for file in (CORE / package).rglob("*.py")
        for other in _imported(file)
        if other in order[place + 1 :]
    }
    assert below == set()


def test_named_files_and_their_parts_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:[\w.]+/)+\w+\.\w+)(?::(\w+))?", text))
    missing = []
    for name, part in sorted(named):
        file = next((at / name for at in (ROOT, CORE) if (at / name).is_file()), None)
        if file is None or (part and not re.search(rf"\b(def|class) {part}\b", file.read_text())):
            missing.append(f"{name}:{part}")
    assert missing == []
    assert len(named) > 50


def _imported(file: Path) -> Iterator[str]:
    """Packages of `earl_core` that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "earl_core" and len(parts) > 1:
                yield parts[1]
