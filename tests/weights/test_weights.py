"""Publishing, describing and opening weights."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from earl_core.dispatch import ShardStore
from earl_core.tensors.errors import WeightsError
from earl_core.tensors.hashing import digest_of
from earl_core.weights.load import manifest_from_directory, match, open_weights, parameters_of
from earl_core.weights.manifest import WeightsManifest, config_digest
from earl_core.weights.publish import publish
from tests.engines.models import make
from tests.shared import memory_place

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(
        st.lists(
            st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=6, unique=True
        )
    )
    names = [name for name in names if name != "__metadata__"] or ["weight"]
    tensors = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        tensors[name] = torch.randn(shape).mul(4).to(dtype)
    return tensors


@settings(max_examples=40, deadline=None)
@given(state_dicts(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_published_is_what_is_opened_and_what_safetensors_reads(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    directory = tmp_path_factory.mktemp("weights")
    manifest = publish(tensors, directory, 3, dtype)
    manifest = WeightsManifest.model_validate_json(manifest.model_dump_json())
    opened = open_weights(manifest, verify_digest=True)
    assert opened.keys() == tensors.keys()
    with safe_open(manifest.files[0].path, framework="pt") as file:
        for name, tensor in tensors.items():
            expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
            assert opened[name].dtype == expected.dtype
            assert torch.equal(opened[name], expected)
            if name not in manifest.tied:
                assert torch.equal(file.get_tensor(name), expected)


def test_opened_weights_share_the_file_and_cannot_change_it(tmp_path: Path) -> None:
    manifest = publish({"a": torch.arange(1000.0)}, tmp_path, 0, "float32")
    first = open_weights(manifest)["a"]
    assert first.data_ptr() % 64 == 0
    first[0] = 77.0
    assert open_weights(manifest, verify_digest=True)["a"][0] == 0.0
    Path(manifest.files[0].path).unlink()
    assert first[999] == 999.0


@pytest.mark.parametrize("kind", ["llama_tied", "llama_untied", "gpt2"])
def test_published_names_are_those_of_save_pretrained(kind: str, tmp_path: Path) -> None:
    model = make(kind, tmp_path / "model")
    digest = config_digest(model.config.to_dict())
    published = publish(model.state_dict(), tmp_path / "w", 5, "float32", config_digest=digest)
    described = manifest_from_directory(tmp_path / "model", 5)
    assert published.tensors == described.tensors
    assert published.tied == described.tied
    assert bool(published.tied) == (kind != "llama_untied")
    assert published.digest == described.digest
    assert published.config_digest == described.config_digest


def test_a_directory_of_several_files_opens_like_one(tmp_path: Path) -> None:
    model = make("llama_untied", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    one = manifest_from_directory(tmp_path / "one", 1)
    many = manifest_from_directory(tmp_path / "many", 1)
    assert len(many.files) > 1
    assert one.digest == many.digest
    opened = open_weights(many, verify_digest=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(opened[name], tensor)


@pytest.mark.parametrize("kind", ["llama_tied", "llama_untied", "gpt2"])
def test_what_is_published_is_matched_to_the_model_and_not_to_its_files(
    kind: str, tmp_path: Path
) -> None:
    """Files of a tied model may have its head too, and old ones have other names."""
    model = make(kind, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    parameters = parameters_of(tmp_path / "model")
    assert all(parameter.is_meta for parameter in parameters.values())
    once = dict(model.named_parameters())
    weights = open_weights(publish(once, tmp_path / "w", 1, "float32"))
    assert len(match(parameters, weights)) == len(once)
    name = next(name for name in weights if "norm" in name or "ln_" in name)
    with pytest.raises(WeightsError, match=rf"1 tensors are missing .*{re.escape(name)}"):
        match(parameters, {key: value for key, value in weights.items() if key != name})


def test_a_changed_byte_is_found_by_the_digest(tmp_path: Path) -> None:
    manifest = publish({"a": torch.zeros(64), "b": torch.ones(3)}, tmp_path, 1, "float32")
    with open(manifest.files[0].path, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x11")
    open_weights(manifest)
    with pytest.raises(WeightsError, match="digest"):
        open_weights(manifest, verify_digest=True)


@pytest.mark.parametrize("damage", ["truncated", "missing", "header", "names", "shape"])
def test_damaged_weights_are_one_clear_error(damage: str, tmp_path: Path) -> None:
    manifest = publish({"a": torch.zeros(64), "b": torch.ones(3)}, tmp_path, 1, "float32")
    path = Path(manifest.files[0].path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "missing":
        path.unlink()
    elif damage == "header":
        path.write_bytes(b"\xff" * manifest.bytes)
    else:
        other = (
            {"a": torch.zeros(64), "c": torch.ones(3)}
            if damage == "names"
            else {"a": torch.zeros(8, 8), "b": torch.ones(3)}
        )
        save_file(other, path)
        file = manifest.files[0].model_copy(update={"bytes": path.stat().st_size})
        manifest = manifest.model_copy(update={"files": (file,)})
    with pytest.raises(WeightsError, match=path.name):
        open_weights(manifest)


def test_the_digest_covers_names_shapes_and_bytes() -> None:
    base = {"a": torch.zeros(4), "b": torch.ones(4)}
    digests = {
        digest_of(tensors)
        for tensors in (
            base,
            {"a": torch.zeros(4), "c": torch.ones(4)},
            {"a": torch.zeros(2, 2), "b": torch.ones(4)},
            {"a": torch.ones(4), "b": torch.zeros(4)},
            {"a": torch.zeros(4), "b": torch.ones(4).view(torch.int32)},
        )
    }
    assert len(digests) == 5
    assert digest_of(dict(reversed(base.items()))) == digest_of(base)


def test_a_directory_without_weights_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"model\.path"):
        manifest_from_directory(tmp_path, 0)


def test_full_memory_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """A tmpfs of 4 MiB in a mount namespace of its own: an OSError, never SIGBUS."""
    script = f"""
import errno, os, sys
from pathlib import Path
import torch
from earl_core.weights.load import match
from earl_core.weights.publish import publish
from tests.shared import memory_place
directory = Path({str(tmp_path)!r})
try:
    publish({{"a": torch.zeros(4 << 20)}}, directory, 1, "float32")
except OSError as error:
    left = sorted(os.listdir(directory))
    sys.exit(0 if error.errno == errno.ENOSPC and left == ['.pool.lock', '.store.json'] else 3)
sys.exit(4)
"""
    command = (
        f'mount -t tmpfs -o size=4m tmpfs "{tmp_path}" && exec "{sys.executable}" -c "$SCRIPT"'
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        env={**os.environ, "SCRIPT": script},
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("mounting a small tmpfs needs privileges")
    assert done.returncode != -signal.SIGBUS
    assert done.returncode == 0, done.stderr


def test_an_interrupted_publication_leaves_nothing(tmp_path: Path) -> None:
    bad = {"a": torch.zeros(8), "b": torch.zeros(8, device="meta")}
    with pytest.raises((NotImplementedError, RuntimeError)):
        publish(bad, tmp_path, 1, "float32")
    ShardStore(tmp_path, 2**30).pool.trim()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".pool.lock", ".store.json"]


def test_publishing_to_shared_memory_is_quick_and_clean() -> None:
    directory = memory_place("weights")
    try:
        manifest = publish({"a": torch.randn(1 << 20)}, directory, 7, "bfloat16")
        assert Path(manifest.files[0].path).parent == directory
        assert open_weights(manifest, verify_digest=True)["a"].dtype == torch.bfloat16
    finally:
        shutil.rmtree(directory)
