"""Weights published by the ranks of a mesh are one process's weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from earl_core.tensors.safetensors_layout import open_file
from tests.learner.slice_results import RANKS, Slices


@pytest.mark.parametrize("ranks", RANKS)
def test_every_mesh_publishes_the_same_bytes_and_digest(ranks: int, slices: Slices) -> None:
    for answered in slices.results(ranks):
        for case, found in answered["files"].items():
            wanted = slices.manifest("tied" in case)
            assert found["digest"] == wanted.digest, case
            assert Path(found["file"]).read_bytes() == Path(wanted.files[0].path).read_bytes()


@pytest.mark.parametrize("ranks", RANKS)
def test_what_a_host_lacks_crosses_once(ranks: int, slices: Slices) -> None:
    """Of the meshes with tied weights, whose ranks are on two hosts."""
    every = slices.results(ranks)
    sent = {case: sum(each["files"][case]["sent"] for each in every) for case in every[0]["files"]}
    assert sent == {case: found["lacking"] for case, found in every[0]["files"].items()}
    assert any(sent.values())


@pytest.mark.parametrize("ranks", RANKS)
def test_every_byte_is_hashed_once_a_host(ranks: int, slices: Slices) -> None:
    every = slices.results(ranks)
    for case, found in every[0]["files"].items():
        hosts: Counter[str] = Counter()
        for each in every:
            hosts[each["files"][case]["host"]] += each["files"][case]["hashed"]
        opened = open_file(Path(found["file"]))
        assert set(hosts.values()) == {sum(tensor.nbytes for tensor in opened.values())}, case
        assert len(hosts) == (2 if "tied" in case else 1)
