"""Weights published by the ranks of a mesh are one process's weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learner.slice_ranks import RANKS, references, results


@pytest.mark.parametrize("ranks", RANKS)
def test_every_mesh_publishes_the_same_bytes_and_digest(ranks: int) -> None:
    alone = references().manifests
    for answered in results(ranks):
        for case, found in answered["files"].items():
            wanted = alone["tied" in case]
            assert found["digest"] == wanted.digest, case
            assert Path(found["file"]).read_bytes() == Path(wanted.files[0].path).read_bytes()
