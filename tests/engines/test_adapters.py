"""Versions that are an adapter's pairs: side by side in one engine, each with its own numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from transformers import PreTrainedModel

from earl_core.rollout.engines.engine import Completion
from earl_core.rollout.engines.in_slices import EngineInSlices
from earl_core.rollout.engines.interruptible import InterruptibleEngine
from earl_core.rollout.errors import WeightSyncError
from earl_core.trajectory.samples import VersionSpan
from earl_core.weights.load import manifest_from_directory
from earl_core.weights.manifest import WeightsManifest
from tests.engines.adapters import RANK, merged, published, random_pairs
from tests.engines.driver import Driver, request
from tests.engines.models import make, model_logprobs, prompt_of
from tests.engines.starting import ENGINES, start

PROMPTS = [prompt_of(seed, length) for seed, length in enumerate((5, 40, 70, 3))]


class Bench(NamedTuple):
    """An engine, its scratch folder, and the model that it began with."""

    driver: Driver
    scratch: Path
    model: PreTrainedModel

    def play(self, version: int, seed: int, directory: Path) -> PreTrainedModel:
        """Make the engine play random pairs; the model that they make."""
        pairs = random_pairs(self.model, seed)
        manifest = published(pairs, directory / f"published-{seed}", version)
        self.driver.run(self.driver.engine.play_under(manifest))
        assert self.driver.engine.policy_version == version
        return merged(self.model, pairs)

    def held(self) -> int:
        """How many versions' pairs the engine has."""
        return int(self.driver.engine.statistics()["held_versions"])


@pytest.fixture(scope="module", params=ENGINES)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    directory, scratch = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("rpc")
    model = make("llama_tied", directory)
    # Logits a third as large have a third of the rounding errors of float32.
    model.model.norm.weight.data /= 3
    model.save_pretrained(directory)
    driver = start(request.param, directory, scratch, adapter_rank=RANK)
    yield Bench(driver, scratch, model)
    driver.close()


def _check(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], answers: Sequence[Completion]
) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = model_logprobs(model, prompt, answer.tokens, 1.0)
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-5)


def test_versions_answer_side_by_side_each_with_its_own_numbers(
    bench: Bench, tmp_path: Path
) -> None:
    """The model itself and two adapters; the running answers keep their version, and the same
    prompts are no stale prefix."""
    driver, engine = bench.driver, bench.driver.engine
    pairs = {version: random_pairs(bench.model, version) for version in (1, 2)}
    models = {version: merged(bench.model, pairs.get(version, {})) for version in range(3)}
    # Made before, because answers of the first version must not end meanwhile.
    manifests = {v: published(pairs[v], tmp_path / "published", v) for v in pairs}

    async def overlapping() -> list[list[Completion]]:
        running = []
        for version in models:
            if version:
                await engine.play_under(manifests[version])
            asked = [
                request(10 * version + index, prompt, max_tokens=180, temperature=1.0)
                for index, prompt in enumerate(PROMPTS)
            ]
            running.append(asyncio.create_task(engine.generate(asked)))
            await asyncio.sleep(0.02)
            assert not running[0].done()
        assert bench.held() == 2
        return list(await asyncio.gather(*running))

    found = driver.run(overlapping())
    engine.finish([10 * version + index for version in models for index in range(len(PROMPTS))])
    assert engine.policy_version == 2
    assert bench.held() == 1
    for (version, model), answers in zip(models.items(), found, strict=True):
        _check(model, PROMPTS, answers)
        assert [each.spans for each in answers] == [[VersionSpan(version, 0, 180)]] * len(PROMPTS)
    one, other = (model_logprobs(models[v], PROMPTS[1], found[2][1].tokens, 1.0) for v in (1, 2))
    assert np.abs(np.subtract(one, other)).mean() > 0.05


def test_a_conversation_that_goes_on_under_another_version_has_none_of_the_old_numbers(
    bench: Bench, tmp_path: Path
) -> None:
    prompts = [list(prompt) * 2 for prompt in PROMPTS]
    for version in (3, 4, 5):
        model = bench.play(version, seed=version, directory=tmp_path)
        asked = [request(i, prompt, temperature=1.0) for i, prompt in enumerate(prompts)]
        answers = bench.driver.generate(asked)
        _check(model, prompts, answers)
        for prompt, answer in zip(prompts, answers, strict=True):
            prompt.extend(answer.tokens)
    bench.driver.engine.finish(range(len(prompts)))
    # A number that comes again with other tensors, as after a kill, is another version.
    model = bench.play(5, seed=55, directory=tmp_path)
    asked = [request(i, prompt, temperature=1.0) for i, prompt in enumerate(prompts)]
    _check(model, prompts, bench.driver.generate(asked))
    bench.driver.engine.finish(range(len(prompts)))
    assert bench.held() == 1


def test_an_answer_that_is_stopped_goes_on_under_the_next_version(
    bench: Bench, tmp_path: Path
) -> None:
    pairs = {version: random_pairs(bench.model, version) for version in (14, 15)}
    models = {version: merged(bench.model, each) for version, each in pairs.items()}
    manifests = [published(each, tmp_path / "published", v) for v, each in pairs.items()]

    async def work() -> Completion:
        inner, told = bench.driver.engine, asyncio.Event()
        lockstep = inner.lockstep
        engine = EngineInSlices(inner, lambda: 1) if lockstep else InterruptibleEngine(inner)
        await engine.play_under(manifests[0])
        asked = request(
            0, PROMPTS[1], max_tokens=120, temperature=1.0, on_tokens=lambda _: told.set()
        )
        answer = asyncio.create_task(engine.generate([asked]))
        await (engine.advance(2) if isinstance(engine, EngineInSlices) else told.wait())
        await engine.hold()
        await engine.play_under(manifests[1])
        assert bench.held() == 1
        engine.go_on()
        (found,) = await answer
        await engine.stop()
        return found

    answer = bench.driver.run(work())
    bench.driver.engine.finish([0])
    assert [span.policy_version for span in answer.spans] == [14, 15]
    by = {v: model_logprobs(model, PROMPTS[1], answer.tokens, 1.0) for v, model in models.items()}
    expected = [by[version][at] for version, *span in answer.spans for at in range(*span)]
    np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-5)
    assert np.abs(np.subtract(by[14], by[15])).mean() > 0.05


def test_an_answer_does_not_depend_on_what_was_played_before(bench: Bench, tmp_path: Path) -> None:
    """Of a lockstep engine bit for bit, whatever its cache held."""
    asked = [request(i, prompt, temperature=1.0) for i, prompt in enumerate(PROMPTS)]
    found = []
    for seed in (11, 12, 11):
        bench.play(seed, seed=seed, directory=tmp_path)
        found.append(bench.driver.generate(asked))
    bench.driver.engine.finish(range(len(asked)))
    first, other, again = ([each.tokens for each in answers] for answers in found)
    assert first == again != other
    if bench.driver.engine.lockstep:
        assert [each.logprobs for each in found[0]] == [each.logprobs for each in found[2]]


def test_a_version_that_is_kept_is_played_again_without_its_file(
    bench: Bench, tmp_path: Path
) -> None:
    engine, run = bench.driver.engine, bench.driver.run
    pairs = random_pairs(bench.model, 6)
    kept = published(pairs, tmp_path / "kept", 6)
    run(engine.play_under(kept))
    run(engine.keep([6]))
    bench.play(7, seed=7, directory=tmp_path)
    assert bench.held() == 2
    Path(kept.files[0].path).unlink()
    run(engine.play_under(kept))
    answer = bench.driver.answer(PROMPTS[2], temperature=1.0)
    _check(merged(bench.model, pairs), [PROMPTS[2]], [answer])
    assert (answer.spans[0].policy_version, bench.held()) == (6, 1)
    bench.play(8, seed=8, directory=tmp_path)
    assert bench.held() == 2
    run(engine.keep([]))
    assert bench.held() == 1


def test_memory_is_given_back_and_the_version_goes_on(bench: Bench, tmp_path: Path) -> None:
    model = bench.play(9, seed=9, directory=tmp_path)
    before = bench.driver.answer(PROMPTS[1], temperature=1.0)
    bench.driver.run(bench.driver.engine.release_memory())
    bench.driver.run(bench.driver.engine.restore_memory())
    assert bench.driver.engine.policy_version == 9
    after = bench.driver.answer(PROMPTS[1], temperature=1.0)
    _check(model, [PROMPTS[1]], [after])
    assert after.tokens == before.tokens


@pytest.mark.parametrize(
    "damage",
    ["bytes", "stale", "missing", "foreign", "shape", "rank", "gone", "other base", "whole"],
)
def test_pairs_that_are_not_the_published_ones_are_refused(
    bench: Bench, damage: str, tmp_path: Path
) -> None:
    model = bench.play(20, seed=20, directory=tmp_path)
    held = bench.held()
    with pytest.raises(WeightSyncError, match="50") as caught:
        bench.driver.run(bench.driver.engine.play_under(_damaged(bench, damage, tmp_path)))
    assert not caught.value.engine_lost
    assert (bench.driver.engine.policy_version, bench.held()) == (20, held)
    _check(model, [PROMPTS[3]], [bench.driver.answer(PROMPTS[3], temperature=1.0)])


def test_pairs_that_vllm_had_before_under_the_same_number_are_noticed(
    bench: Bench, tmp_path: Path
) -> None:
    """The read-back alone can: the file is the published one, and vLLM does not read it."""
    engine = bench.driver.engine
    if engine.lockstep:
        pytest.skip("it reads the file itself")
    from earl_core.rollout.engines.vllm_adapters import AdapterFolders

    model = bench.play(30, seed=30, directory=tmp_path)
    foreign = published(random_pairs(bench.model, 31), tmp_path / "foreign", 31)
    stale = AdapterFolders(tmp_path, bench.driver.directory).make(foreign)
    following = next(engine._folders._numbers) + 1  # type: ignore[attr-defined]
    stale = type(stale)(stale.lora_name, following, stale.lora_path)
    bench.driver.run(engine._engine.add_lora(stale))  # type: ignore[attr-defined]
    with pytest.raises(WeightSyncError, match="qkv_proj"):
        bench.play(32, seed=32, directory=tmp_path)
    assert engine.policy_version == 30
    _check(model, [PROMPTS[3]], [bench.driver.answer(PROMPTS[3], temperature=1.0)])


def _damaged(bench: Bench, damage: str, directory: Path) -> WeightsManifest:
    pairs, digest = random_pairs(bench.model, 50), ""
    first = next(iter(pairs))
    if damage == "missing":
        del pairs[first]
    elif damage == "foreign":
        pairs[first.replace("layers.0", "layers.7")] = pairs[first]
    elif damage == "shape":
        pairs[first] = pairs[first][:, :64].contiguous()
    elif damage == "other base":
        digest = "0" * 32
    manifest = published(pairs, directory / "damaged", 50, config_digest=digest)
    path = Path(manifest.files[0].path)
    if damage == "bytes":
        data = bytearray(path.read_bytes())
        data[-100] ^= 0x40
        path.write_bytes(data)
    elif damage == "stale":
        older = published(random_pairs(bench.model, 20), directory / "older", 50)
        path.write_bytes(Path(older.files[0].path).read_bytes())
    elif damage == "gone":
        path.unlink()
    elif damage == "rank":
        assert manifest.adapter is not None
        larger = manifest.adapter.model_copy(update={"rank": RANK + 1})
        return manifest.model_copy(update={"adapter": larger})
    elif damage == "whole":
        return manifest_from_directory(bench.driver.directory, 50)
    return manifest
