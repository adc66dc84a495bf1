"""Groups that are parked when their engine ends, and go on in another process at the next token."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from safetensors.torch import load_file, save_file

from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.rollout.errors import EngineLost
from earl_core.rollout.rollout_worker import RolloutWorker
from earl_core.run.parked_groups import ParkedGroup, ParkedGroups
from earl_core.system.errors import EarlError
from tests.learner.test_routing import mixture
from tests.rollout.chat_models import tiny_model
from tests.rollout.test_worker import Setting

GROUPS = (0, 1, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("groups") / "model")


@pytest.fixture
def setting(tmp_path: Path, model: Path) -> Setting:
    setting = Setting(tmp_path, model)
    setting.config["rollout"] |= {"max_tokens_per_turn": 12, "max_turns": 4}
    setting.config["schedule"] = {"staleness": 1, "mode": "stream"}
    setting.config["algorithm"] = {"importance_correction": {}}
    return setting


def parked(setting: Setting) -> ParkedGroups:
    return ParkedGroups(setting.root / "run")


def given(*going_on: int) -> list[dict[str, Any]]:
    return [
        {"group": g, "environment": "", "prompt": g, "key": "k", "parked": g in going_on}
        for g in GROUPS
    ]


async def played(worker: RolloutWorker, slices: int | None = None) -> list[dict[str, Any]]:
    """The groups that end, in so many slices; without a number all of them."""
    found: list[dict[str, Any]] = []
    for _ in range(1000 if slices is None else slices):
        found += (await worker.finished(0.0, 1))["groups"]
        if len(found) == len(GROUPS):
            break
    return found


def rows(setting: Setting, groups: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    tables = [setting.table(group) for group in groups]
    return {row["episode_id"]: row for row in pa.concat_tables(tables).to_pylist()}


def tokens_of(worker: RolloutWorker) -> float:
    assert worker._engine is not None
    return worker._engine.statistics()["generated_tokens"]


def begun(group: ParkedGroup) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probs that are sampled of each episode."""
    found = {}
    for episode, record in (group.episodes or {}).items():
        turns = [*record["turns"], *([record["open"]] if record["open"] else [])]
        found[int(episode)] = (
            [token for turn in turns for token in turn["tokens"]],
            [logprob for turn in turns for logprob in turn["logprobs"]],
        )
    return found


def sampled(row: dict[str, Any], column: str) -> list[Any]:
    return [value for value, own in zip(row[column], row["loss_mask"], strict=True) if own]


async def session(setting: Setting, groups: list[dict[str, Any]], version: int, slices: Any) -> Any:
    """What a worker plays before it is closed, the tokens that it samples, and what it resumes."""
    worker = setting.worker()
    try:
        await worker.load(setting.weights(version))
        resumed = (await worker.admit(groups))["resumed"]
        found = await played(worker, slices)
        return found, tokens_of(worker), resumed
    finally:
        await worker.close()


def test_what_is_played_of_a_group_is_not_sampled_again(setting: Setting) -> None:
    """Games of several turns, stopped amid answers, twice; the second time as soon as they are
    taken up. With the same weights they are the games that nobody has stopped."""

    async def work() -> Any:
        whole = await session(setting, given(), 0, None)
        stopped = [await session(setting, given(), 0, 3)]
        files = [parked(setting).read(group) for group in GROUPS]
        stopped.append(await session(setting, given(*GROUPS), 0, 0))
        again = [parked(setting).read(group) for group in GROUPS]
        stopped.append(await session(setting, given(*GROUPS), 0, None))
        return whole, stopped, files, again

    whole, stopped, files, again = asyncio.run(work())
    assert [each[2] for each in stopped] == [[], [*GROUPS], [*GROUPS]]
    assert files == again
    assert all(file is not None and begun(file) for file in files)
    turns = [len(record["turns"]) for file in files for record in file.episodes.values()]
    assert max(turns) > 0, "no environment is replayed"
    assert any(record["open"] for file in files for record in file.episodes.values())
    assert sum(each[1] for each in stopped) == whole[1]
    one, other = rows(setting, whole[0]), rows(setting, stopped[2][0])
    for episode, row in one.items():
        for name in ("tokens", "loss_mask", "turn_rewards", "texts", "token_versions", "outcome"):
            assert other[episode][name] == row[name], name
        assert other[episode]["rollout_logprobs"] == pytest.approx(
            row["rollout_logprobs"], abs=1e-5
        )
    assert parked(setting).read(0) is None


def test_a_group_goes_on_under_other_weights_where_its_engine_was_lost(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its worker lives, which builds another one."""
    left = [4]

    async def generate(
        engine: TorchEngine, requests: Sequence[GenerationRequest]
    ) -> list[Completion]:
        left[0] -= 1
        if not left[0]:
            raise EngineLost("the device fell over")
        return await generating(engine, requests)

    generating = TorchEngine.generate
    monkeypatch.setattr(TorchEngine, "generate", generate)

    async def work() -> Any:
        worker = setting.worker()
        try:
            await worker.load(setting.weights(0))
            await worker.admit(given())
            with pytest.raises(EngineLost, match="fell over"):
                await played(worker)
            with pytest.raises(EngineLost, match="call `load` first"):
                await worker.finished(0.0)
            files = [parked(setting).read(group) for group in GROUPS]
            assert (await worker.load(setting.weights(1)))["playing"] == []
            await worker.admit(given(*GROUPS))
            return files, await played(worker)
        finally:
            await worker.close()

    files, groups = asyncio.run(work())
    found = rows(setting, groups)
    for file in files:
        assert file is not None
        assert set(file.versions) == {0}
        for episode, (tokens, logprobs) in begun(file).items():
            row, count = found[episode], len(tokens)
            assert count > 0
            assert sampled(row, "tokens")[:count] == tokens
            assert sampled(row, "rollout_logprobs")[:count] == pytest.approx(logprobs, abs=1e-6)
            versions = sampled(row, "token_versions")
            assert set(versions[:count]) == {0}
            assert set(versions[count:]) <= {1}
    assert any(1 in row["token_versions"] for row in found.values())
    assert {g["group"]: g["versions"] for g in groups}.keys() == set(GROUPS)


def test_what_cannot_be_replayed_is_parked_without_its_episodes(setting: Setting) -> None:
    setting.config["environment"]["deterministic"] = False
    asyncio.run(session(setting, given(), 0, 3))
    files = [parked(setting).read(group) for group in GROUPS]
    assert [each and each.episodes for each in files] == [None] * 3
    assert all(each is not None for each in files)
    # It goes on with none, whoever asks for it.
    assert asyncio.run(session(setting, given(*GROUPS), 0, 0))[2] == []


def test_a_group_whose_experts_are_recorded_is_parked_without_its_episodes(
    tmp_path: Path, setting: Setting
) -> None:
    """What has ended of it would lose them, and be trained under others."""
    place = tmp_path / "mixed"
    place.mkdir()
    mixed = Setting(place, mixture(tmp_path / "mixture"))
    for section in ("rollout", "schedule", "algorithm"):
        mixed.config[section] = setting.config[section]
    asyncio.run(session(mixed, given(), 0, 3))
    files = [parked(mixed).read(group) for group in GROUPS]
    assert [each is not None and each.episodes is None for each in files] == [True] * 3


def test_a_game_that_does_not_repeat_itself_is_played_anew(setting: Setting) -> None:
    asyncio.run(session(setting, given(), 0, 3))
    told: dict[str, Any] = {}
    for group in GROUPS[:2]:
        file = parked(setting).read(group)
        assert file is not None
        assert file.episodes is not None
        record = next(each for each in file.episodes.values() if each["turns"])
        if group:
            record["turns"][0]["prompt"] = "other tokens"
        else:
            record["turns"][0]["reaction"]["reward"] += 1.0
        parked(setting).write(file)

    async def work() -> Any:
        worker = setting.worker()
        try:
            await worker.load(setting.weights(1))
            assert (await worker.admit(given(*GROUPS)))["resumed"] == [*GROUPS]
            found: list[Any] = []
            while len(found) < len(GROUPS):
                each = await worker.finished(0.0, 1)
                told["anew"] = told.get("anew", []) + each["anew"]
                found += each["groups"]
            return found
        finally:
            await worker.close()

    groups = {each["group"]: each["versions"] for each in asyncio.run(work())}
    assert sorted(told["anew"]) == [0, 1]
    assert groups[0] == groups[1] == [1]
    assert groups[2] == [0, 1] or groups[2] == [0]


def test_a_record_is_used_only_where_the_worker_can_replay(setting: Setting) -> None:
    asyncio.run(session(setting, given(), 0, 3))
    setting.config["environment"]["deterministic"] = False
    assert asyncio.run(session(setting, given(*GROUPS), 0, 0))[2] == []
    assert [parked(setting).read(group) for group in GROUPS] == [None] * 3


def test_files_are_not_used_up_where_the_environment_does_not_start(setting: Setting) -> None:
    asyncio.run(session(setting, given(), 0, 3))
    options = setting.config["environment"]["options"]
    setting.config["environment"]["options"] = {"style": "of somebody else"}
    with pytest.raises(EarlError, match="style"):
        asyncio.run(session(setting, given(*GROUPS), 0, 0))
    setting.config["environment"]["options"] = options
    assert asyncio.run(session(setting, given(*GROUPS), 0, 0))[2] == [*GROUPS]


def damage(kind: str, file: ParkedGroup) -> ParkedGroup:
    """The file with another content, whose digest is right."""
    episodes: dict[str, Any] = dict(file.episodes or {})
    name, record = next((n, e) for n, e in episodes.items() if e["turns"])
    turn = record["turns"][0]
    if kind == "span":
        turn["spans"][0][1] = 1
    elif kind == "log-prob":
        turn["logprobs"].pop()
    elif kind == "field":
        del turn["finish_reason"]
    elif kind == "episode":
        episodes["99"] = episodes.pop(name)
    else:
        return file.model_copy(update={"versions": {**file.versions, 1: "b"}})
    return file.model_copy(update={"episodes": episodes})


def test_a_malformed_record_is_played_anew(setting: Setting) -> None:
    asyncio.run(session(setting, given(), 0, 3))
    files = [parked(setting).read(group) for group in GROUPS]
    for kinds in (("span", "log-prob", "field"), ("episode", "version", "none")):
        for kind, file in zip(kinds, files, strict=True):
            assert file is not None
            whole = file.model_copy(deep=True)
            parked(setting).write(whole if kind == "none" else damage(kind, whole))
        resumed = asyncio.run(session(setting, given(*GROUPS), 0, 0))[2]
        assert resumed == ([GROUPS[2]] if "none" in kinds else [])


def test_groups_that_other_weights_of_a_version_have_sampled_are_begun_again(
    setting: Setting,
) -> None:
    other = setting.root / "other"
    shutil.copytree(setting.model, other)
    tensors = {name: 1.1 * each for name, each in load_file(other / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors", {"format": "pt"})

    async def work() -> Any:
        worker = setting.worker()
        try:
            await worker.load(setting.weights(0))
            await worker.admit(given())
            await played(worker, 1)
            await worker.load(setting.weights(1))
            await played(worker, 2)
            # The update was done again.
            setting.model = other
            await worker.load(setting.weights(1))
            return (await worker.finished(0.0, 0))["anew"]
        finally:
            await worker.close()

    assert asyncio.run(work()) == [*GROUPS]
    # Nothing of them is left.
    assert [parked(setting).read(group) for group in GROUPS] == [None] * 3


def test_what_cannot_be_written_keeps_no_engine(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it keep another group from being parked."""
    writing = ParkedGroups.write

    def write(groups: ParkedGroups, group: ParkedGroup) -> None:
        if group.group == 1:
            raise RuntimeError("no room")
        writing(groups, group)

    monkeypatch.setattr(ParkedGroups, "write", write)

    async def work() -> None:
        worker = setting.worker()
        await worker.load(setting.weights(0))
        await worker.admit(given())
        await played(worker, 3)
        await worker.close()
        assert worker._engine is None

    asyncio.run(work())
    assert [parked(setting).read(group) is None for group in GROUPS] == [False, True, False]


def test_a_group_that_takes_too_long_is_not_parked(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.config["deadlines"] = {"stage": 600.0}

    async def work() -> None:
        worker = setting.worker()
        try:
            await worker.load(setting.weights(0))
            await worker.admit(given()[:1])
            await played(worker, 1)
            assert worker._groups is not None
            clock = worker._groups._clock
            monkeypatch.setattr(worker._groups, "_clock", lambda: clock() + 601.0)
            with pytest.raises(EngineLost, match="not finished after 600 s"):
                await played(worker)
        finally:
            await worker.close()

    asyncio.run(work())
    assert parked(setting).read(0) is None
