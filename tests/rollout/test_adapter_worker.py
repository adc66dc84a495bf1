"""The rollout worker under versions of an adapter."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from earl_core.pretrained.adapter_directory import (
    PAIRS_FILE,
    adapter_config,
    write_adapter_config,
)
from earl_core.weights.manifest import WeightsManifest
from tests.engines.adapters import ALPHA, RANK, TARGETS, merged, published, random_pairs
from tests.engines.probes import probe_of
from tests.rollout.chat_models import tiny_model
from tests.rollout.test_worker import Setting


def test_a_worker_plays_published_pairs_and_those_of_a_checkpoint(tmp_path: Path) -> None:
    """Version 0, whose B is 0, plays as the model does; another version does not."""
    setting = Setting(tmp_path, tiny_model(tmp_path / "model"))
    whole = asyncio.run(_answers(setting, [setting.weights()]))
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32)
    pairs = random_pairs(model, 1)
    nothing = {n: each * (0 if ".lora_B." in n else 1) for n, each in pairs.items()}
    first, second = (
        published(each, tmp_path / "published", v) for v, each in enumerate((nothing, pairs))
    )
    probe = probe_of(merged(model, pairs), [[5, 40 + n, 9, 33] for n in range(9)])
    second = second.model_copy(update={"probe": probe})
    adapter = {"rank": RANK, "alpha": ALPHA, "targets": list(TARGETS)}
    setting.config["model"]["adapter"] = adapter
    given = [first.model_dump(mode="json"), second.model_dump(mode="json")]
    given.append(_checkpoint(tmp_path / "adapter", second))
    given.append({"directory": str(setting.model), "policy_version": 0})
    found = asyncio.run(_answers(setting, given))
    assert [ensured["policy_version"] for ensured, _ in found] == [0, 1, 1, 0]
    assert [ensured["loaded"] for ensured, _ in found] == [True, True, False, True]
    assert 0.0 < found[1][0]["probe"]["probe_mismatch_max"] < 1e-4
    answers = [played for _, played in found]
    # Pairs that change nothing go with the engine that played under them.
    assert not list((tmp_path / "run").glob("own-weights-*"))
    assert answers[0] == whole[0][1] == answers[3]
    assert answers[0] != answers[1] == answers[2]


async def _answers(setting: Setting, weights: list[dict[str, Any]]) -> list[Any]:
    """What `ensure` says of each, and a game played under it."""
    worker = setting.worker()
    try:
        return [(await worker.ensure(each), await worker.play_one(0, 1)) for each in weights]
    finally:
        await worker.close()


def _checkpoint(directory: Path, manifest: WeightsManifest) -> dict[str, Any]:
    directory.mkdir()
    write_adapter_config(directory, adapter_config("model", RANK, ALPHA, TARGETS))
    shutil.copyfile(manifest.files[0].path, directory / PAIRS_FILE)
    return {"directory": str(directory), "policy_version": manifest.policy_version}
