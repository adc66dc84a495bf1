"""The commands of the pages that say so, run in order, in one directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import fsspec
import pytest

from tests.docs.pages import DOCS, Reader, steps, tested_pages


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reader")


@pytest.fixture
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page on S3 wants: a bucket, and credentials in the environment."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": request.getfixturevalue("s3_server"),
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("earl-shards")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        # What it runs one by one is run by other tests.
        pytest.param(name, marks=pytest.mark.campaign) if name == "tutorial.md" else name
        for name in tested_pages()
    ],
)
def test_a_page_does_what_it_says(
    name: str, directory: Path, request: pytest.FixtureRequest
) -> None:
    if name == "how-to/s3.md":
        request.getfixturevalue("bucket")
        # Its run looks for the recipe's model, which takes a minute to make and no other test.
        made = directory / "models" / "tictactoe_tiny"
        if not made.exists():
            shutil.copytree(request.getfixturevalue("tiny_model"), made)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    reader = Reader(directory, {**kept, "NO_PROXY": "127.0.0.1"}, seconds=800)
    for step in steps(name):
        reader.follow(step)


def test_tested_pages_have_commands() -> None:
    assert "tutorial.md" in tested_pages()
    for name in tested_pages():
        assert any(step.language == "bash" for step in steps(name)), DOCS / name
