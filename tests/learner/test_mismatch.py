"""The watch over the difference between engine and trainer: what is measured, and what it stops."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from earl_core.algorithms.mismatch import MismatchWatch, UpdateRefused
from earl_core.dispatch import Batch
from earl_core.learner.data.samples import training_samples
from tests.learner.helpers import random_samples, save_model
from tests.learner.recorded import Recorded
from tests.learner.test_policy_learner import make_learner


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    made = Recorded.make(tmp_path_factory.mktemp("mismatch"), max_mismatch=None)
    yield made
    made.close()


def test_an_update_with_samples_of_another_policy_is_stopped_before_its_first_step(
    recorded: Recorded,
) -> None:
    """The recorded log-probs are no model's: whole nats from the trainer's."""
    worker, context = recorded.alone()
    context.iteration = 0
    before = worker._digest()
    with pytest.raises(UpdateRefused, match=r"update\.max_mismatch allows 0\.3 on average") as stop:
        worker.update(recorded.references(0), None, {})
    assert re.search(
        r"differ by [0-9.]+ nats on average .* iteration 0 was stopped", str(stop.value)
    )
    assert "Likely: precision" in str(stop.value)
    assert worker._digest() == before
    assert not worker._dirty


def test_tokens_of_an_older_policy_are_not_counted(tmp_path: Path) -> None:
    learner = make_learner(save_model("llama", tmp_path))
    samples = []
    scored = learner.score(random_samples(8))
    for number, (sample, scores) in enumerate(zip(random_samples(8), scored, strict=True)):
        older = number % 2
        samples.append(
            dataclasses.replace(
                sample,
                old_logprobs=None,
                rollout_logprobs=(scores + (3.0 if older else 0.25)).astype(np.float32),
                current=np.full(len(sample.tokens), 1 - older, dtype=np.uint8),
            )
        )
    seen: list[dict[str, float]] = []
    metrics = learner.update(samples, iteration=0, before_step=lambda m: seen.append(dict(m)))
    for found in (*seen, metrics):
        assert found["mismatch_mean"] == pytest.approx(0.25, abs=1e-4)
        assert found["mismatch_max"] == pytest.approx(0.25, abs=1e-4)
    assert len(seen) == 1
    none = [dataclasses.replace(s, current=np.zeros(len(s.tokens), np.uint8)) for s in samples]
    assert "mismatch_mean" not in learner.update(none, iteration=1, before_step=seen.append)
    assert len(seen) == 1


def test_every_minibatch_is_measured_before_its_step(tmp_path: Path) -> None:
    learner = make_learner(save_model("llama", tmp_path), minibatches=2, epochs=2)
    seen: list[float] = []
    learner.update(
        random_samples(8), iteration=0, before_step=lambda m: seen.append(m["mismatch_mean"])
    )
    assert len(seen) == 2


def test_versions_of_the_turns_say_which_tokens_are_current(recorded: Recorded) -> None:
    manifests = recorded.manifests(1)
    with Batch(recorded.store, manifests[:1]) as batch:
        own, other = (
            training_samples(batch, [None] * len(batch), policy_version=version)
            for version in (1, 2)
        )
        assert all(sample.current is None for sample in own)
        for sample in other:
            assert sample.current is not None
            assert len(sample.current) == len(sample.tokens)
            assert not (sample.current * sample.loss_mask).any()
        del own, other, sample


def test_warnings_and_causes_follow_precision_position_and_temperature() -> None:
    def metrics(mean: float, growth: float = 1.0) -> dict[str, float]:
        return {
            "mismatch_mean": mean, "mismatch_p95": 2.5 * mean, "mismatch_max": 6 * mean,
            "mismatch_growth": growth,
        }  # fmt: skip

    bf16, fp32 = MismatchWatch(False), MismatchWatch(True)
    assert bf16.warning({}, 0) is None
    assert bf16.warning(metrics(0.08), 0) is None
    assert "more than rounding explains" in str(bf16.warning(metrics(0.17), 0))
    bf16.check(metrics(0.29), 0)
    assert fp32.warning(metrics(2e-5), 0) is None
    assert "precision" not in str(fp32.warning(metrics(2e-3), 0))
    with pytest.raises(UpdateRefused, match=r"allows 0\.01"):
        fp32.check(metrics(0.02), 0)
    MismatchWatch(True, bound=0.5).check(metrics(0.4), 0)
    with pytest.raises(UpdateRefused, match=r"Likely: position factors.*5\.0 times"):
        fp32.check(metrics(0.4, growth=5.0), 0)
    with pytest.raises(UpdateRefused, match=r"Likely: stale weights.*; temperature .* is 0\.7"):
        MismatchWatch(False, temperature=0.7).check(metrics(0.4), 3)
