"""What an agent says of single answers of its episode, by the ids that their replies have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from earl_core.environments.agent import REWARDS, ROLES, checked_role
from earl_core.rollout.gateway.branch import Branch
from earl_core.rollout.gateway.refusals import invalid
from earl_core.system.frames import WireError
from earl_core.trajectory.samples import Sample

_PREFIXES = ("chatcmpl-", "resp_", "msg_")
"""Of the ids of answers in the APIs."""

_ROLE = "x-earl-role"
"""The header that names the role of a conversation."""


def role_of(request: Request) -> str:
    """The role that a request names; empty: none. Raises `HTTPException`."""
    given = request.headers.get(_ROLE, "")
    try:
        return checked_role(given) if given else ""
    except WireError as error:
        raise invalid(f"the header {_ROLE}: {error}") from error


@dataclass(frozen=True)
class _Given:
    """The answers of one reply. turns: branch and sample of each, and its turn there."""

    trained: bool
    turns: list[tuple[Branch, Sample, int]] = field(default_factory=list)


class Credit:
    """The answers of one session, by the names of their replies."""

    def __init__(self) -> None:
        self._given: dict[str, _Given] = {}

    def answered(self, name: str, branch: Branch, trained: bool) -> None:
        """Note an answer, which is the last turn of the branch. name: of its reply."""
        sample = branch.samples[-1]
        given = self._given.setdefault(name, _Given(trained))
        given.turns.append((branch, sample, len(sample.turn_starts) - 1))

    def check(self, info: Mapping[str, Any]) -> None:
        """Raise `ValueError` for ids that are of no trained answer, rewards of several answers, and
        roles that contradict each other. info: of the agent's result."""
        self._rewarded(info.get(REWARDS, {}))
        self._named(info.get(ROLES, {}))

    def give(self, info: Mapping[str, Any]) -> None:
        """Have the rewards, by the ids of answers, be those of their turns, and conversations have
        their roles. Raises as `check`, before anything is changed."""
        rewarded = self._rewarded(info.get(REWARDS, {}))
        named = self._named(info.get(ROLES, {}))
        for sample, turn, reward in rewarded:
            sample.turn_rewards[turn] += reward
        for branch, role in named:
            branch.name(role)

    def _rewarded(self, rewards: Mapping[str, float]) -> list[tuple[Sample, int, float]]:
        found = []
        for id_, given in self._found(REWARDS, rewards):
            if len(given.turns) > 1:
                raise ValueError(
                    f"`rewards` names {id_!r:.80}, a reply with {len(given.turns)} answers: ask "
                    "without `n`, so that each has an id"
                )
            _, sample, turn = given.turns[0]
            found.append((sample, turn, rewards[id_]))
        return found

    def _named(self, roles: Mapping[str, str]) -> list[tuple[Branch, str]]:
        named: dict[int, str] = {}
        found = []
        for id_, given in self._found(ROLES, roles):
            for branch, _, _ in given.turns:
                before = named.setdefault(branch.number, branch.role or roles[id_])
                if before != roles[id_]:
                    raise ValueError(
                        f"`roles` names the conversation of {id_!r:.80} {roles[id_]!r}, which is "
                        f"{before!r} already: a conversation has one role"
                    )
                found.append((branch, roles[id_]))
        return found

    def _found(self, what: str, ids: Iterable[str]) -> Iterator[tuple[str, _Given]]:
        known = set[str]()
        for id_ in ids:
            name = _name(id_)
            if name in known:
                raise ValueError(f"`{what}` names the answer {id_!r:.80} twice: name it once")
            known.add(name)
            given = self._given.get(name)
            if given is None:
                raise ValueError(
                    f"`{what}` names {id_!r:.80}, which is no answer of this episode: use the `id` "
                    "of a reply that came whole"
                )
            if not given.trained:
                raise ValueError(
                    f"`{what}` names {id_!r:.80}, an answer of the opponent, which is not trained: "
                    "leave it out"
                )
            yield id_, given


def _name(id_: str) -> str:
    for prefix in _PREFIXES:
        if id_.startswith(prefix):
            return id_.removeprefix(prefix)
    return id_
