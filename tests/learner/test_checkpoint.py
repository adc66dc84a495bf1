"""Training states: bit-identical continuation, damage and strangers refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from earl_core.config import ConfigError
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.run.checkpoints import verify_training_state
from earl_core.system.files import canonical_json
from earl_core.tensors.errors import CheckpointError
from earl_core.weights.load import tensor_files
from tests.learner.helpers import random_samples, save_model, with_old_logprobs
from tests.learner.launched import launch
from tests.learner.slice_ranks import value_of
from tests.learner.slice_results import RANKS, Slices
from tests.learner.test_policy_learner import largest_difference, make_learner
from tests.learnt import assert_learnt


def _iterations(learner: PolicyLearner, first: int, last: int) -> None:
    before = {name: weight.clone() for name, weight in learner.named_weights().items()}
    norms = []
    for iteration in range(first, last):
        samples = random_samples(8, seed=iteration)
        ready = with_old_logprobs(samples, learner.score(samples))
        norms.append(learner.update(ready, iteration=iteration)["grad_norm"])
    assert_learnt(norms, before, learner.named_weights())


SETTINGS = {"minibatches": 2, "schedule": "cosine", "weight_decay": 0.1}
KINDS = ("llama", "qwen2")


def go_on(scratch: Path) -> None:
    """In a process of its own: each model's state after two iterations, trained for two more."""
    for kind in KINDS:
        learner = make_learner(scratch / kind, **SETTINGS)
        state = learner.restore(scratch / f"{kind}-two")
        assert state == {"policy_version": 2, "cursor": [1, 2]}
        _iterations(learner, 2, 4)
        learner.save(scratch / f"{kind}-four", {"policy_version": 4})


def test_a_new_process_continues_bit_for_bit(tmp_path: Path, one_thread: None) -> None:
    learners = {}
    for kind in KINDS:
        learner = make_learner(save_model(kind, tmp_path / kind), **SETTINGS)
        _iterations(learner, 0, 2)
        learner.save(tmp_path / f"{kind}-two", {"policy_version": 2, "cursor": [1, 2]})
        _iterations(learner, 2, 4)
        learners[kind] = learner
    launch(__name__, "go_on", 1, tmp_path)
    for kind, learner in learners.items():
        resumed = make_learner(tmp_path / kind, **SETTINGS)
        assert resumed.restore(tmp_path / f"{kind}-four") == {"policy_version": 4}
        assert largest_difference(learner, resumed) == 0.0
        for name, _ in learner.named_parameters():
            state, restored = learner.optimizer.state[name], resumed.optimizer.state[name]
            assert state.keys() == restored.keys()
            assert "exp_avg" in state
            assert all(torch.equal(state[key], restored[key]) for key in state)


def test_the_policy_directory_loads_with_stock_transformers(tmp_path: Path) -> None:
    learner = make_learner(save_model("llama", tmp_path / "model"))
    _iterations(learner, 0, 1)
    learner.save(tmp_path / "state", {})
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "state" / "policy")
    assert "earl" not in (tmp_path / "state" / "policy" / "config.json").read_text()
    ours = learner.named_weights()
    assert all(torch.equal(ours[name], weight) for name, weight in stock.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "state" / "policy")
    assert tokenizer.chat_template == "{{ messages }}"
    fresh = make_learner(tmp_path / "state" / "policy")
    assert largest_difference(fresh, learner) == 0.0
    kinds = {path.suffix for path in (tmp_path / "state").rglob("*") if path.is_file()}
    assert kinds <= {".json", ".safetensors", ".jinja"}


ODD = {
    # transformers reads each of them, and writes none of them again.
    "generation_config.json": {"temperature": 0.9, "top_p": 0.6, "eos_token_id": [2, 3]},
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "own": [1]},
    "extra/terms.txt": "of use",
    "modeling_own.py": "A = 1\n",
}


def test_files_of_the_model_are_copied_as_they_lie(tmp_path: Path) -> None:
    """Those that no library writes again, too; without weights, and what is hidden or foreign."""
    base = save_model("llama", tmp_path / "model")
    for name, content in ODD.items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(content if isinstance(content, str) else json.dumps(content))
    config = json.loads((base / "config.json").read_text())
    config |= {"temperature": 0.7, "own": float("inf"), "torch_dtype": "bfloat16"}
    (base / "config.json").write_text(json.dumps(config))
    (base / ".cache").mkdir()
    (base / ".cache" / "lock.json").write_text("{}")
    (base / "weights.bin").write_bytes(b"x")
    for other in ("checkpoint-8/config.json", "runs/a/run.json", "state/1/state.json"):
        (base / other).parent.mkdir(parents=True)
        (base / other).write_text("{}")
    learner = make_learner(base)
    learner.try_saving(tmp_path)
    assert not list(tmp_path.glob(".rehearsal*"))
    learner.save(tmp_path / "state", {})
    policy = tmp_path / "state" / "policy"
    for name in (*ODD, "tokenizer.json"):
        assert (policy / name).read_bytes() == (base / name).read_bytes(), name
    found = json.loads((policy / "config.json").read_text())
    assert "torch_dtype" not in found
    assert found.pop("dtype") == "float32"
    assert found == {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype")}
    assert not {".cache", "weights.bin", "1"} & {path.name for path in policy.rglob("*")}
    assert not {"checkpoint-8", "runs", "state"} & {path.name for path in policy.iterdir()}
    assert largest_difference(make_learner(policy), learner) == 0.0


def test_an_update_of_nothing_takes_no_step_and_is_saved(tmp_path: Path) -> None:
    base = save_model("llama", tmp_path / "model")
    learner, untouched = make_learner(base, minibatches=2), make_learner(base)
    metrics = learner.update([], iteration=0)
    assert (metrics["optimizer_steps"], metrics["grad_norm"], metrics["tokens"]) == (0.0, 0.0, 0.0)
    assert largest_difference(learner, untouched) == 0.0
    learner.save(tmp_path / "state", {"policy_version": 1})
    assert untouched.restore(tmp_path / "state") == {"policy_version": 1}
    _iterations(untouched, 1, 2)


def test_what_keeps_a_checkpoint_from_being_written_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_model("llama", tmp_path / "model")
    learner = make_learner(base)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"a checkpoint needs [0-9,]+ bytes, .* has 1,000 left"):
        learner.try_saving(tmp_path / "checkpoints")
    (base / "tokenizer.json").unlink()
    (base / "tokenizer.json").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigError, match=r"model/tokenizer\.json.* cannot be copied"):
        learner.try_saving(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(OSError, match="checkpoints"):
        learner.try_saving(tmp_path / "checkpoints")


def test_another_model_is_one_clear_error_and_changes_nothing(tmp_path: Path) -> None:
    make_learner(save_model("gpt2", tmp_path / "gpt2")).save(tmp_path / "state", {})
    learner = make_learner(save_model("llama", tmp_path / "llama"))
    samples = random_samples(4)
    before = learner.score(samples)
    with pytest.raises(CheckpointError, match=r"is of another model: .* Set model\.path"):
        learner.restore(tmp_path / "state")
    assert all((a == b).all() for a, b in zip(before, learner.score(samples), strict=True))


@pytest.mark.parametrize(
    "name", ["optimizer.safetensors", "policy/model.safetensors", "policy/config.json"]
)
def test_damage_is_found(name: str, tmp_path: Path) -> None:
    learner = make_learner(save_model("llama", tmp_path / "model"))
    _iterations(learner, 0, 1)
    state = tmp_path / "state"
    learner.save(state, {"policy_version": 1})
    assert verify_training_state(state) == {"policy_version": 1}
    content = bytearray((state / name).read_bytes())
    content[len(content) // 2] ^= 1
    (state / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is missing or not what was written"):
        learner.restore(state)
    (state / name).unlink()
    with pytest.raises(CheckpointError, match="is missing or not"):
        verify_training_state(state)


def test_unfinished_and_foreign_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: .* no state\.json"):
        verify_training_state(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        verify_training_state(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(CheckpointError, match="format"):
        verify_training_state(tmp_path)


def test_files_outside_the_directory_are_not_read(tmp_path: Path) -> None:
    learner = make_learner(save_model("llama", tmp_path / "model"))
    state = tmp_path / "state"
    learner.save(state, {})
    (tmp_path / "secret").write_text("x")
    content = json.loads((state / "state.json").read_text())
    content["files"]["../secret"] = {"bytes": 1, "xxh3": "0"}
    del content["digest"]
    content["digest"] = xxhash.xxh3_128_hexdigest(canonical_json(content))
    (state / "state.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="secret is missing"):
        verify_training_state(state)


def test_a_failed_write_leaves_the_old_state_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(save_model("llama", tmp_path / "model"))
    learner.save(tmp_path / "run" / "state", {"policy_version": 1})
    learner.save(tmp_path / "run" / "state", {"policy_version": 2})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"no room for .* bytes of a checkpoint .*No space left"):
        learner.save(tmp_path / "run" / "state", {"policy_version": 3})
    assert verify_training_state(tmp_path / "run" / "state") == {"policy_version": 2}
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["state"]


@pytest.mark.parametrize("ranks", RANKS)
def test_every_mesh_writes_the_files_of_one_process(ranks: int, slices: Slices) -> None:
    """Each rank has also read the one process's checkpoint, bit for bit, or it had failed."""
    for case, found in _written(slices, ranks, "untied"):
        written = json.loads((found / "state.json").read_text())
        assert written == slices.state(False), case


@pytest.mark.parametrize("ranks", RANKS)
def test_each_host_writes_one_file_of_each_kind(ranks: int, slices: Slices) -> None:
    alone = slices.alone / "tied-reference"
    for case, found in _written(slices, ranks, "tied"):
        assert verify_training_state(found) == {"policy_version": 7}
        for folder, stem in (("policy", "model"), ("", "optimizer")):
            files = tensor_files(found / folder, stem)
            names = [f"{stem}-{number}-of-00002.safetensors" for number in ("00001", "00002")]
            assert [file.name for file in files] == names, case
            sizes = [file.stat().st_size for file in files]
            assert max(sizes) < 0.6 * sum(sizes), case
            whole = load_file(alone / folder / f"{stem}.safetensors")
            parts = [load_file(file) for file in files]
            assert sum(len(part) for part in parts) == len(whole)
            tensors = parts[0] | parts[1]
            assert all(torch.equal(tensors[name], whole[name]) for name in whole), case


def _written(slices: Slices, ranks: int, kind: str) -> Iterator[tuple[str, Path]]:
    """Where the meshes have written a state: of one host untied, of two hosts tied weights."""
    for case, found in slices.results(ranks)[0]["files"].items():
        if Path(found["state"]).name.startswith(kind):
            yield case, Path(found["state"])


@pytest.mark.parametrize("tied", [False, True])
def test_what_ranks_wrote_loads_with_stock_transformers(tied: bool, slices: Slices) -> None:
    cases = slices.results(2)[0]["files"]
    found = next(value for name, value in cases.items() if ("tied" in name) == tied)
    policy = Path(found["state"]) / "policy"
    stock, report = AutoModelForCausalLM.from_pretrained(policy, output_loading_info=True)
    assert not any(report.values()), report
    assert (stock.lm_head.weight is stock.model.embed_tokens.weight) == tied
    for name, weight in stock.named_parameters():
        assert torch.equal(weight, value_of(name, "weight", weight.shape))
