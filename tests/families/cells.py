"""What is tried of a family: a trial fails, is refused (ConfigError), or says that it was equal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from earl_core.config import parse_config
from earl_core.config.feasibility import check_stages
from earl_core.config.model import ModelConfig
from earl_core.control.hardware import read_hardware
from earl_core.learner.data.packing import TrainingSample, pack
from earl_core.learner.loading import load_policy
from earl_core.learner.model import PackedTensors, logprobs_of_trained
from earl_core.learner.parallel.mesh import create_mesh
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.pretrained.routers import unread_routers
from earl_core.rollout.engines.engine import Completion
from earl_core.trajectory.routing import RecordedRouting
from earl_core.weights.publish import publish
from tests.engines.driver import Driver, request
from tests.engines.starting import start
from tests.families.registry import FAMILIES, build
from tests.learner.helpers import (
    VOCABULARY,
    eager_model,
    plain_logprobs,
    random_samples,
    save_model,
)
from tests.learner.test_policy_learner import TEMPERATURE, make_learner
from tests.learner.test_prefix_tree import branching
from tests.learnt import assert_learnt

EXACT = 5e-6
"""Of log-probs in nats, of a gradient relative to its norm: packs against plain transformers."""

ENGINE = 1e-5
"""Nats: an engine against the trainer."""

YES = "yes"
UNRECORDED = "yes: with `record_routing: off`"


def save(name: str, directory: Path) -> Path:
    """A directory of the family's random model."""
    return save_model(build(name), directory, FAMILIES[name].spread)


def packing(directory: Path) -> str:
    """Log-probs and gradients of packed samples with shared prefixes against plain transformers,
    one sample at a time."""
    samples = random_samples(6, seed=5, longest=60)
    learner = make_learner(directory, max_tokens_per_microbatch=128)
    scored = learner.score(samples)
    plain = eager_model(directory)
    for sample, found in zip(samples, scored, strict=True):
        expected, _ = plain_logprobs(plain, sample, TEMPERATURE)
        np.testing.assert_allclose(
            found[sample.loss_mask == 1], expected.detach(), atol=EXACT, rtol=0
        )
    again = learner.score(samples)
    assert all(np.array_equal(a, b) for a, b in zip(scored, again, strict=True))
    packed, wanted = _packed_gradients(directory), _plain_gradients(directory)
    assert packed.keys() == wanted.keys()
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    # Gemma3n's input gates have none, as its initial weights are.
    idle = [name for name, gradient in wanted.items() if not gradient.any()]
    assert all("per_layer" in name for name in idle), idle
    for name, gradient in wanted.items():
        # 1e-7 of the largest is rounding. So are those of a key's bias, which moves all scores of a
        # query alike.
        norm = max(float(gradient.norm()), 2e-2 * largest)
        assert float((packed[name] - gradient).norm()) < EXACT * norm, name
    return YES


def _packed_gradients(directory: Path) -> dict[str, torch.Tensor]:
    """Of a sum of log-probs, of samples that share prefixes, in one pack."""
    model = load_policy(ModelConfig(path=str(directory)), create_mesh()).model
    samples = branching(5, 8)
    packed = PackedTensors.from_microbatch(pack(samples, range(len(samples))))
    assert len(packed.tokens) < sum(len(sample.tokens) for sample in samples)
    logprobs, _ = logprobs_of_trained(model, packed, temperature=TEMPERATURE)
    return _gradients(model, logprobs)


def _plain_gradients(directory: Path) -> dict[str, torch.Tensor]:
    """The same, sample by sample, in plain transformers."""
    model = eager_model(directory)
    each = [plain_logprobs(model, sample, TEMPERATURE)[0] for sample in branching(5, 8)]
    return _gradients(model, torch.cat(each))


def _gradients(model: torch.nn.Module, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    towards = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0))
    torch.autograd.backward((logprobs * towards).sum())
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def engine(kind: str, directory: Path, scratch: Path) -> str:
    """Log-probs of an engine's answers against the trainer's, at first and after each of two
    updates by them. kind: "torch" or "vllm"."""
    _check_start(kind, directory)
    learner = make_learner(directory, max_tokens_per_microbatch=256)
    unread = bool(unread_routers(learner.model))
    driver = start(kind, directory, scratch, record_routing=not unread)
    try:
        for version in range(3):
            samples = _play(driver, version)
            for sample, found in zip(samples, learner.score(samples), strict=True):
                np.testing.assert_allclose(found, sample.rollout_logprobs, atol=ENGINE, rtol=0)
            if version < 2:
                _update(driver, learner, samples, scratch / "published", version)
    finally:
        driver.close()
    return UNRECORDED if unread else YES


def _check_start(kind: str, directory: Path) -> None:
    """Raise what a run of this engine on this machine is refused with."""
    config = parse_config(
        {
            "name": "family",
            "iterations": 1,
            "model": {"path": str(directory)},
            "environment": {"name": "tic_tac_toe"},
            "rollout": {
                "engine": kind,
                "prompts_per_iteration": 1,
                "group_size": 2,
                "max_turns": 2,
            },
        }
    )
    check_stages(config, read_model_shape(directory), read_hardware())


def _update(
    driver: Driver,
    learner: PolicyLearner,
    samples: list[TrainingSample],
    directory: Path,
    version: int,
) -> None:
    """Train on the samples, and have the engine play the new weights."""
    before = {name: each.clone() for name, each in learner.named_weights().items()}
    norm = learner.update(samples, iteration=version)["grad_norm"]
    assert_learnt([norm], before, learner.named_weights())
    directory.mkdir(exist_ok=True)
    new = publish(learner.parallel.published, directory, version + 1, "float32")
    driver.run(driver.engine.play_under(new))


def _play(driver: Driver, version: int) -> list[TrainingSample]:
    """Games of two turns, of uneven lengths, with advantages of both signs."""
    rng = np.random.default_rng(version)
    contexts = [rng.integers(3, VOCABULARY, length).tolist() for length in (3, 41, 17, 26)]
    logprobs: list[list[float]] = [[0.0] * len(each) for each in contexts]
    answers: list[Completion] = []
    for turn in range(2):
        asked = [
            request(index, context, max_tokens=4 + 3 * index, seed=9 * version + index + 99 * turn)
            for index, context in enumerate(contexts)
        ]
        answers = driver.generate(asked)
        for index, answer in enumerate(answers):
            more = rng.integers(3, VOCABULARY, 2).tolist() if turn == 0 else []
            contexts[index] += [*answer.tokens, *more]
            logprobs[index] += [*answer.logprobs, *[0.0] * len(more)]
    driver.engine.finish(range(len(contexts)))
    shape = driver.engine.routing
    samples = []
    for index, (tokens, played) in enumerate(zip(contexts, logprobs, strict=True)):
        rollout = np.array(played, np.float32)
        routing = None
        if shape is not None:
            numbers = shape.column(answers[index].routing, len(tokens))
            routing = RecordedRouting(shape, numbers, len(tokens), f"sample {index}")
        samples.append(
            TrainingSample(
                tokens=np.array(tokens, np.int32),
                loss_mask=(rollout != 0).astype(np.uint8),
                rollout_logprobs=rollout,
                advantages=np.full(len(tokens), (-1.0) ** index, np.float32),
                routing=routing,
                episode_id=index,
                group_id=index // 2,
                sample_id=index,
            )
        )
    return samples
