"""Learners that meshes are compared by: models, algorithms, and how samples are dealt."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.microbatches import Algorithm
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.learner.value_regression import ValueRegression
from earl_core.tensors.slices import local_box, local_part
from earl_core.trajectory.routing import RecordedRouting, RoutingShape
from tests.learner.helpers import random_samples, with_old_logprobs
from tests.learner.test_policy_learner import make_learner

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}


def model(kind: str) -> PreTrainedModel:
    """Vocabularies that no number of ranks divides, tied and not, with and without biases; samples
    hold padding tokens, whose embedding gets no gradient from look-ups."""
    torch.manual_seed(3)
    if kind == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                **SHAPE,
                vocab_size=43,
                pad_token_id=7,
                tie_word_embeddings=False,
                attention_bias=True,
                mlp_bias=True,
            )
        )
    if kind == "qwen3":
        return Qwen3ForCausalLM(
            Qwen3Config(**SHAPE, vocab_size=41, head_dim=8, tie_word_embeddings=False)
        )
    if kind in ("mixture", "one_chosen"):
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **SHAPE,
                vocab_size=41,
                head_dim=8,
                num_experts=8,
                num_experts_per_tok=2 if kind == "mixture" else 1,
                moe_intermediate_size=16,
                norm_topk_prob=kind == "mixture",
                tie_word_embeddings=False,
            )
        )
    if kind == "shared_experts":
        return Glm4MoeForCausalLM(
            Glm4MoeConfig(
                **SHAPE,
                vocab_size=41,
                head_dim=8,
                n_routed_experts=8,
                num_experts_per_tok=2,
                n_shared_experts=1,
                first_k_dense_replace=1,
                n_group=2,
                topk_group=1,
                moe_intermediate_size=16,
            )
        )
    return Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, vocab_size=41, pad_token_id=5, tie_word_embeddings=True)
    )


@dataclass(frozen=True)
class Case:
    """A learner, its samples, and how they are dealt: each group's data rank, modulo their number.

    A smooth Adam (large epsilon) lets errors of gradients show in the weights as they are.
    """

    kind: str = "llama"
    algorithm: dict[str, Any] = field(default_factory=dict)
    update: dict[str, Any] = field(default_factory=dict)
    samples: int = 18
    dealt: tuple[int, ...] = (0, 1, 2, 3)
    chunk_tokens: int | None = None
    adapter: dict[str, Any] | None = None

    def learner(self, scratch: Path, mesh: UpdateMesh | None = None) -> PolicyLearner:
        settings = {"minibatches": 3, "epsilon": 1e-2, "learning_rate": 0.03, "weight_decay": 0.1}
        return make_learner(
            scratch / self.kind,
            self.objective,
            mesh=mesh,
            logits_chunk_tokens=self.chunk_tokens,
            adapter=self.adapter,
            **settings | self.update,
        )

    @property
    def objective(self) -> dict[str, Any] | Algorithm:
        return self.algorithm

    def scored(
        self, samples: list[TrainingSample], scores: list[np.ndarray]
    ) -> list[TrainingSample]:
        """The samples with what the learner says of them before its update."""
        return with_old_logprobs(samples, scores)

    def dealt_to(self, mesh: UpdateMesh) -> list[TrainingSample]:
        samples = random_samples(self.samples, samples_per_episode=2)
        return [
            sample
            for sample in samples
            if self.dealt[sample.group_id % len(self.dealt)] % mesh.deployment.data_parallel
            == mesh.data_rank
        ]


@dataclass(frozen=True)
class Valued(Case):
    """A critic that has learnt something: its head is not 0."""

    def learner(self, scratch: Path, mesh: UpdateMesh | None = None) -> PolicyLearner:
        learner = super().learner(scratch, mesh)
        head = dict(learner.named_parameters())["lm_head.weight"]
        box = local_box(head)
        with torch.no_grad():
            if box.numel:
                local_part(head).copy_(torch.linspace(-0.1, 0.1, head.shape[1])[None][box.index])
        return learner

    @property
    def objective(self) -> Algorithm:
        return ValueRegression(0.01)

    def scored(
        self, samples: list[TrainingSample], scores: list[np.ndarray]
    ) -> list[TrainingSample]:
        pairs = zip(samples, scores, strict=True)
        return [dataclasses.replace(sample, values=values) for sample, values in pairs]


CASES = {
    "ppo_clip": Case(
        algorithm={
            "policy_loss": {"name": "ppo_clip", "clip_high": 0.28},
            "kl": {"placement": "loss", "coefficient": 0.1},
            "importance_correction": {"cap": 1.5},
            "entropy_coefficient": 0.01,
        },
        update={"max_grad_norm": 0.5},
    ),
    "gspo_tied": Case(
        kind="qwen2",
        algorithm={"policy_loss": "gspo", "aggregation": "sequence_mean_token_mean"},
        update={"activation_checkpointing": "selective"},
        chunk_tokens=3,
    ),
    "one_rank_has_all": Case(
        algorithm={
            "policy_loss": {"name": "dppo", "mask_low": 0.005, "mask_high": 0.002},
            "aggregation": "sequence_mean_token_sum",
            "entropy_coefficient": 0.01,
        },
        dealt=(0,),
        chunk_tokens=5,
    ),
    "uneven_tied": Case(
        kind="qwen2",
        algorithm={
            "aggregation": {"name": "constant", "length": 64},
            "importance_correction": {"level": "sequence"},
        },
        update={"max_tokens_per_microbatch": 1, "activation_checkpointing": "full"},
        dealt=(0, 0, 1, 0, 2),
    ),
    "one_microbatch": Case(
        algorithm={"policy_loss": "policy_gradient"},
        update={"max_tokens_per_microbatch": 100_000, "minibatches": 1, "epochs": 3},
    ),
    "critic": Valued(kind="qwen2", update={"max_grad_norm": 0.5}, dealt=(0, 0, 1, 0, 2)),
    "norms_of_heads": Case(kind="qwen3"),
}

# The first step moves B alone where it begins as 0.
ADAPTERS = {
    "all_linear": Case(
        algorithm=CASES["ppo_clip"].algorithm,
        update={"max_grad_norm": 0.5},
        adapter={"rank": 3, "alpha": 6},
    ),
    "some_tied": Case(
        kind="qwen2",
        update={"activation_checkpointing": "full", "max_tokens_per_microbatch": 1},
        dealt=(0, 0, 1, 0, 2),
        chunk_tokens=3,
        adapter={"rank": 8, "alpha": 4, "targets": ["q_proj", "o_proj", "down_proj"]},
    ),
}


@dataclass(frozen=True)
class Told(Case):
    """The experts of each token are told: the first of each layer, or any two."""

    def dealt_to(self, mesh: UpdateMesh) -> list[TrainingSample]:
        return [
            dataclasses.replace(each, routing=self._routing(each.sample_id, len(each.tokens)))
            for each in super().dealt_to(mesh)
        ]

    def _routing(self, seed: int, tokens: int) -> RecordedRouting:
        layers = SHAPE["num_hidden_layers"]
        shape = RoutingShape(layers, 1 if self.kind == "one_chosen" else 2, 8)
        rows = np.zeros((tokens, shape.width), np.uint8)
        if shape.chosen > 1:
            every = np.random.default_rng(seed).random((tokens, layers, 8)).argsort(axis=2)
            rows[:] = every[:, :, :2].reshape(tokens, -1)
        return RecordedRouting(shape, rows, tokens, f"sample {seed}")


MIXTURES = {
    "mixture": Case(
        kind="mixture",
        algorithm=CASES["ppo_clip"].algorithm,
        update={"max_grad_norm": 0.5, "max_tokens_per_microbatch": 1},
        dealt=(0, 0, 1, 0, 2),
    ),
    "shared_experts": Case(
        kind="shared_experts", update={"activation_checkpointing": "selective"}, dealt=(0,)
    ),
    "one_expert": Told(kind="one_chosen", update={"activation_checkpointing": "full"}),
}

# A sample a microbatch, so that ranks which share no sample compute what one process does, bit for
# bit, and add the same numbers up in float32.
MIXED = Case(
    kind="qwen2",
    algorithm={"entropy_coefficient": 0.01},
    update={
        "precision": "bf16",
        "max_tokens_per_microbatch": 1,
        "activation_checkpointing": "full",
    },
)

# Rounding would choose other experts.
MIXED_MIXTURE = Told(kind="mixture", update=MIXED.update)
