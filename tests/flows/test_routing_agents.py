"""Agents behind the gateway of a mixture on vLLM: the experts that were played are replayed as
closely as those of the built-in loop."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from earl_core.config import RunConfig
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.control.run_controller import RunController
from earl_core.dispatch import Batch, Manifest
from earl_core.learner.data.masks import masks_of
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.data.samples import recorded_routing, training_samples
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.pretrained.grammars import grammars_of
from earl_core.trajectory.schema import SAMPLE_BITS
from flows.debug import Debugged, opened_here
from tests.conformance.test_whole_iterations import TEMPERATURE, configured
from tests.engines.forked import forked_engines
from tests.learner.test_routing import SHAPE, mixture, routed, rows_of
from tests.rollout.tool_templates import QWEN

pytest.importorskip("vllm")

ENVIRONMENTS = [
    {"agent": "tests.rollout.agents:crew", "label": "crew"},
    {"name": "tests.conformance.letters:Letters", "label": "letters"},
]
ALGORITHM = {
    "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
    "advantage": {"name": "rloo"},
    "kl": {"placement": "none"},
}
EXACT = 1e-5
"""Nats, in float32."""


def settings(directory: Path, dtype: str) -> RunConfig:
    model = mixture(directory / "model", template=QWEN, head_dim=32, max_position_embeddings=4096)
    config = configured(model, ALGORITHM, directory, iterations=2)
    del config["environment"]
    config["environments"] = ENVIRONMENTS
    config["rollout"] |= {
        "engine": "vllm", "dtype": dtype, "vllm": {"kv_cache_gib": 1}, "max_turns": 8,
        "prompts_per_iteration": 4, "max_tokens_per_turn": 300,
        "requests": {"constrained": "engine"},
    }  # fmt: skip
    config["update"] |= {"epochs": 1, "precision": "fp32" if dtype == "float32" else "bf16"}
    return RunConfig.model_validate(config)


@dataclasses.dataclass(frozen=True)
class Played:
    """One sample. label: of its environment. role: of who played it."""

    sample: TrainingSample
    label: str
    role: str


def played(controller: RunController, rollout: Manifest) -> list[Played]:
    """What the trainer reads of a rollout, copied."""
    make = partial(grammars_of, Path(controller.config.initial_model.path), False)
    with Batch(controller.run.store, [rollout]) as batch:
        routing = recorded_routing(batch, SHAPE)
        samples = training_samples(batch, masks_of(batch, make), routing=routing)
        samples, routing = copy.deepcopy(samples), []
        about = (batch.strings(name) for name in ("environment", "role"))
        return [Played(*each) for each in zip(samples, *about, strict=True)]


def mismatch(model: Path, precision: str, samples: Sequence[TrainingSample]) -> np.ndarray:
    """How far the trainer's log-probs of all tokens that were sampled without a grammar are from
    the engine's, in nats."""
    learner = PolicyLearner(
        ModelConfig(path=str(model)),
        UpdateConfig(precision=precision, threads=1),  # type: ignore[arg-type]
        AlgorithmConfig(),
        temperature=TEMPERATURE,
    )
    apart = [
        np.abs(score - sample.rollout_logprobs)[freely_sampled(sample)]
        for score, sample in zip(learner.score(samples), samples, strict=True)
    ]
    return np.concatenate(apart)


def freely_sampled(sample: TrainingSample) -> np.ndarray:
    sampled: np.ndarray = sample.loss_mask == 1
    return sampled if sample.masks is None else sampled & (sample.masks.index < 0)


def one_off(sample: TrainingSample) -> TrainingSample:
    """With each token's experts given to the next one."""
    return routed(sample, np.roll(rows_of(sample), 1, axis=0))


def check_experts(model: Path, samples: Sequence[TrainingSample]) -> None:
    """Every token but a sample's last, which no pass has computed, has the experts that
    transformers' own routers choose on the sample's text, by the logits that they return."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for sample in samples:
        with torch.no_grad():
            given = torch.tensor(sample.tokens[None].astype(np.int64))
            logits = policy(given, output_router_logits=True).router_logits
        chosen = torch.stack([each.topk(SHAPE.chosen).indices for each in logits], dim=1)
        recorded = rows_of(sample).reshape(len(sample.tokens), SHAPE.layers, SHAPE.chosen)
        expected = np.sort(chosen.numpy())[:-1]
        np.testing.assert_array_equal(np.sort(recorded)[:-1], expected)


def check_conversations(rows: Sequence[Played]) -> None:
    """Of an episode of the crew, what the planner left out and what the solver asked a second time
    are samples of their own; an answer that it went away from is none."""
    solved = [sum(row.role == "solver" for row in of) for of in episodes(rows)]
    planned = [sum(row.role == "planner" for row in of) for of in episodes(rows)]
    assert planned == [2] * len(planned)
    # It may have been there before the solver was gone.
    assert set(solved) <= {3, 4}
    assert 3 in solved


def episodes(rows: Sequence[Played]) -> list[list[Played]]:
    """The samples of each episode, whose roles the trainer takes for episodes of their own."""
    found: dict[int, list[Played]] = {}
    for row in rows:
        found.setdefault(row.sample.sample_id >> SAMPLE_BITS, []).append(row)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.campaign)])
def test_agents_are_replayed_as_closely_as_the_built_in_loop(dtype: str, tmp_path: Path) -> None:
    """In float32 exactly, in bfloat16 by the mean."""
    config = settings(tmp_path, dtype)
    model, precision = Path(config.initial_model.path), config.update.precision
    with forked_engines(), opened_here(config, lambda *_: None) as controller:
        for iteration in range(2):
            rollout, _ = Debugged(controller, iteration).repeat("rollout")
            rows = played(controller, rollout)
            check_conversations([row for row in rows if row.label == "crew"])
            sealed = Debugged(controller, iteration).whole()
            assert sealed["rollout"].shards[0].file == rollout.shards[0].file
            update = sealed["update"].metrics
            assert update["grad_norm"] > 0.01
            apart = {}
            for label in ("crew", "letters"):
                samples = [row.sample for row in rows if row.label == label]
                apart[label] = mismatch(model, precision, samples)
                moved = mismatch(model, precision, [one_off(each) for each in samples])
                assert moved.mean() > 10 * apart[label].mean()
                if dtype == "float32":
                    assert apart[label].max() < EXACT
                    check_experts(model, samples)
            if dtype == "float32":
                # Those under grammars, too.
                assert update["mismatch_max"] < EXACT
                assert update["routing_changed_share"] == 0.0
            else:
                assert apart["crew"].mean() < 1.5 * apart["letters"].mean()
            model = tmp_path / f"runs/run/checkpoints/{iteration:06d}/policy"
