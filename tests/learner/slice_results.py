"""What `slice_ranks` answers, and what one process writes, once for a test session."""

from __future__ import annotations

import json
import os
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from earl_core.learner.state.checkpoint import write_training_state
from earl_core.weights.manifest import WeightsManifest
from earl_core.weights.publish import publish
from tests.learner.helpers import save_model
from tests.learner.launched import launch
from tests.learner.slice_ranks import Moments, policy, words
from tests.shared import made_once

RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]
"""Of the tests' worlds: the meshes of two ranks cut in every way, those of four combine them."""

_KINDS = {False: "untied", True: "tied"}


class Slices:
    """Both workers of a session read what one has made."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    @cached_property
    def alone(self) -> Path:
        """What one process writes: `tied-reference` and `untied-reference`, and more for ranks."""
        return made_once(self._factory, "slices", _write)

    def state(self, tied: bool) -> dict[str, Any]:
        """Of the one process's checkpoint."""
        found: dict[str, Any] = json.loads(
            (self.alone / f"{_KINDS[tied]}-reference" / "state.json").read_text()
        )
        return found

    def manifest(self, tied: bool) -> WeightsManifest:
        """Of the weights that the one process published."""
        text = (self.alone / f"{_KINDS[tied]}.json").read_text()
        return WeightsManifest.model_validate_json(text)

    def results(self, ranks: int) -> list[dict[str, Any]]:
        """What each of two or four ranks answered."""
        function = {2: "two", 4: "four"}[ranks]

        def ask(place: Path) -> None:
            answers = launch("tests.learner.slice_ranks", function, ranks, self.alone)
            (place / "answers.json").write_text(json.dumps(answers))

        made = made_once(self._factory, f"slices-of-{ranks}", ask)
        found: list[dict[str, Any]] = json.loads((made / "answers.json").read_text())
        return found


def _write(scratch: Path) -> None:
    for tied, kind in _KINDS.items():
        model = policy(tied)
        weights = dict(model.named_parameters())
        write_training_state(
            scratch / f"{kind}-reference",
            model=model,
            tokenizer=words(),
            optimizer=Moments(weights),
            state={"policy_version": 7},
        )
        manifest = publish(weights, scratch / f"published-{tied}", 7, "bfloat16")
        (scratch / f"{kind}.json").write_text(manifest.model_dump_json())
    save_model("llama", scratch / "model")
    shutil.copytree(scratch / "tied-reference", scratch / "damaged")
    with (scratch / "damaged" / "optimizer.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
