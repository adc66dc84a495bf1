"""Compiled layers compute what others compute, and are compiled once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from earl_core.config.update import UpdateConfig
from earl_core.learner import compiled_layers
from earl_core.learner.compiled_layers import compiling
from earl_core.system.errors import ConfigError
from tests.learner.helpers import random_samples, save_model
from tests.learner.launched import launch
from tests.learner.test_policy_learner import largest_difference, make_learner, weights_of
from tests.learner.test_selective_checkpointing import samples


@pytest.mark.slow
def test_compiled_layers_learn_the_same_and_are_compiled_once(tmp_path: Path) -> None:
    """Ten packs of different lengths, with shared prefixes and without; both layers are one."""
    save_model("qwen2", tmp_path)
    smooth = {"epsilon": 1e-2, "learning_rate": 0.01, "max_tokens_per_microbatch": 1024}
    plain = make_learner(tmp_path, **smooth)
    learner = make_learner(tmp_path, **smooth, compile=True)
    before = weights_of(learner)
    counters.clear()
    packs = [
        samples(),
        *(random_samples(2 * size, seed=size, longest=30 * size) for size in range(1, 10)),
    ]
    for number, pack in enumerate(packs):
        expected = plain.update(pack, iteration=0)
        found = learner.update(pack, iteration=0)
        assert found["grad_norm"] > 0.1
        for name in ("loss", "grad_norm", "entropy"):
            assert found[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-5), number
        if number == 0:
            # What lies between the layer's input, attention and its output; the head's passes.
            assert 1 <= counters["stats"]["unique_graphs"] <= 7
            compiled = dict(counters["stats"])
    assert counters["stats"] == compiled
    assert largest_difference(plain, learner) < 1e-5
    assert all(not torch.equal(before[name], each) for name, each in weights_of(learner).items())


@pytest.mark.slow
def test_compiled_layers_on_two_ranks(tmp_path: Path) -> None:
    """Sharded and in bf16, then resharded to replicas."""
    save_model("qwen2", tmp_path / "model")
    for found in launch("tests.learner.compiled_ranks", "compare", 2, tmp_path):
        assert min(found["gradients"]) > 0.1
        assert max(found["differences"]) < 0.02
        assert found["compiled"]


@pytest.mark.campaign
@pytest.mark.parametrize("ranks", [2, 4])
def test_compiled_layers_of_tensor_ranks(ranks: int, tmp_path: Path) -> None:
    """Alone, and sharded besides: packs that the ranks divide evenly, and others."""
    save_model("qwen2", tmp_path / "model")
    scratch = tmp_path / "ranks"
    for found in launch("tests.learner.compiled_ranks", "compare_tensor_parallel", ranks, scratch):
        assert min(found["gradients"]) > 0.1
        assert max(found["differences"]) < 1e-5
        assert found["compiled"]
        first, all_packs = found["graphs"]
        # As on one rank, and the gathering of what attention reads; for scores and for gradients.
        assert 1 <= first == all_packs <= 14


def test_a_compiler_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(numbers: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no working C++ compiler\nmore of it")

    monkeypatch.setattr(compiled_layers, "_tried", failing)
    with pytest.raises(
        ConfigError, match=r"update\.compile is true.*no working C\+\+ compiler: install"
    ):
        compiling(UpdateConfig(compile=True), torch.device("cpu"))
    assert not compiling(UpdateConfig(), torch.device("cpu"))
    assert "layers are not compiled" not in caplog.text
    with caplog.at_level(logging.WARNING):
        assert not compiling(UpdateConfig(), torch.device("meta"))
    assert "layers are not compiled" in caplog.text
