"""The loss that balances experts, against transformers' own, and routers that are kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from earl_core.config import parse_config
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.learner.data.packing import TrainingSample, pack
from earl_core.learner.measure_update import measure_training
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.pretrained.routers import Charge, routers_of
from earl_core.system.errors import ConfigError
from earl_core.trajectory.routing import RecordedRouting
from tests.families.registry import build
from tests.learner.helpers import save_model
from tests.learner.launched import launch
from tests.learner.test_routing import SHAPE, mixture

COEFFICIENT = 0.5


def routed_samples(directory: Path) -> list[TrainingSample]:
    """Samples, three of which begin alike, with the experts that transformers chooses, and none for
    their last token."""
    rng = np.random.default_rng(4)
    beginning = rng.integers(8, 90, 40)
    lengths = (9, 13, 21)
    every = [np.concatenate([beginning, rng.integers(8, 90, n)]) for n in lengths]
    every += [rng.integers(8, 90, n) for n in (30, 17)]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    samples = []
    for number, tokens in enumerate(every):
        with torch.no_grad():
            logits = model(torch.tensor(tokens)[None], output_router_logits=True).router_logits
        chosen = torch.stack([each.topk(SHAPE.chosen, dim=1)[1] for each in logits], dim=1)
        rows = chosen.flatten(1).numpy().astype(SHAPE.dtype)[:-1]
        mask = np.zeros(len(tokens), np.uint8)
        mask[-6:] = number != 4  # of the last one nothing is trained, and its experts count
        samples.append(
            TrainingSample(
                tokens=tokens.astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.full(len(tokens), -4.0, np.float32),
                advantages=np.full(len(tokens), (-1.0) ** number, np.float32),
                routing=RecordedRouting(
                    SHAPE, SHAPE.column(rows, len(tokens)), len(tokens), f"sample {number}"
                ),
                episode_id=number,
                group_id=number // 2,
                sample_id=number,
            )
        )
    return samples


def learner_of(
    directory: Path,
    coefficient: float = COEFFICIENT,
    frozen: bool = False,
    mesh: UpdateMesh | None = None,
    **update: object,
) -> PolicyLearner:
    given = {
        "precision": "fp32", "threads": 1, "learning_rate": 1e-3, "max_grad_norm": 1e9, **update
    }  # fmt: skip
    algorithm = {"kl": {"placement": "none"}, "router_aux_loss_coef": coefficient}
    return PolicyLearner(
        ModelConfig(path=str(directory), freeze_routers=frozen),
        UpdateConfig.model_validate(given),
        AlgorithmConfig.model_validate(algorithm),
        iterations=4,
        mesh=mesh,
    )


def gradients(learner: PolicyLearner, samples: Sequence[TrainingSample]) -> dict[str, torch.Tensor]:
    """Those of one step, and what it reports as `aux`."""
    found: dict[str, torch.Tensor] = {}
    learner.optimizer.step = lambda: found.update(  # type: ignore[method-assign]
        {n: p.grad.double() for n, p in learner.named_parameters() if p.grad is not None}
    )
    metrics = learner.update(samples, iteration=0)
    aux = metrics.get("router_aux_loss", 0.0)
    return found | {"aux": torch.tensor(aux, dtype=torch.float64)}


def trained(learner: PolicyLearner, samples: Sequence[TrainingSample]) -> dict[str, torch.Tensor]:
    """The weights after two updates."""
    for iteration in range(2):
        learner.update(samples, iteration=iteration)
    return {name: weight.clone() for name, weight in learner.named_weights().items()}


def plain(directory: Path, samples: Sequence[TrainingSample]) -> dict[str, torch.Tensor]:
    """The loss and its gradient by transformers in float64: one sample after the other, and all
    tokens but the last of each, by layer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    every = [
        model(torch.tensor(each.tokens[None], dtype=torch.int64), output_router_logits=True)
        for each in samples
    ]
    losses = [
        load_balancing_loss_func(
            (torch.cat([each.router_logits[layer][:-1] for each in every]),),
            SHAPE.experts,
            SHAPE.chosen,
        )
        for layer in range(SHAPE.layers)
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | {"aux": loss.detach()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("balanced") / "model")


@pytest.fixture(scope="module")
def samples(model: Path) -> list[TrainingSample]:
    return routed_samples(model)


def test_its_gradient_is_that_of_transformers(model: Path, samples: list[TrainingSample]) -> None:
    """Whatever the microbatches: samples in one pack share their beginning, and count it each."""
    assert pack(samples, range(3)).tokens.size < sum(len(each.tokens) for each in samples[:3])
    expected = plain(model, samples)
    without = gradients(learner_of(model, 0.0), samples)
    assert without["aux"] == 0.0
    cases = itertools.product((1, 100, 100_000), ("none",))
    for tokens, rung in [*cases, (100_000, "full"), (100_000, "selective")]:
        given = {"max_tokens_per_microbatch": tokens, "activation_checkpointing": rung}
        found = gradients(learner_of(model, **given), samples)
        torch.testing.assert_close(
            found["aux"].double(), expected["aux"].double(), rtol=1e-6, atol=0
        )
        for name in found.keys() - {"aux"}:
            own = (found[name] - without[name]) / COEFFICIENT
            wanted = expected.get(name, torch.zeros_like(own))
            torch.testing.assert_close(own, wanted, rtol=0, atol=2e-6, msg=f"{name} {given}")
            if name.endswith("gate.weight"):
                assert wanted.abs().max() > 1e-2


@pytest.mark.parametrize(
    ("family", "normalised"),
    [
        ("Mixtral", torch.softmax),
        # The topk of logits, sigmoids, and sigmoids whose correction the layer hands over.
        ("GraniteMoe", torch.softmax),
        ("Glm4Moe", None),
        ("MiniMaxM2", None),
        ("Afmoe", None),
    ],
)
def test_every_family_is_charged_for_its_probabilities(family: str, normalised: object) -> None:
    model = build(family).eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0, 0.2)
    routers = routers_of(model)
    assert routers is not None
    experts = routers.shape.experts
    charge = Charge(torch.randn(routers.shape.layers, experts), torch.rand(20))
    routers.choose(None, charge)
    (model(tokens).logits.sum() * 0.0).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    told = routers.charged()
    logits: list[torch.Tensor] = []
    for name in routers.names:
        model.get_submodule(name).register_forward_hook(
            lambda _, __, out: logits.append(
                next(each for each in out if each.shape == (20, experts))
            )
        )
    model.zero_grad()
    routers.choose(None)
    model(tokens)
    loss = torch.zeros(())
    for slopes, scores in zip(charge.slopes, logits, strict=True):
        gates = scores.float().sigmoid()
        shares = scores.softmax(1) if normalised else gates / gates.sum(1, keepdim=True)
        loss = loss + (charge.weights[:, None] * slopes * shares).sum()
    loss.backward()
    torch.testing.assert_close(told.float(), loss.detach(), atol=1e-4, rtol=1e-5)
    for name, parameter in model.named_parameters():
        none = torch.zeros_like(parameter)
        wanted = none if parameter.grad is None else parameter.grad
        given = found.get(name, none)
        torch.testing.assert_close(given, wanted, atol=1e-5, rtol=1e-4, msg=name)
    for name in routers.names:
        (matrix, *_) = model.get_submodule(name).parameters()
        assert matrix.grad is not None
        assert matrix.grad.abs().max() > 1e-2


def test_kept_routers_stay_and_all_else_is_trained_and_resumed(
    model: Path, samples: list[TrainingSample], tmp_path: Path
) -> None:
    """On whole models and on one that FSDP2 wraps, as a mixed one is on a single rank."""
    for precision in ("fp32", "bf16"):
        learner = learner_of(model, 0.0, True, precision=precision)
        before = {name: weight.clone() for name, weight in learner.named_weights().items()}
        assert learner.update(samples, iteration=0)["grad_norm"] > 0
        gates = {name for name in before if name.endswith("gate.weight")}
        assert len(gates) == SHAPE.layers
        for name, weight in learner.named_weights().items():
            assert torch.equal(weight, before[name]) == (name in gates), name
        assert learner.optimizer.state.keys() == before.keys() - gates
        assert learner.parallel.published.keys() == before.keys()
        learner.save(tmp_path / precision, {})
        again = learner_of(model, 0.0, True, precision=precision)
        again.restore(tmp_path / precision)
        for each in (learner, again):
            each.update(samples, iteration=1)
        assert again.optimizer.state.keys() == before.keys() - gates
        for name, weight in again.named_weights().items():
            assert torch.equal(weight, learner.named_weights()[name]), name


def test_a_model_without_routers_has_none_to_keep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"freeze_routers is true, but LlamaForCausalLM has no"):
        learner_of(save_model("llama", tmp_path / "dense"), frozen=True)


def test_ranks_compute_what_one_process_computes(tmp_path: Path) -> None:
    """Replicas, shards and context ranks; one of them has more microbatches than the other."""
    directory = mixture(tmp_path / "model")
    samples = routed_samples(directory)
    save_file(gradients(learner_of(directory), samples), tmp_path / "balanced.safetensors")
    kept = trained(learner_of(directory, 0.0, True, epsilon=1e-2), samples)
    save_file(kept, tmp_path / "kept.safetensors")
    for found in launch("tests.learner.router_ranks", "compare", 2, tmp_path):
        assert len(found) == 6
        assert max(found.values()) < 1e-5, found


def test_a_measurement_balances_random_experts(model: Path) -> None:
    run = {
        "name": "measured", "iterations": 1, "environment": {"name": "tic_tac_toe"},
        "model": {"path": str(model)}, "algorithm": {"router_aux_loss_coef": COEFFICIENT},
        "rollout": {"prompts_per_iteration": 2, "group_size": 2, "max_turns": 5},
    }  # fmt: skip
    learner = learner_of(model, max_tokens_per_microbatch=64)
    assert measure_training(learner, parse_config(run), 32, 4)["step_seconds"] > 0
