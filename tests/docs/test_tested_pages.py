"""The commands of the pages that say so, run in order, each page in a directory of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Reader, steps, tested_pages


@pytest.mark.slow
@pytest.mark.parametrize("name", tested_pages())
def test_a_page_does_what_it_says(name: str, tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    reader = Reader(tmp_path, {**kept, "NO_PROXY": "127.0.0.1"}, seconds=550)
    for step in steps(name):
        reader.follow(step)


def test_tested_pages_have_commands() -> None:
    assert "tutorial.md" in tested_pages()
    for name in tested_pages():
        assert any(step.language == "bash" for step in steps(name)), DOCS / name
