"""`earl env check` in a directory of its own."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Earl

GAME = """
from earl_core.environments.base import StepResult

class Game:
    def __init__(self, broken=False):
        self.broken = broken
    def reset(self, prompt, seed):
        return [{"role": "user", "content": "?"}]
    def step(self, text):
        if self.broken:
            raise ValueError("not today")
        return StepResult([], float(len(text)), True, {"outcome": "end"})
    def close(self):
        pass
"""


def test_the_status_says_whether_something_breaks_training(fresh_earl: Earl) -> None:
    (fresh_earl.directory / "my_game.py").write_text(GAME)
    sound = fresh_earl.run("env", "check", "my_game:Game")
    assert sound.returncode == 0, sound.stdout + sound.stderr
    assert "0 findings break training" in sound.stdout
    broken = fresh_earl.run("env", "check", "my_game:Game", "--options", "{broken: true}")
    assert broken.returncode == 1
    assert "ValueError: not today" in broken.stdout
    assert "→ a model may say anything" in broken.stdout
    assert "Traceback" not in broken.stdout + broken.stderr


def test_the_environments_of_a_configuration_are_checked(fresh_earl: Earl) -> None:
    shown = fresh_earl.run("env", "check", "tictactoe_tiny", "--episodes", "3")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "outcomes:" in shown.stdout
    wrong = fresh_earl.run("env", "check", "tictactoe_tiny", "--options", "{}")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: --options and --python are for one environment")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gymnasum"], "no environment, run file or recipe: did you mean 'gymnasium'?"),
        (["gone.yaml"], "gone.yaml cannot be read"),
        (["prompt", "--options", "{api_key: hunter2}"], "api_key holds a secret"),
        (["prompt", "--options", "{path: .nan}"], "options: path is nan: give it a finite number"),
        (["prompt", "--options", "[path]"], "is no mapping"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    fresh_earl: Earl, arguments: list[str], words: str
) -> None:
    refused = fresh_earl.run("env", "check", *arguments)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert words in refused.stderr
