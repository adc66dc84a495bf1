"""What every engine promises of its weights, run against each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from earl_core.algorithms.mismatch import MismatchWatch
from earl_core.rollout.errors import WeightSyncError
from earl_core.rollout.probing import answered
from earl_core.system.memory import resident_bytes
from earl_core.trajectory.samples import VersionSpan
from earl_core.weights.load import manifest_from_directory
from earl_core.weights.publish import publish
from tests.engines.driver import PROMPTS, Driver, batch, request
from tests.engines.models import (
    POSITIONS,
    make,
    model_logprobs,
    prompt_of,
    read,
    reference_logprobs,
)
from tests.engines.probes import probe_of


def test_memory_is_released_and_restored(driver: Driver) -> None:
    before = batch(driver)
    driver.run(driver.engine.release_memory())
    # vLLM fills its cache, a GiB here, with zeros as it starts.
    assert all(resident_bytes(pid)[1] < 2**30 for pid in driver.engine.pids())
    driver.run(driver.engine.restore_memory())
    if driver.engine.policy_version is None:
        driver.run(driver.engine.play_under(manifest_from_directory(driver.directory, 0)))
    assert [answer.tokens for answer in batch(driver)] == [answer.tokens for answer in before]


def test_updated_weights_are_the_ones_that_answer_there_and_back(
    driver: Driver, tmp_path: Path
) -> None:
    """Turn by turn on kept sequences: nothing of the old weights may survive in a cache."""
    old = manifest_from_directory(driver.directory, driver.engine.policy_version or 0)
    model = make("llama_tied", tmp_path / "new", seed=9)
    new = publish(model.state_dict(), tmp_path / "published", 41, "float32")
    long = [request(index, PROMPTS[index] * 2) for index in range(3)]
    driver.generate(long)
    driver.run(driver.engine.play_under(new))
    assert driver.engine.policy_version == 41
    for item, answer in zip(long, driver.generate(long), strict=True):
        expected = model_logprobs(model, item.tokens, answer.tokens, 0.7)
        former = reference_logprobs(driver.directory, item.tokens, answer.tokens, 0.7)
        assert answer.spans == [VersionSpan(41, 0, len(answer.tokens))]
        np.testing.assert_allclose(answer.logprobs, expected, atol=2e-4)
        assert np.abs(np.subtract(former, expected)).mean() > 0.1
    driver.run(driver.engine.play_under(old))
    for item, answer in zip(long, driver.generate(long), strict=True):
        expected = reference_logprobs(driver.directory, item.tokens, answer.tokens, 0.7)
        np.testing.assert_allclose(answer.logprobs, expected, atol=2e-4)
    driver.engine.finish(range(3))


@pytest.mark.parametrize(
    "damage", ["bytes", "missing name", "unknown name", "shape", "gone", "other"]
)
def test_weights_that_are_not_the_models_are_refused(
    driver: Driver, damage: str, tmp_path: Path
) -> None:
    before, version = batch(driver), driver.engine.policy_version
    state = dict(make("llama_tied", tmp_path / "new", seed=9).state_dict())
    digest = ""
    if damage == "missing name":
        del state["model.layers.1.mlp.up_proj.weight"]
    elif damage == "unknown name":
        state["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)
    elif damage == "shape":
        state["model.norm.weight"] = torch.ones(64)
    elif damage == "other":
        digest = "0" * 32
    manifest = publish(state, tmp_path / "published", 50, "float32", config_digest=digest)
    path = Path(manifest.files[0].path)
    if damage == "bytes":
        data = bytearray(path.read_bytes())
        data[-100] ^= 0x40
        path.write_bytes(data)
    elif damage == "gone":
        path.unlink()
    with pytest.raises(WeightSyncError) as caught:
        driver.run(driver.engine.play_under(manifest))
    assert not caught.value.engine_lost
    assert driver.engine.policy_version == version
    assert [answer.tokens for answer in batch(driver)] == [answer.tokens for answer in before]


LONG = [prompt_of(90 + seed, length) for seed, length in enumerate((40, 71, 39))]
"""Prompts of more than a block of a prefix cache."""


def test_a_probe_tells_the_version_that_is_loaded_from_another(
    driver: Driver, tmp_path: Path
) -> None:
    old = manifest_from_directory(driver.directory, driver.engine.policy_version or 0)
    former, model = read(driver.directory), make("llama_tied", tmp_path / "new", seed=9)
    new = publish(model.state_dict(), tmp_path / "published", 61, "float32")
    of_old, of_new = probe_of(former, [*PROMPTS, *LONG]), probe_of(model, [*PROMPTS, *LONG])
    watch, before = MismatchWatch(float32=True), batch(driver)
    right = driver.run(answered(driver.engine, of_old))
    assert right["probe_mismatch_max"] < 2e-4
    assert right["probe_other_share"] == 0.0
    assert watch.unlike(right, 3) is None
    assert watch.warning(right, 3) is None
    assert [answer.tokens for answer in batch(driver)] == [answer.tokens for answer in before]
    driver.run(driver.engine.play_under(new))
    assert watch.unlike(driver.run(answered(driver.engine, of_new)), 61) is None
    found = watch.unlike(driver.run(answered(driver.engine, of_old)), 61)
    assert found is not None
    assert "does not answer as policy version 61 does" in found
    driver.run(driver.engine.play_under(old))
    # One that is too long for the engine is not asked.
    assert driver.run(answered(driver.engine, probe_of(former, [prompt_of(1, POSITIONS)])))
    assert driver.run(answered(driver.engine, ())) == {}


def test_a_probe_catches_a_stale_prefix_cache(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if driver.engine.lockstep:
        pytest.skip("its sequences share no prefixes")
    old = manifest_from_directory(driver.directory, driver.engine.policy_version or 0)
    model = make("llama_tied", tmp_path / "new", seed=9)
    new = publish(model.state_dict(), tmp_path / "published", 62, "float32")
    driver.generate([request(index, prompt) for index, prompt in enumerate(LONG)])
    vllm: Any = driver.engine
    with monkeypatch.context() as broken:
        pause = vllm._engine.pause_generation
        broken.setattr(vllm._engine, "reset_prefix_cache", _done)
        broken.setattr(
            vllm._engine,
            "pause_generation",
            lambda mode, clear_cache: pause(mode=mode, clear_cache=False),
        )
        driver.run(driver.engine.play_under(new))
    found = driver.run(answered(driver.engine, probe_of(model, LONG)))
    assert MismatchWatch(float32=True).unlike(found, 62) is not None
    driver.run(driver.engine.play_under(old))
    driver.run(driver.engine.play_under(new))
    found = driver.run(answered(driver.engine, probe_of(model, LONG)))
    assert MismatchWatch(float32=True).unlike(found, 62) is None
    driver.run(driver.engine.play_under(old))


async def _done() -> bool:
    return True
