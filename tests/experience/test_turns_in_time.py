"""Credit goes by time and by what was observed, whatever samples the turns stand in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.reward import RewardConfig
from earl_core.dispatch import Batch, ShardStore
from earl_core.environments.base import Message
from earl_core.experience.reward import reward_rows
from earl_core.rollout.agent_loop import play
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway.aside import Aside
from earl_core.rollout.gateway.asked_prompts import AskedPrompts
from earl_core.rollout.gateway.session import Call, Session
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.system.errors import EarlError
from earl_core.trajectory.samples import (
    Episode,
    EpisodeSpec,
    Rows,
    Sample,
    VersionSpan,
    rollout_rows,
)
from earl_core.trajectory.schema import REFERENCE_SCHEMA, REWARD_SCHEMA, ROLLOUT_SCHEMA
from tests.columns import list_column
from tests.experience.test_distributed import SPECS
from tests.experience.test_experience import advantages, sealed
from tests.rollout.chat_models import CHATML, DROPS_REASONING, char_tokenizer
from tests.rollout.scripted import SayingEngine, ScriptedEnvironments

KL = {"placement": "reward", "estimator": "k1", "coefficient": 0.25}


def of_episodes(
    directory: Path,
    episodes: Sequence[Episode],
    advantage: Any,
    kl: dict[str, Any] | None = None,
    scores: dict[int, dict[str, float]] | None = None,
    without: Sequence[str] = (),
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Advantages of the trained tokens of each sample that is kept, through shards; and the
    metrics. The reference's log-prob of a token is -0.125 times its id. without: columns of the
    rollout."""
    store = ShardStore(directory, 2**30)
    schema, rows = ROLLOUT_SCHEMA, rollout_rows(episodes)
    if without:
        schema = pa.schema([field for field in schema if field.name not in without])
        rows = Rows(
            {name: rows.numbers[name] for name in rows.numbers if name not in without},
            {name: rows.lengths[name] for name in rows.lengths if name not in without},
            {name: rows.strings[name] for name in rows.strings if name not in without},
        )
    rollout = sealed(store, "rollout", schema, rows)
    functions = [{"function": "builtins:len", "label": "score"}] if scores else []
    settings = RewardConfig.model_validate({"functions": functions})
    with Batch(store, [rollout]) as batch:
        rewards, _, _ = reward_rows(batch, settings, scores)
        masks = [batch.row("loss_mask", row).astype(bool) for row in range(len(batch))]
        ids, said = batch.rows.copy(), [tokens * -0.125 for tokens in batch.list_rows("tokens")]
    scored = {"sample_id": ids, "reference_logprobs": list_column(said, "float32")}
    manifests = [
        rollout,
        sealed(store, "reward", REWARD_SCHEMA, rewards),
        sealed(store, "reference", REFERENCE_SCHEMA, scored),
    ]
    algorithm = AlgorithmConfig.model_validate({"advantage": advantage, "kl": kl or {}})
    with Batch(store, manifests) as batch:
        columns, metrics = advantages(batch, algorithm)
    values = [np.array(row, np.float32) for row in columns["advantages"]]
    kept = [masks[row] for row in np.searchsorted(ids, columns["sample_id"])]
    return [row[mask] for row, mask in zip(values, kept, strict=True)], metrics


def planned(number: int, reward: float) -> Episode:
    """A planner answers first and last, an executor between: two conversations of a session."""
    chat = ChatTokenizer(char_tokenizer(CHATML))
    spec = EpisodeSpec(number, 0, 0, seed=number)
    session = Session(
        spec, chat, PlaySettings(max_turns=8), LoadMeter(1), 4096, Aside(chat), AskedPrompts()
    )

    async def answer(request: GenerationRequest) -> Completion:
        return Completion([40, 41], [-0.5, -0.5], "stop", [VersionSpan(0, 0, 2)])

    async def ask(*texts: str) -> None:
        roles = ("user", "assistant") * len(texts)
        said: list[Message] = [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
        ]
        (reply,) = await session.complete(Call(lambda side: side.place(said), None), answer)
        told.append(reply.message["content"])

    async def run() -> None:
        await ask("plan")
        await ask("execute")
        await ask("plan", told[0], "executed")

    told: list[str] = []
    asyncio.run(run())
    return session.end(reward, {})


def test_the_executor_is_paid_for_what_the_planner_gets_afterwards(tmp_path: Path) -> None:
    for name, rewards, wanted in (
        ("turn_returns", [1.0, 1.0], 0.0),
        ({"name": "turn_returns", "discount": 0.5}, [1.0, 1.0], 0.25),
        ("turn_returns", [1.0, 0.0], 1.0),
    ):
        episodes = [planned(at, reward) for at, reward in enumerate(rewards)]
        assert [len(sample.turn_starts) for sample in episodes[0].samples] == [2, 1]
        found, _ = of_episodes(tmp_path, episodes, name)
        planner, executor = found[0], found[1]
        # With discount 0.5 the turns' returns are 0.25, 0.5 and 1, the other's first 0.25.
        assert executor.tolist() == pytest.approx([wanted] * 2), name
        if wanted == 0.25:
            assert planner.tolist() == pytest.approx([0.0, 0.0, 0.75, 0.75])


def test_scores_of_functions_count_at_the_last_turn_in_time(tmp_path: Path) -> None:
    found, _ = of_episodes(
        tmp_path,
        [planned(0, 0.0), planned(1, 0.0)],
        {"name": "turn_returns", "discount": 0.5},
        scores={0: {"score": 4.0}, 1: {"score": 0.0}},
    )
    assert found[0].tolist() == pytest.approx([1.0, 1.0, 4.0, 4.0])
    assert found[1].tolist() == pytest.approx([2.0, 2.0])


def divided(turns: int, samples: int, number: int, chance: np.random.Generator) -> list[Episode]:
    """The same turns twice: in one conversation, and each in one of several."""
    one, several = Sample(), [Sample() for _ in range(samples)]
    for at in range(turns):
        count = int(chance.integers(1, 4))
        sampled = chance.integers(3, 9, count).tolist()
        logprobs = chance.uniform(-3, -0.1, count).tolist()
        reward = int(chance.integers(-8, 9)) / 8
        for sample in (one, several[int(chance.integers(samples))]):
            sample.begin_turn([1, 2], f"board {at // 2}")
            sample.answer(sampled, logprobs, [VersionSpan(0, 0, count)], number=at)
            sample.turn_rewards[-1] = reward
    used = [sample for sample in several if sample.tokens]
    return [Episode(number, number // 4, 0, parts, "done") for parts in ([one], used)]


@pytest.mark.parametrize("kl", [None, KL], ids=["plain", "kl_in_reward"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "-".join(map(str, spec.values())))
def test_samples_that_interleave_have_the_advantages_of_one(
    tmp_path: Path, spec: Any, kl: dict[str, Any] | None
) -> None:
    chance = np.random.default_rng(4)
    pairs = [divided(int(chance.integers(1, 7)), 3, number, chance) for number in range(24)]
    whole, _ = of_episodes(tmp_path / "one", [pair[0] for pair in pairs], spec, kl)
    parts, _ = of_episodes(tmp_path / "several", [pair[1] for pair in pairs], spec, kl)
    assert len(parts) > len(whole) == 24
    left, crossed = iter(parts), 0
    for (one, several), values in zip(pairs, whole, strict=True):
        found: dict[int, np.ndarray] = {}
        for sample in several.samples:
            starts = np.cumsum([0, *sample.loss_mask])[sample.turn_starts[1:]]
            split = np.split(next(left), starts)
            found |= dict(zip(sample.turn_numbers, split, strict=True))
            crossed += sample.turn_numbers[-1] > len(sample.turn_numbers)
        joined = np.concatenate([found[at] for at in sorted(found)])
        np.testing.assert_allclose(joined, values, atol=1e-6)
        assert len(one.samples) == 1
    assert crossed > 5


@pytest.mark.parametrize("template", [CHATML, DROPS_REASONING])
def test_anchors_are_the_messages_whatever_the_template_makes_of_them(
    tmp_path: Path, template: str
) -> None:
    chat = ChatTokenizer(char_tokenizer(template))

    def said(sequence: int, turn: int) -> list[int]:
        thought = f"<think>\n{'ab'[sequence % 2]}{turn}\n</think>\n\nmove"
        return [*chat.encode(thought), chat.stop_token_ids[0]]

    specs = [EpisodeSpec(number, 0, 0, seed=number) for number in range(2)]
    games = ScriptedEnvironments(lambda number: 3)
    episodes = asyncio.run(play(SayingEngine(said), games, chat, specs, PlaySettings(max_turns=3)))
    assert len(episodes[0].samples) == (1 if template == CHATML else 3)
    episodes[0].samples[-1].turn_rewards[-1] = 3.0
    found, metrics = of_episodes(tmp_path, episodes, "gigpo")
    assert metrics["anchored_share"] == 1.0
    # The second and the third turn observe the same; the std of a pair is its half times sqrt(2).
    values, to_go = np.concatenate(found[: len(episodes[0].samples)]), [2.85, 3.0, 0.95, 1.0]
    assert values[0] == pytest.approx(2 / np.sqrt(2), abs=1e-3)
    of_turn = (3.0 - np.mean(to_go)) / np.std(to_go, ddof=1)
    assert values[-1] == pytest.approx(1 / np.sqrt(2) + of_turn, abs=1e-3)


def test_agents_that_write_their_history_anew_have_anchors(tmp_path: Path) -> None:
    """What follows the last answer, and what the policy is told to be."""
    chat = ChatTokenizer(char_tokenizer(CHATML))
    shared: list[float] = []
    for role in ("system", "user"):
        episodes = []
        for number in range(2):
            spec = EpisodeSpec(number, 0, 0, seed=number)
            session = Session(
                spec,
                chat,
                PlaySettings(max_turns=8),
                LoadMeter(1),
                4096,
                Aside(chat),
                AskedPrompts(),
            )
            history: list[Message] = [{"role": role, "content": f"you are {number}"}]  # type: ignore[misc]
            for turn in range(3):
                history = [
                    *history,
                    {"role": "user", "content": f"board {turn}"},
                ]
                call = Call(lambda side, said=history: side.place(said), None)  # type: ignore[misc]

                async def answer(request: GenerationRequest) -> Completion:
                    return Completion([40], [-0.5], "stop", [VersionSpan(0, 0, 1)])

                asyncio.run(session.complete(call, answer))
                history = [*history, {"role": "assistant", "content": f"summary {number}"}]
            episodes.append(session.end(float(number), {}))
        shared.append(of_episodes(tmp_path / role, episodes, "gigpo")[1]["anchored_share"])
    # Of other policies nothing is shared; the first question of a user is part of its observation.
    assert shared == pytest.approx([0.0, 2 / 3])


def test_shards_of_an_older_version_are_read_as_it_did(tmp_path: Path) -> None:
    chance = np.random.default_rng(4)
    episodes = [divided(4, 1, number, chance)[0] for number in range(8)]
    for spec in ("turn_returns", "gigpo", "reinforce_plus_plus"):
        new, _ = of_episodes(tmp_path / "new", episodes, spec, KL)
        added = ("turn_numbers", "turn_anchors", "role", "shared_reward")
        old, _ = of_episodes(tmp_path / "old", episodes, spec, KL, without=added)
        if spec != "gigpo":
            np.testing.assert_array_equal(np.concatenate(old), np.concatenate(new))
        assert np.abs(np.concatenate(old)).max() > 0.1


def test_turns_with_one_number_are_refused() -> None:
    (episode,) = divided(3, 1, 0, np.random.default_rng(0))[:1]
    episode.samples[0].turn_numbers = [0, 1, 1]
    with pytest.raises(EarlError, match=r"turns \[0, 1, 1\], so their order is not known"):
        rollout_rows([episode])


def scaled(number: int, environment: str, reward: float) -> Episode:
    sample = Sample()
    sample.begin_turn([1, 2])
    sample.answer([3, 4], [-0.5, -0.25], [VersionSpan(0, 0, 2)])
    sample.turn_rewards[-1] = reward
    episode = Episode(number, number // 2, 0, [sample], "done")
    episode.environment = environment
    return episode


@pytest.mark.parametrize("kl", [None, {**KL, "coefficient": 1e-9}], ids=["plain", "kl"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "-".join(map(str, spec.values())))
def test_no_environments_scale_decides_about_another(
    tmp_path: Path, spec: Any, kl: dict[str, Any] | None
) -> None:
    """Who wins has an advantage above who loses, and as far above 0 as the other is below."""
    if spec == {"name": "reinforce"}:
        pytest.skip("it has no baseline: rewards are advantages")
    # They come in turns, as in a mixture.
    episodes = [
        scaled(2 * at + one, label, scale * one)
        for at, (label, scale) in enumerate([("small", 1.0), ("large", 100.0)] * 3)
        for one in (0, 1)
    ]
    found, _ = of_episodes(tmp_path, episodes, spec, kl)
    values = np.array([tokens[0] for tokens in found]).reshape(6, 2)
    np.testing.assert_allclose(values[:, 0], -values[:, 1], rtol=1e-5)
    assert (values[:, 1] > 0.4).all()
    if spec["name"] in ("reinforce_plus_plus", "grpo", "gigpo"):
        np.testing.assert_allclose(values[0], values[1], rtol=1e-3)
