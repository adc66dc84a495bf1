"""What a run keeps of the models that it begins with or refers to, and how it is compared."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from earl_core.config import RunConfig
from earl_core.control.ancestor import keep_adapter
from earl_core.run import RunDirectory, stage_key
from earl_core.run.kept_models import keep, kept_record
from earl_core.run.record import RunDamaged
from tests.run.test_run_directory import config_in


def adapter(place: Path, pairs: bytes = b"pairs") -> Path:
    place.mkdir(exist_ok=True)
    (place / "adapter_config.json").write_text("{}")
    (place / "adapter_model.safetensors").write_bytes(pairs)
    return place


def opened(config: RunConfig) -> None:
    run = RunDirectory.open(config)
    try:
        keep_adapter(run)
    finally:
        run.close()


def test_an_adapter_that_a_run_begins_with_may_go_afterwards(tmp_path: Path) -> None:
    source = adapter(tmp_path / "pairs")
    model = {"path": "models/x", "adapter": {"from": str(source)}}
    config = config_in(tmp_path, model=model)

    def key() -> str:
        return stage_key(config, "uid", 0, "rollout", [])

    assert config.initial_model == config.model
    before = key()
    opened(config)
    adapter(source, b"other")
    opened(config)
    shutil.rmtree(source)
    opened(config)
    kept = tmp_path / "runs/a/adapter"
    began = config.initial_model.adapter
    assert began is not None
    assert began.source == str(kept / "model")
    assert (kept / "model" / "adapter_model.safetensors").read_bytes() == b"pairs"
    assert key() == before
    adapter(kept / "model", b"pears")
    with pytest.raises(RunDamaged, match="is not what the run began with: put it back as it was"):
        opened(config)
    # What is copied once more must be what it was.
    shutil.rmtree(kept)
    adapter(source, b"other")
    for _ in range(2):
        with pytest.raises(RunDamaged, match="adapter is not what the run began with: put it"):
            opened(config)
    shutil.rmtree(kept)
    adapter(source)
    opened(config)


def test_a_linked_model_is_compared_by_its_bytes(tmp_path: Path) -> None:
    teacher, place = tmp_path / "teacher", tmp_path / "kept"
    teacher.mkdir()
    (teacher / "config.json").write_text("{}")
    (teacher / "model.safetensors").write_bytes(b"weights")
    record = keep(teacher, place, {"name": "teacher"}, by_link=True)
    assert kept_record(place) == record
    (teacher / "model.safetensors").write_bytes(b"weighty")
    with pytest.raises(RunDamaged, match=r"/teacher/model\.safetensors is not what the run began"):
        kept_record(place)
    (teacher / "model.safetensors").unlink()
    with pytest.raises(RunDamaged, match=r"is damaged: .*put it back as it was"):
        kept_record(place)
