"""Model directories whose files have other names than the model's parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from earl_core.tensors.errors import WeightsError
from earl_core.weights.load import manifest_from_directory, open_weights
from earl_core.weights.renamed import has_names_of_parameters, publish_renamed
from tests.families.registry import build
from tests.learner.helpers import save_model


def test_experts_of_files_are_published_joined(tmp_path: Path) -> None:
    model = build("Mixtral")
    directory = save_model(model, tmp_path / "model")
    assert any(".w1.weight" in name for name in load_file(directory / "model.safetensors"))
    manifest = manifest_from_directory(directory, 7)
    assert not has_names_of_parameters(manifest, directory)
    published = publish_renamed(manifest, directory, tmp_path / "published")
    assert has_names_of_parameters(published, directory)
    assert published.policy_version == 7
    found = open_weights(published)
    parameters = dict(model.named_parameters())
    assert set(found) == set(parameters)
    assert all(torch.equal(found[name], each) for name, each in parameters.items())


def test_a_parameter_that_is_in_no_file_is_not_made_up(tmp_path: Path) -> None:
    directory = save_model(build("Mixtral"), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"lack 1 parameters \(first: model\.norm\.weight\)"):
        publish_renamed(manifest_from_directory(directory, 0), directory, tmp_path / "published")
