"""Samples made of played turns, and rows of a shard made of samples; and the seeds of their draws.

Every random draw of a run is keyed by what it is for, never by what ran before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from earl_core.system.errors import EarlError
from earl_core.trajectory.forms import Form, dump_forms
from earl_core.trajectory.routing import RoutingShape
from earl_core.trajectory.schema import ROLLOUT_SCHEMA, ROUTING, ROUTING_HASH, SAMPLE_BITS

FAILED_REASONS = frozenset(
    {"environment_error", "environment_timeout", "cancelled", "prompt_too_long"}
)
"""Finish reasons of failed episodes: they are counted, leave their group and are not trained."""

_KEPT = ("outcome", "outcomes", "metrics", "scoring")

OPPONENT_ROLE = "opponent"
"""Of samples of an environment's opponent, where both sides are trained: what it did and was paid
is no part of the episode's turns and reward."""

UNNUMBERED = -1
"""The number of a turn whose place in time is that among the episode's samples."""


class VersionSpan(NamedTuple):
    """The tokens `first` to `end` (not included) of an answer, sampled under one policy version."""

    policy_version: int
    first: int
    end: int


@dataclass
class Sample:
    """One token stream of an episode, appended to as the episode goes on."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    turn_starts: list[int] = field(default_factory=list)
    policy_version_first: list[int] = field(default_factory=list)
    policy_version_last: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    turn_numbers: list[int] = field(default_factory=list)
    turn_anchors: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    forms: list[Form | None] = field(default_factory=list)
    role: str = ""
    """Of its conversation, where an agent names them."""
    routing: np.ndarray | None = None
    """The experts of its first tokens, a row for each (`Completion.routing`)."""

    def begin_turn(
        self, observation: Sequence[int], text: str = "", anchor: int | None = None
    ) -> None:
        """Append a turn's given tokens (prompt, environment, template, prefix).

        text: the messages among them, without the template. anchor: `anchor_of` these messages;
        None: what tells the text apart, or the tokens where there is none.
        """
        self.texts.append(text)
        self.turn_numbers.append(UNNUMBERED)
        self.turn_anchors.append(
            derive_seed("anchor", *([text] if text else map(int, observation)))
            if anchor is None
            else anchor
        )
        self.turn_starts.append(len(self.tokens))
        self.forms.append(None)
        self.policy_version_first.append(-1)
        self.policy_version_last.append(-1)
        self.turn_rewards.append(0.0)
        self.tokens.extend(observation)
        self.loss_mask.extend([0] * len(observation))
        self.rollout_logprobs.extend([0.0] * len(observation))
        self.token_versions.extend([-1] * len(observation))

    def answer(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[VersionSpan],
        text: str = "",
        number: int = UNNUMBERED,
        form: Form | None = None,
        routing: np.ndarray | None = None,
    ) -> None:
        """Append the turn's sampled tokens with their log-probs, and their text.

        spans: of the tokens, at least one, in order. number: how many answers of the episode came
        before this one, in whatever sample; needed where samples do not follow each other. form:
        that they were held to. routing: of the first tokens of the sample, from the pass that
        computed their keys and values last; None: what was known stays.
        """
        self.turn_numbers[-1] = number
        self.forms[-1] = form
        self.texts.append(text)
        self.tokens.extend(tokens)
        self.loss_mask.extend([1] * len(tokens))
        self.rollout_logprobs.extend(logprobs)
        self.policy_version_first[-1] = spans[0].policy_version
        self.policy_version_last[-1] = spans[-1].policy_version
        for version, first, end in spans:
            self.token_versions.extend([version] * (end - first))
        if routing is not None:
            self.routing = routing[: len(self.tokens)]

    @property
    def trained_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.loss_mask)


@dataclass
class Episode:
    """A whole interaction: its identity, its samples and how it ended."""

    episode_id: int
    group_id: int
    prompt_id: int
    samples: list[Sample] = field(default_factory=list)
    finish_reason: str = ""
    info: dict[str, object] = field(default_factory=dict)
    environment: str = ""
    opponent_versions: list[int] = field(default_factory=list)
    """Policy versions that have answered as its opponent, ascending."""
    shared_reward: float = 0.0
    """The part of its reward that counts for each of its roles, where it has some."""

    def take(self, info: Mapping[str, object]) -> None:
        """Keep of a step's info what concerns the whole episode; what comes later counts."""
        self.info |= {key: info[key] for key in _KEPT if key in info}

    @property
    def failed(self) -> bool:
        """True when the episode ended by a failure, which keeps it out of its group."""
        return self.finish_reason in FAILED_REASONS

    @property
    def own(self) -> list[Sample]:
        """List the samples that are not its opponent's."""
        return [sample for sample in self.samples if sample.role != OPPONENT_ROLE]

    @property
    def turns(self) -> int:
        """Answers given, over all samples of its own."""
        return sum(len(sample.turn_starts) for sample in self.own)

    @property
    def total_reward(self) -> float:
        """Sum of the turns' rewards, and what the roles share."""
        return float(sum(sum(sample.turn_rewards) for sample in self.own) + self.shared_reward)

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest sample of its own."""
        return max((len(sample.tokens) for sample in self.own), default=0)


def transcript(texts: Sequence[str], turn_rewards: Sequence[float]) -> dict[str, Any]:
    """An episode to read: `turns` (each observation, answer, reward) and `closing`, the last words
    of its environment. texts, turn_rewards: those of its samples, one after the other."""
    turns = [
        {"observation": observation, "answer": answer, "reward": reward}
        for observation, answer, reward in zip(texts[::2], texts[1::2], turn_rewards, strict=False)
    ]
    return {"turns": turns, "closing": "".join(texts[2 * len(turns) :])}


def utf8(text: str) -> str:
    """The text with a question mark for each lone surrogate, which UTF-8 cannot hold."""
    return text.encode(errors="replace").decode()


@dataclass(frozen=True)
class Rows:
    """Rows of a shard, ascending by `sample_id`.

    numbers: every numeric column: of scalars a number for each row, of lists a sequence for each,
    which are written straight into the shard. lengths: int64 [rows], elements of each row of every
    list column. strings: the string columns.
    """

    numbers: Mapping[str, Iterable[Any]]
    lengths: Mapping[str, np.ndarray] = field(default_factory=dict)
    strings: Mapping[str, Sequence[str]] = field(default_factory=dict)


def rollout_rows(
    episodes: Iterable[Episode],
    schema: pa.Schema = ROLLOUT_SCHEMA,
    routing: RoutingShape | None = None,
) -> Rows:
    """All samples of the episodes as rows of the schema, `ROLLOUT_SCHEMA` or `GROUP_SCHEMA`.
    routing: what an engine has recorded; they are then rows of `with_routing(schema, routing)`."""
    ordered = sorted(episodes, key=lambda episode: episode.episode_id)
    rows = [
        (episode, at, sample) for episode in ordered for at, sample in enumerate(episode.samples)
    ]
    scalars: dict[str, list[float]] = {
        "sample_id": [episode.episode_id << SAMPLE_BITS | at for episode, at, _ in rows],
        "episode_id": [episode.episode_id for episode, _, _ in rows],
        "group_id": [episode.group_id for episode, _, _ in rows],
        "prompt_id": [episode.prompt_id for episode, _, _ in rows],
        "turns": [len(sample.turn_starts) for _, _, sample in rows],
        "shared_reward": [episode.shared_reward for episode, _, _ in rows],
    }
    strings = {
        "finish_reason": [episode.finish_reason for episode, _, _ in rows],
        "environment": [episode.environment for episode, _, _ in rows],
        "role": [sample.role for _, _, sample in rows],
        "outcome": [utf8(str(episode.info.get("outcome", ""))) for episode, _, _ in rows],
        "scoring": [
            json.dumps(episode.info["scoring"]) if "scoring" in episode.info else ""
            for episode, _, _ in rows
        ],
        # JSON escapes what is no UTF-8, which an environment may say.
        "texts": [json.dumps(sample.texts) for _, _, sample in rows],
        "forms": [dump_forms(sample.forms) for _, _, sample in rows],
    }
    names = [name for name in schema.names if name not in (*scalars, *strings)]
    own = {"opponent_versions"}
    lists: dict[str, Iterable[Any]] = {
        name: [getattr(episode if name in own else sample, name) for episode, _, sample in rows]
        for name in names
    }
    lists["turn_numbers"] = [numbers for episode in ordered for numbers in _numbered(episode)]
    lengths = {name: _lengths(lists[name]) for name in names}
    if routing is not None:
        lengths[ROUTING] = lengths["tokens"] * routing.width
        lengths[ROUTING_HASH] = lengths["tokens"]
        # Made when they are written: one copy, of one sample at a time.
        samples = [sample for _, _, sample in rows]
        lists[ROUTING] = (routing.column(each.routing, len(each.tokens)) for each in samples)
        lists[ROUTING_HASH] = (
            routing.hashes(routing.column(each.routing, len(each.tokens))) for each in samples
        )
    return Rows({**scalars, **lists}, lengths, strings)


def _lengths(rows: Iterable[Any]) -> np.ndarray:
    return np.array([len(row) for row in rows], np.int64)


def _numbered(episode: Episode) -> list[list[int]]:
    """The numbers of the turns of each sample. Raises `EarlError` for two turns with one."""
    given = [number for sample in episode.samples for number in sample.turn_numbers]
    if set(given) <= {UNNUMBERED}:
        given = list(range(len(given)))
    elif len(set(given)) < len(given) or min(given) < 0:
        raise EarlError(
            f"episode {episode.episode_id} has the turns {given}, so their order is not known: "
            "number every answer of an episode, or none"
        )
    left = iter(given)
    return [[next(left) for _ in sample.turn_numbers] for sample in episode.samples]


_TOLD = ("role", "content", "name")


def anchor_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return a number that tells an observation from others, in [0, 2**63): of its messages,
    whatever the template makes of them. Calls of tools count by what they ask, not by their ids."""
    told = [
        [
            *(str(message.get(key, "")) for key in _TOLD),
            *(
                json.dumps(call.get("function"), sort_keys=True)
                for call in message.get("tool_calls", ())
            ),
        ]
        for message in messages
    ]
    return derive_seed("anchor", json.dumps(told))


SEED_BITS = 63
"""Seeds fit a signed 64-bit integer."""


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from what a draw is for: (run seed, iteration, stage, episode, turn).

    The same parts give the same seed in every process and on every machine; different parts, or
    the same in another order, give independent ones (BLAKE2b, RFC 7693).
    """
    # JSON keeps the parts apart: 1 from "1", and ("a", "b") from ("ab",).
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


@dataclass(frozen=True)
class EpisodeSpec:
    """An episode to play. `seed` keys all its draws: the environment's and each turn's.
    environment: its label, where the run has several. prompt_id: the prompt's index there. batch:
    of a stream, the one that trains on it: its requests go before those of later ones."""

    episode_id: int
    group_id: int
    prompt_id: int
    seed: int
    environment: str = ""
    batch: int = 0

    def episode(self, samples: Sequence[Sample] = ()) -> Episode:
        """The episode, before or after it was played."""
        ids = self.episode_id, self.group_id, self.prompt_id
        return Episode(*ids, list(samples), environment=self.environment)

    @property
    def environment_seed(self) -> int:
        """Seed of what the environment draws after its starting state."""
        return derive_seed(self.seed, "environment")
