"""Environments of verifiers' classic interface, unchanged, in an interpreter that has it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.flows.runs import LEARNING, REPOSITORY, Runs
from tests.foreign import LOCKS, locked_python
from tests.frameworks.matrix import call
from tests.frameworks.recording import Scripted, Wire, check_recorded, played

pytestmark = pytest.mark.slow

WORLD = "tests.environments.classic_worlds"


@pytest.fixture(scope="module")
def python() -> str:
    """Its packages want another openai than ours, and take ten seconds to compile."""
    return locked_python(LOCKS / "verifiers.txt")[0]


REMEMBERED = (call("remember", number=2), call("remember", number=5), "3")
CASES: dict[str, tuple[tuple[str, ...], list[float], str, dict[str, float]]] = {
    "single": (("3",), [1.0, 0.0], "max_turns_reached", {"length": 1.0}),
    "multi": (("4", "3"), [1.0], "guessed", {"length": 1.0}),
    "tool": ((call("look_up", city="Bern"), "3"), [1.0, 0.0], "no_tools_called", {}),
    "stateful": (REMEMBERED, [1.0, 0.0], "no_tools_called", {"remember_calls": 2.0}),
}


def marks(kind: str) -> Any:
    return () if kind == "stateful" else pytest.mark.campaign


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks(kind)) for kind in CASES])
def test_each_kind_is_recorded_and_rewarded(
    python: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says, rewards, outcome, metrics = CASES[kind]
    wire, engine = Wire(monkeypatch), Scripted(says)
    options = {"env": WORLD, "args": {"kind": kind}}
    episodes = played("verifiers_classic", python, options, engine, len(rewards))
    assert {episode.finish_reason for episode in episodes} == {"done"}, episodes[0].info
    assert [episode.total_reward for episode in episodes] == rewards
    assert {episode.info["outcome"] for episode in episodes} == {outcome}
    check_recorded(episodes, wire, engine)
    for number, episode in enumerate(episodes):
        (sample,) = episode.samples
        assert sample.texts[0].endswith(f"Say {number + 3}")
        found: Any = episode.info["metrics"]
        assert found["right"] == rewards[number]
        assert found.items() >= metrics.items()
    if kind == "stateful":
        assert "[2, 5]" in str(wire.asked[2]["messages"][-1]["content"])
        assert "seen" not in json.dumps(wire.asked[0]["tools"])


def test_in_a_group_of_environments_scores_fail_and_empty_answers_are_scored(python: str) -> None:
    engine = Scripted(("4", "3", "4", "3", "5", "", "4"))
    options = {"env": WORLD, "args": {"kind": "mixed"}}
    episodes = played("verifiers_classic", python, options, engine, 6)
    ends = [(each.finish_reason, each.total_reward) for each in episodes]
    # Two of the environment that goes on until the answer is right, four with the judge.
    assert ends[:2] == [("done", 1.0), ("done", 1.0)], episodes[0].info
    assert ends[4:] == [("done", 1.5), ("done", 2.5)]
    assert {reason for reason, _ in ends[2:4]} == {"environment_error"}
    assert "judged: ConnectionError: the judge is down" in str(episodes[2].info)
    assert "forgetful: TypeError" in str(episodes[3].info)


def test_what_cannot_be_made_is_refused_with_one_message(python: str) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"env": "no_such"}, "cannot make the environment 'no_such' with the args {}"),
        ({"env": WORLD}, "load_environment() missing 1 required positional argument"),
        ({"env": WORLD, "args": {"kind": "group"}}, "reward functions of a whole group"),
        ({"env": WORLD, "args": {"kind": "mixed"}, "split": "eval"}, "has no eval_dataset"),
        ({"env": WORLD, "split": "test"}, "must be one of 'train', 'eval'"),
    ]
    code = (
        "import json, sys, threading\n"
        "from earl_core.environments.registry import create\n"
        "from earl_core.system.errors import ConfigError\n"
        "def tried():\n"
        "    for options, _ in json.loads(sys.argv[1]):\n"
        "        try: create('agent:verifiers_classic', options)\n"
        "        except ConfigError as error: print(json.dumps(str(error)))\n"
        f"    mixed = {{'env': {WORLD!r}, 'args': {{'kind': 'mixed'}}}}\n"
        "    print('rows', create('agent:verifiers_classic', mixed).prompt_count)\n"
        "thread = threading.Thread(target=tried)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    shown = subprocess.run(
        [python, "-c", code, json.dumps(cases)], cwd=REPOSITORY, capture_output=True, text=True
    )
    messages = [json.loads(line) for line in shown.stdout.splitlines() if line.startswith('"')]
    assert len(messages) == len(cases), shown.stderr
    for message, (_, expected) in zip(messages, cases, strict=True):
        assert expected in message
    assert "rows 6" in shown.stdout.splitlines()


@pytest.mark.campaign
def test_it_trains(python: str, runs: Runs) -> None:
    options = {"env": WORLD, "args": {"kind": "multi"}}
    runs.train(
        *LEARNING,
        "iterations=2",
        "rollout.prompts_per_iteration=4",
        "environment.name=",
        "environment.agent=verifiers_classic",
        f"environment.options={json.dumps(options)}",
        f"environment.python={python}",
    )
    # A model of random weights is right now and then.
    assert max(line["update/grad_norm"] for line in runs.metrics()) > 0.0
    for line in runs.metrics():
        assert line["rollout/episodes_failed"] == 0.0
        assert line["rollout/new_sample_share"] == 0.0
