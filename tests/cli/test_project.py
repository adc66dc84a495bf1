"""`earl init`: what it writes runs, and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.conftest import Earl


def test_the_tests_of_a_new_project_pass(fresh_earl: Earl) -> None:
    made = fresh_earl.run("init", "guessing")
    assert made.returncode == 0, made.stderr
    project = fresh_earl.directory / "guessing"
    for written in ("guessing/guess.py", "guessing/rewards.py", "run.yaml", "README.md"):
        assert f"guessing/{written}" in made.stdout
        assert "my_game" not in (project / written).read_text()
    tested = subprocess.run(
        [sys.executable, "-m", "pytest"],
        cwd=project,
        env=fresh_earl.environment,
        capture_output=True,
        text=True,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.slow
def test_a_new_project_trains(earl: Earl) -> None:
    """With a directory that is there and empty, and a model of some thousand parameters."""
    project = earl.directory / "trained"
    project.mkdir()
    assert earl.run("init", str(project)).returncode == 0
    settings = earl.settings(rollout__group_size="8")
    done = subprocess.run(
        earl.command("train", "run.yaml", "--plain", *settings),
        cwd=project,
        env=earl.environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project / "runs" / "trained" / "checkpoints" / "000001" / "STABLE").exists()
    assert "evaluation after 2 iterations" in done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my-game", "a package cannot be called 'my-game': call the directory my_game"),
        ("2048", "call the directory my_game"),
        ("class", "a package cannot be called 'class'"),
        ("json", "'json' is a name that Python, EARL or the project uses itself"),
        ("flows", "uses itself: call the directory something else"),
        ("tests", "uses itself"),
        ("numpy", "the name of a module that is there already"),
        ("full", "full is there and not empty: name another directory"),
        ("file", "file is there and not empty"),
        ("file/game", "file/game cannot be made: Not a directory: name another directory"),
    ],
)
def test_what_cannot_become_a_project_is_refused(fresh_earl: Earl, name: str, words: str) -> None:
    (fresh_earl.directory / "full").mkdir()
    (fresh_earl.directory / "full" / "notes.txt").touch()
    (fresh_earl.directory / "file").touch()
    before = sorted(fresh_earl.directory.rglob("*"))
    refused = fresh_earl.run("init", name)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert sorted(fresh_earl.directory.rglob("*")) == before
