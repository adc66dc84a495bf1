"""An environment of verifiers, unchanged, in an interpreter that has it.

In one file, so that one installation serves all.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uv

from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway.play import play_agents
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.trajectory.samples import Episode, EpisodeSpec
from tests.flows.runs import LEARNING, REPOSITORY, Runs
from tests.foreign import foreign_python, package_sources
from tests.rollout.chat_models import CHATML, char_tokenizer
from tests.rollout.scripted import ScriptedEngine

pytestmark = pytest.mark.slow

DUEL = {"taskset": {"id": "cell_duel"}}
CHAT_LOOP = {"harness": {"id": "null"}}
"""verifiers' own chat program."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its packages want another openai than ours."""
    python = foreign_python(tmp_path_factory.mktemp("verifiers"), "verifiers==0.4.0")
    (packages,) = Path(python).parents[1].glob("lib/python*/site-packages")
    shutil.copy(REPOSITORY / "tests" / "environments" / "cell_duel.py", packages)
    return python


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of verifiers' own, and what it needs to install its programs there."""
    cached = subprocess.run([uv.find_uv_bin(), "cache", "dir"], capture_output=True, text=True)
    for name, value in {
        **package_sources(),
        # What it imports takes ten seconds to compile.
        "PYTHONDONTWRITEBYTECODE": "",
        "UV_CACHE_DIR": cached.stdout.strip(),
        "HOME": str(tmp_path),
        "PATH": f"{Path(uv.find_uv_bin()).parent}:{package_sources()['PATH']}",
    }.items():
        monkeypatch.setenv(name, value)


class Guessing(ScriptedEngine):
    """Who begins says 5, the other 1."""

    _begins: int | None = None

    def _answer(self, request: GenerationRequest) -> Completion:
        if self._begins is None:
            self._begins = request.sequence_id
        word = "5" if request.sequence_id == self._begins else "1"
        (said,) = TOKENIZER.encode(word, add_special_tokens=False)
        return replace(super()._answer(request), tokens=[said, STOP])


TOKENIZER = char_tokenizer(CHATML)
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def played(python: str, env: dict[str, Any], *seats: str) -> Episode:
    """One episode, whose cell is 1."""

    async def run() -> Episode:
        options = {"env": env, "seats": seats}
        pool = EnvironmentPool("agent:verifiers", options, python=python, step_timeout_seconds=120)
        await pool.start()
        try:
            (episode,) = await play_agents(
                Guessing(lambda sequence, turn: 1, STOP, lockstep=False),
                pool,
                ChatTokenizer(TOKENIZER),
                [EpisodeSpec(0, 0, 0, seed=7)],
                PlaySettings(max_turns=8),
                meter=LoadMeter(1),
            )
        finally:
            await pool.stop()
        assert episode.finish_reason == "done", episode.info
        return episode

    return asyncio.run(run())


def test_the_seat_that_is_trained_is_recorded_and_rewarded(python: str) -> None:
    """Each answer is asked for by a program of verifiers, with the conversation so far."""
    episode = played(python, {**DUEL, "first": CHAT_LOOP, "second": CHAT_LOOP}, "first")
    (sample,) = episode.samples
    assert sample.texts[::2] == ["123|456|789", "0"]
    assert sample.texts[1::2] == ["5", "5"]
    assert episode.total_reward == pytest.approx(-8 / 18)
    assert episode.info["metrics"] == {"far": 8.0, "nearer": pytest.approx(-8 / 18)}


def test_all_seats_may_be_trained(python: str) -> None:
    episode = played(python, DUEL, "first", "second")
    assert [sample.texts[1::2] for sample in episode.samples] == [["5", "5"], ["1", "1"]]
    assert episode.total_reward == 0.0
    assert episode.info["metrics"]["far"] == 4.0


def test_what_cannot_be_made_is_refused_with_one_message(python: str) -> None:
    cases = [
        ({"taskset": {"id": "no_such"}}, [], "taskset 'no_such' not found"),
        (DUEL, [], "has the seats first, second: name by the option seats"),
        (DUEL, ["third"], "has the seats first, second"),
        ({**DUEL, "firts": {}}, ["first"], "cannot make the environment of the option env"),
        (
            {**DUEL, "first": {"harness": {"id": "bash"}}},
            ["first"],
            "has the harness 'bash', which runs commands of the model: say where",
        ),
    ]
    code = (
        "import json, sys\n"
        "from earl_core.environments.registry import create\n"
        "from earl_core.system.errors import ConfigError\n"
        "for env, seats, _ in json.loads(sys.argv[1]):\n"
        "    try: create('agent:verifiers', {'env': env, 'seats': seats})\n"
        "    except ConfigError as error: print(json.dumps(str(error)))\n"
    )
    shown = subprocess.run(
        [python, "-c", code, json.dumps(cases)], cwd=REPOSITORY, capture_output=True, text=True
    )
    messages = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(messages) == len(cases), shown.stderr
    for message, (_, _, expected) in zip(messages, cases, strict=True):
        assert expected in message


@pytest.mark.campaign
def test_it_trains(python: str, runs: Runs) -> None:
    options = {"env": DUEL, "seats": ["first"]}
    runs.train(
        *LEARNING,
        "iterations=2",
        "rollout.prompts_per_iteration=4",
        "environment.name=",
        "environment.agent=verifiers",
        f"environment.options={json.dumps(options)}",
        f"environment.python={python}",
    )
    runs.assert_learnt()
    for line in runs.metrics():
        assert line["rollout/episodes_failed"] == 0.0
        assert line["rollout/turns/mean"] == 2
        assert line["rollout/new_sample_share"] == 0.0
    record = json.loads((runs.run() / "environments.json").read_text())["agent:verifiers"]
    assert record["verifiers"] == "0.4.0"
