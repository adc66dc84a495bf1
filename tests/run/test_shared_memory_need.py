"""What a run needs of shared memory, said with numbers before it starts."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from earl_core.config import ConfigError, RunConfig, parse_config
from earl_core.control.shared_memory_need import judged_room, need_of, samples_bytes
from earl_core.pretrained.model_directory import published_bytes, read_model_shape
from earl_core.system.shared_memory import Need, Room
from earl_core.weights.publish import publish
from flows.cli.checks import shared_memory
from flows.cli.checks.shared_memory import check_shared_memory, require_room
from tests.config.test_config import MINIMAL, with_
from tests.engines.models import POSITIONS, make

GIB = 2**30
SEVEN_B = Need(version=15 * GIB, samples=GIB)


def judged(need: Need, free: float, size: float, max_bytes: int | None = None) -> list[str]:
    room = Room(Path("/dev/shm"), round(free * GIB), round(size * GIB))
    return [
        f"{each.level}: {each.text}: {each.advice}" for each in judged_room(need, room, max_bytes)
    ]


def test_the_default_takes_what_the_old_one_refused() -> None:
    """8 GiB for all held no model above 2 B parameters; weights of 7 B and 72 B have their room."""
    assert judged(SEVEN_B, 500, 500) == []
    assert judged(Need(146 * GIB, 4 * GIB), 1000, 1000) == []


def test_a_container_of_64_mb_is_refused_with_numbers() -> None:
    (said,) = judged(SEVEN_B, 0.0625, 0.0625)
    assert said.startswith(
        "blocks: two versions of the model's weights must fit, 2 x 15.0 GiB: 0.06"
    )
    assert "--shm-size=32g" in said
    assert "earl shards sweep" in said


def test_samples_that_may_not_fit_are_a_warning() -> None:
    (said,) = judged(Need(15 * GIB, 3 * GIB), 32, 32)
    assert said.startswith("warning: shards may have 1.5 GiB beside the weights (2 x 15.0 GiB)")
    assert "they need 3.0 GiB" in said
    assert "size=34G" in said


def test_a_number_is_checked_against_the_size() -> None:
    assert judged(SEVEN_B, 40, 40, 10 * GIB) == []
    (said,) = judged(SEVEN_B, 40, 40, 11 * GIB)
    assert said.startswith(
        "blocks: dispatch.max_bytes is 11.0 GiB, and two versions of the weights need 2 x 15.0 GiB "
        "beside it, but /dev/shm has 40.0 GiB in all: lower it, or leave it out"
    )


def test_stale_rollouts_need_the_older_versions_too(tmp_path: Path) -> None:
    make("llama_tied", tmp_path / "model")
    stale = {"schedule": {"staleness": 2}, "algorithm": {"policy_loss": "dppo"}, "iterations": 5}
    need = need_of(config(tmp_path / "model", tmp_path, **stale))
    assert need.versions == 4
    assert need.weights == 4 * need.version
    (said,) = judged(need._replace(version=15 * GIB), 50, 50)
    assert said.startswith("blocks: 4 versions of the model's weights must fit, 4 x 15.0 GiB: 50 ")
    (said,) = judged(need._replace(version=15 * GIB, samples=9 * GIB), 70, 70)
    assert said.startswith("warning: shards may have 7.5 GiB beside the weights (4 x 15.0 GiB)")


def test_groups_that_are_trained_again_need_their_shards_so_long(tmp_path: Path) -> None:
    make("llama_tied", tmp_path / "model")

    def need(replay: dict[str, Any] | None) -> int:
        stream = {
            "schedule": {"staleness": 1, "mode": "stream", "replay": replay},
            "algorithm": {"importance_correction": {}},
            "rollout": {**MINIMAL["rollout"], "prompts_per_iteration": 6, "engine": "torch"},
            "checkpoint": {"every": 3},
        }
        return need_of(config(tmp_path / "model", tmp_path, **stream)).samples

    token = POSITIONS * 2
    # Tokens, masks, log-probs and versions of six groups for four iterations; of two groups that
    # are trained again in each of three, advantages and the learner's log-probs.
    assert need({"share": 0.25, "max_age": 4}) - need(None) == token * (6 * 13 * 4 + 2 * 8 * 3)


def config(model: Path, tmp_path: Path, **changes: Any) -> RunConfig:
    place = {"model": {"path": str(model)}, "dispatch": {"directory": str(tmp_path / "shm")}}
    return parse_config(with_(**place, **changes))


@pytest.mark.parametrize("kind", ["llama_tied", "llama_untied"])
def test_the_need_is_that_of_what_is_published(kind: str, tmp_path: Path) -> None:
    model = make(kind, tmp_path / "model")
    for dtype in ("bfloat16", "float32"):
        manifest = publish(dict(model.named_parameters()), tmp_path / "shm" / "run", 0, dtype)
        tensors = sum(
            math.prod(entry.shape) * (4 if dtype == "float32" else 2)
            for entry in manifest.tensors.values()
        )
        assert published_bytes(tmp_path / "model", dtype) == tensors
        assert 0 < manifest.bytes - tensors < 8192
    made = config(tmp_path / "model", tmp_path, rollout__dtype="bfloat16", checkpoint__every=3)
    need = need_of(made)
    assert need.version == published_bytes(tmp_path / "model", "bfloat16")
    episodes = made.rollout.episodes_per_iteration
    assert need.samples == 3 * samples_bytes(episodes, POSITIONS)
    # What many repositories have beside the weights that are loaded counts for nothing.
    weights, index = tmp_path / "model" / "model.safetensors", "model.safetensors.index.json"
    shutil.copy(weights, weights.with_name("consolidated.safetensors"))
    assert published_bytes(tmp_path / "model", "bfloat16") == need.version
    part = weights.rename(weights.with_name("model-00001-of-00001.safetensors"))
    names = dict.fromkeys(manifest.tensors, part.name)
    weights.with_name(index).write_text(json.dumps({"weight_map": names}))
    assert published_bytes(tmp_path / "model", "bfloat16") == need.version
    for each in ("consolidated.safetensors", part.name, index):
        weights.with_name(each).unlink()
    # Without safetensors the shape tells, biases apart.
    assert published_bytes(tmp_path / "model", "bfloat16") == pytest.approx(need.version, rel=0.01)
    assert read_model_shape(tmp_path / "model").max_positions == POSITIONS


def test_the_doctor_says_whether_the_run_file_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("llama_tied", tmp_path / "model")
    fits = config(tmp_path / "model", tmp_path)
    texts = [finding.text for finding in check_shared_memory(fits)]
    assert any(text.startswith("two versions of the weights, ") for text in texts)
    dispatch = fits.dispatch.model_copy(update={"max_bytes": 2**60})
    blocking = [
        finding
        for finding in check_shared_memory(fits.model_copy(update={"dispatch": dispatch}))
        if finding.level == "blocks"
    ]
    assert "dispatch.max_bytes is" in blocking[0].text
    # vLLM has a queue beside the shards, which 64 MB of a container do not hold, nor a disk.
    with monkeypatch.context() as patched:
        patched.setattr(shared_memory, "room_in", lambda place: Room(Path(place), 2**26, 2**26))
        rollout = fits.rollout.model_copy(update={"engine": "vllm"})
        with pytest.raises(ConfigError, match="vLLM needs 240 MiB") as refused:
            require_room(fits.model_copy(update={"rollout": rollout}))
        assert "--shm-size=8g" in refused.value.remedy
    # `earl train` refuses it in its first second, not once the workers are there.
    require_room(fits)
    with pytest.raises(ConfigError, match="max_bytes is"):
        require_room(fits.model_copy(update={"dispatch": dispatch}))


def test_a_mixtures_routing_is_counted_where_it_is_recorded(tmp_path: Path) -> None:
    raw = {
        "model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 48, "vocab_size": 64,
        "num_attention_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 16,
        "max_position_embeddings": POSITIONS,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))

    def samples(**rollout: object) -> int:
        given = {f"rollout__{name}": value for name, value in rollout.items()}
        made = config(tmp_path, tmp_path, **given)
        return need_of(made).samples // made.rollout.episodes_per_iteration // POSITIONS

    recorded, off = samples(engine="torch"), samples(engine="torch", record_routing="off")
    # A byte each, and a hash of all.
    assert recorded - off == 48 * 8 + 8
    assert samples(engine="vllm") == recorded
