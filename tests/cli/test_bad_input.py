"""Wrong input: one clear block on stderr, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from earl_core.run.lock import RunLock
from tests.cli.conftest import CONFIG, Earl

NOTHING: dict[str, str] = {}


def train(earl: Earl, **changes: str) -> tuple[int, str]:
    shown = earl.run("train", str(CONFIG), *earl.settings(**changes))
    return shown.returncode, shown.stderr


def is_one_block(text: str) -> bool:
    return text.startswith("error: ") and text.count("error: ") == 1 and "Traceback" not in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout__temprature": "1"}, ["rollout.temprature", "unknown key", "`temperature`"]),
        ({"environment": "{agent: 'ghost:run'}"}, ["the agent 'ghost:run'", "imported"]),
        ({"environment": "{agent: ghost}"}, ["no agent 'ghost'", "verifiers"]),
        ({"reward__functions": "[{function: 'ghost:score'}]"}, ["'ghost:score'", "imported"]),
        ({"rollout__group_size": "1"}, ["group_size must be at least 2", "reinforce"]),
        ({"rollout__top_p": "0.9"}, ["top_p must stay 1.0"]),
        ({"rollout__max_turns": "zero"}, ["rollout.max_turns"]),
        ({"environment__name": "tictactoe"}, ["no environment 'tictactoe'", "tic_tac_toe"]),
        ({"environment__options__opponent": "nobody"}, ["opponent"]),
        ({"model__path": "nowhere", "model__builder": "null"}, ["nowhere", "model.builder"]),
        ({"model__chat_template": "gone.jinja"}, ["gone.jinja", "not a file"]),
        ({"name": "a/b"}, ["cannot be a directory"]),
        ({"algorithm__advantage": "magic"}, ["magic"]),
        ({"update__max_tokens_per_microbatch": "1"}, ["max_tokens_per_microbatch", "raise"]),
    ],
)
def test_wrong_settings(fresh_earl: Earl, changes: dict[str, str], words: list[str]) -> None:
    code, text = train(fresh_earl, **changes)
    assert code == 2
    assert is_one_block(text), text
    assert all(word in text for word in words), text
    assert list(fresh_earl.directory.iterdir()) == [], "nothing was begun"


def test_an_override_without_a_value(fresh_earl: Earl) -> None:
    shown = fresh_earl.run("train", str(CONFIG), "--set", "rollout.group_size")
    assert shown.returncode == 2
    assert "a.b=c" in shown.stderr
    assert is_one_block(shown.stderr)


@pytest.mark.parametrize("content", [None, "name: [", "- a list"])
def test_an_unusable_run_file(fresh_earl: Earl, content: str | None) -> None:
    file = fresh_earl.directory / "run.yaml"
    if content is not None:
        file.write_text(content)
    shown = fresh_earl.run("train", str(file))
    assert shown.returncode == 2
    assert is_one_block(shown.stderr)
    assert "run.yaml" in shown.stderr


def test_a_run_in_use(fresh_earl: Earl) -> None:
    run = fresh_earl.directory / "runs" / "tictactoe_tiny"
    run.mkdir(parents=True)
    lock = RunLock(run)
    try:
        code, text = train(fresh_earl)
    finally:
        lock.release()
    assert code == 1
    assert is_one_block(text)
    assert "in use by process" in text
    assert "--name" in text


@pytest.mark.parametrize("command", ["resume", "evaluate", "play"])
def test_a_run_that_is_not_there(fresh_earl: Earl, command: str) -> None:
    shown = fresh_earl.run(command, "nothing")
    assert shown.returncode == 2
    assert is_one_block(shown.stderr)
    assert "no run 'nothing'" in shown.stderr


def test_a_run_without_that_checkpoint(fresh_earl: Earl) -> None:
    run = fresh_earl.directory / "runs" / "young"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG.read_text())
    for which in ("last", "7", "best"):
        shown = fresh_earl.run("evaluate", "young", "--checkpoint", which)
        assert shown.returncode == 2
        assert is_one_block(shown.stderr)
        assert "none yet" in shown.stderr


def test_a_prefect_server_that_does_not_answer(fresh_earl: Earl) -> None:
    fresh_earl.environment["PREFECT_API_URL"] = "http://127.0.0.1:9/api"
    code, text = train(fresh_earl)
    assert code == 1
    assert is_one_block(text)
    assert "PREFECT_API_URL=http://127.0.0.1:9/api" in text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, ["ghost"]),
        (
            "class Ghost:\n    reset = step = close = print\n\n"
            "    def __init__(self):\n        raise OSError('no spirit')\n",
            ["no spirit"],
        ),
    ],
)
def test_an_environment_of_ones_own_that_cannot_work(
    earl: Earl,
    source: str | None,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(earl.environment, "TMPDIR", str(tmp_path))
    module = Path(earl.directory) / "ghost.py"
    if source is not None:
        module.write_text(source)
    try:
        code, text = train(
            earl, name="haunted", environment__name="ghost:Ghost", environment__options="{}"
        )
    finally:
        module.unlink(missing_ok=True)
    assert code == 2
    assert is_one_block(text), text
    assert all(word in text for word in words), text
    assert not list(tmp_path.glob("earl-*"))


def test_debug_shows_the_traceback(fresh_earl: Earl) -> None:
    shown = fresh_earl.run("train", "gone.yaml", "--debug")
    assert shown.returncode == 2
    assert "Traceback" in shown.stderr
    assert shown.stderr.rstrip().splitlines()[-1].startswith("error: ")
