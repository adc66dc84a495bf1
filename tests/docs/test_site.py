"""The site builds without a warning and without a network, and no page's link is broken."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

_LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", "docs/site/mkdocs.yml", "-d", str(built)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def test_every_page_and_reference_is_there(site: Path) -> None:
    python = (site / "reference" / "python.html").read_text()
    for name in ("Environment", "Engine", "Batch", "ShardStore", "GroupRelative", "PPOClip"):
        assert re.search(rf'id="earl_core\.[\w.]+\.{name}"', python), name
    assert "earl shards sweep" in (site / "reference" / "command-line.html").read_text()
    results = {each.stem for each in (ROOT / "benchmarks" / "results").glob("*.md")}
    assert results == {each.stem for each in (site / "benchmarks" / "results").glob("*.html")}


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
    for page in site.rglob("*.html"):
        assert loaded.findall(page.read_text()) == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\"?https?:", style.read_text()), style


def test_links_between_files_of_the_repository() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    pages = [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]
    anchors = {page: _anchors(page.read_text()) for page in pages}
    broken = []
    for page in pages:
        for target in _LINK.findall(_CODE.sub("", page.read_text())):
            name, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = (page.parent / name).resolve() if name else page
            if not file.exists() or (anchor and anchor not in anchors.get(file, ())):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []
    assert len(pages) > 40


def _anchors(text: str) -> set[str]:
    """As forges and the site name the headings of a page."""
    bare = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", bare, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", t.lower()).strip().replace(" ", "-") for t in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))
