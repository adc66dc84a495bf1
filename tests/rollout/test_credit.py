"""Rewards of single answers, by their ids: what an agent may say, and what costs its episode."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from earl_core.environments.base import EnvironmentFailed
from tests.rollout.asking import HELLO, Asking, answering, asked, limits
from tests.rollout.test_gateway import played
from tests.rollout.test_streaming import growing

WRONG = {
    "several": "a reply with 2 answers: ask without `n`",
    "opponent": "an answer of the opponent, which is not trained",
    "foreign": "which is no answer of this episode: use the `id`",
    "twice": "names the answer '{name}' twice: name it once",
    "nan": "must be a finite number between -1e+30 and 1e+30, not nan",
    "bool": "must be a number, not True",
    "string": "must be a finite number between -1e+30 and 1e+30, not '1'",
    "list": "`rewards` must be a dict by the `id` of the answers",
}


def test_an_agents_rewards_are_those_of_its_turns_and_wrong_ones_cost_the_episode() -> None:
    says = ["one", "both", "none", *WRONG]
    settings = limits(max_failed_share=1.0)
    found, meter, _ = asyncio.run(
        played(answering(), "credited", 2 * len(says), settings, {"says": says})
    )
    told = dict(zip(says, found[::2], strict=True))
    for name, rewards in {
        "one": [[0.25], [0.0]],
        "both": [[0.25], [1.0]],
        "none": [[0.0]] * 2,
    }.items():
        assert told[name].finish_reason == "done", told[name].info
        assert [sample.turn_rewards for sample in told[name].samples] == rewards
    assert told["both"].info == {"outcome": "both"}
    for name, sentence in WRONG.items():
        assert told[name].finish_reason == "environment_error"
        failure = str(told[name].info["failure"])
        assert sentence.partition("'{name}'")[2 * ("{name}" in sentence)] in failure, failure
    assert meter.episodes_failed == 2 * len(WRONG)


def test_rewards_are_posted_by_every_api_and_refused_at_once() -> None:
    async def scenario(asking: Asking) -> None:
        asking.session.awaits_reward = True

        async def post(path: str, body: Any) -> Any:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            reply = await asking.http.post(f"{asking.url}/{path}", content=content)
            return reply.status_code, reply.json()

        messages = [{"role": "user", "content": "b"}]
        _, chat = await asking.post(HELLO), (await post("chat/completions", HELLO))[1]
        response = (await post("responses", {"model": "x", "input": "a"}))[1]
        message = (await post("messages", {"model": "x", "max_tokens": 3, "messages": messages}))[1]
        tokens = {"model": "x", "token_ids": [5, 6, 7], "sampling_params": {}}
        generated = await asking.http.post(
            asking.url.removesuffix("/v1") + "/inference/v1/generate", json=tokens
        )
        ids = [chat["id"], response["id"], message["id"], generated.json()["request_id"]]
        for wrong, told in (
            ({"rewards": {"chatcmpl-x": 1}}, "'chatcmpl-x', which is no answer of this episode"),
            (
                f'{{"rewards": {{"{ids[0]}": 1, "{ids[0]}": 2}}}}'.encode(),
                "stands twice in one object",
            ),
            (b'{"rewards": {"x": NaN}}', "must be a finite number"),
        ):
            status, body = await post("reward", wrong)
            assert status == 400
            assert told in body["error"]["message"]
        rewards = {id_: float(at + 1) for at, id_ in enumerate(ids)}
        assert (await post("reward", {"reward": 10, "rewards": rewards}))[0] == 200
        assert asking.session.posted is not None
        episode = asking.session.end(asking.session.posted["reward"], asking.session.posted["info"])
        given = [reward for each in episode.samples for reward in each.turn_rewards]
        assert sorted(given) == [0.0, 1.0, 2.0, 3.0, 14.0]

    asked(scenario)


def test_conversations_have_roles_by_a_header_or_afterwards() -> None:
    async def scenario(asking: Asking) -> None:
        async def ask(role: str) -> Any:
            headers = {"X-EARL-Role": role} if role else {}
            return (await asking.post(HELLO, headers=headers)).json()

        planner, solver, later = await ask("planner"), await ask("solver"), await ask("")
        other = await ask("")
        for wrong in ("opponent", "unnamed", "a b", "x" * 33):
            error = (await ask(wrong))["error"]
            assert error["code"] == "invalid_request", error
            assert "role" in error["message"]
        said = planner["choices"][0]["message"]
        more = {"role": "user", "content": "more"}
        going_on = {"model": "x", "messages": [*HELLO["messages"], said, more]}
        await asking.post(going_on, headers={"X-EARL-Role": "planner"})
        await asking.post(going_on, headers={"X-EARL-Role": "critic"})
        end = asking.session.end
        for roles, told in (
            ({planner["id"]: "solver"}, "'solver', which is 'planner' already: a conversation has"),
            ({"chatcmpl-x": "solver"}, "`roles` names 'chatcmpl-x', which is no answer of this"),
        ):
            with pytest.raises(EnvironmentFailed, match=told):
                end(0.0, {"roles": roles})
        rewards = {solver["id"]: 0.5}
        episode = end(
            1.0, {"rewards": rewards, "roles": {later["id"]: "judge", planner["id"]: "planner"}}
        )
        found = [(each.role, each.turn_rewards) for each in episode.samples]
        assert found == [
            ("planner", [0.0, 0.0]),
            ("solver", [0.5]),
            ("judge", [0.0]),
            ("", [0.0]),
            ("critic", [0.0]),
        ]
        assert (episode.shared_reward, episode.total_reward) == (1.0, 1.5)
        assert other["id"]

    asked(scenario)


def test_an_answer_that_its_client_gave_up_has_no_reward() -> None:
    async def scenario(asking: Asking) -> None:
        body = {**HELLO, "stream": True}
        async with asking.http.stream("POST", f"{asking.url}/chat/completions", json=body) as reply:
            line = await anext(reply.aiter_lines())
        id_ = json.loads(line.removeprefix("data: "))["id"]
        await asyncio.sleep(0.2)
        with pytest.raises(EnvironmentFailed, match="no answer of this episode"):
            asking.session.end(0.0, {"rewards": {id_: 1.0}})

    asked(scenario, growing(0.1), max_tokens_per_turn=32)
