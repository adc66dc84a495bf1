"""What `slice_ranks` answers, and what one process writes, once for a test session."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from earl_core.learner.state.checkpoint import write_training_state
from earl_core.weights.manifest import WeightsManifest
from earl_core.weights.publish import publish
from tests.learner.helpers import save_model
from tests.learner.launched import launch
from tests.learner.slice_ranks import Moments, policy, words

RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]
"""Of the tests' worlds: the meshes of two ranks cut in every way, those of four combine them."""


@dataclass(frozen=True)
class References:
    """What one process writes: checkpoints of both kinds and the published weights' digests."""

    scratch: Path
    files: dict[bool, dict[str, Any]]
    manifests: dict[bool, WeightsManifest]


@functools.cache
def references() -> References:
    """Written once for the test session."""
    scratch = Path(tempfile.mkdtemp(prefix="earl-slices-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    files, manifests = {}, {}
    for tied in (False, True):
        model = policy(tied)
        target = scratch / f"{'tied' if tied else 'untied'}-reference"
        weights = dict(model.named_parameters())
        write_training_state(
            target,
            model=model,
            tokenizer=words(),
            optimizer=Moments(weights),
            state={"policy_version": 7},
        )
        manifests[tied] = publish(weights, scratch / f"published-{tied}", 7, "bfloat16")
        files[tied] = json.loads((target / "state.json").read_text())
    save_model("llama", scratch / "model")
    shutil.copytree(scratch / "tied-reference", scratch / "damaged")
    with (scratch / "damaged" / "optimizer.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    return References(scratch, files, manifests)


@functools.cache
def results(ranks: int) -> list[dict[str, Any]]:
    """What each of two or four ranks answered; they are launched once for the test session."""
    function = {2: "two", 4: "four"}[ranks]
    return launch("tests.learner.slice_ranks", function, ranks, references().scratch)
