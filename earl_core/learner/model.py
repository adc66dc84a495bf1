"""A causal language model over packed microbatches: log-probs of the trained tokens only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.varlen import register_attention
from earl_core.learner.data.packing import PackedMicrobatch
from earl_core.learner.few_layers import few_layers
from earl_core.learner.head import EntropyMode, decoder_of, head_of
from earl_core.learner.packing_check import check_packing
from earl_core.learner.parallel.vocabulary_parallel import VocabularyShard
from earl_core.pretrained.float32_head import Float32Head
from earl_core.pretrained.huggingface import (
    GradientCheckpointingLayer,
    PreTrainedModel,
)

# Logits held at a time: 2**25 float32 numbers are 128 MiB. More are computed in chunks.
LOGITS_PER_CHUNK = 2**25


@dataclass(frozen=True)
class PackedTensors:
    """What the model needs of a `PackedMicrobatch`, on the model's device; T and T' as there."""

    tokens: torch.Tensor
    position_ids: torch.Tensor
    boundaries: SampleBoundaries
    predictors: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def from_microbatch(
        cls, packed: PackedMicrobatch, device: torch.device | str = "cpu"
    ) -> PackedTensors:
        """Move a microbatch to the device; on the CPU nothing is copied."""

        def move(array: object) -> torch.Tensor:
            return torch.as_tensor(array).to(device, non_blocking=True)

        return cls(
            tokens=move(packed.tokens),
            position_ids=move(packed.position_ids),
            boundaries=SampleBoundaries.from_tree(packed.tree, device),
            predictors=move(packed.predictors),
            targets=move(packed.targets),
        )


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep each layer's input only, and compute the rest again in the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def prepare_for_packing(model: PreTrainedModel) -> None:
    """Choose `earl_varlen`, switch dropout and caches off, and prove that packing is exact.

    Raises ConfigError for an architecture that mixes packed samples or changes logits after its
    head.
    """
    settle(model)
    small = few_layers(model)
    check_packing(small, decoder_of(small), head_of(small))


def settle(model: PreTrainedModel) -> None:
    """Choose `earl_varlen`, switch dropout, other randomness and caches off.

    Layers that can be checkpointed stay in training mode, because transformers checkpoints
    activations only then; what is inside of them does not.
    """
    model.set_attn_implementation(register_attention())
    model.config.use_cache = False
    model.eval()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "resid_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def logprobs_of_trained(
    model: PreTrainedModel,
    packed: PackedTensors,
    *,
    temperature: float,
    entropy: EntropyMode = "none",
    chunk_tokens: int | None = None,
    float32_head: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs (and entropies) of the trained tokens under softmax(logits / temperature).

    Returns float32 [T'] and float32 [T'] or None. chunk_tokens, float32_head: see `Scoring`.
    """
    scoring = Scoring(head_of(model), chunk_tokens=chunk_tokens, float32_head=float32_head)
    return PolicyModule(model, scoring)(packed, temperature, entropy)


class Scoring(nn.Module):
    """A model's head and what is made of its logits, so that what wraps modules gathers the head
    once, whatever the chunks.

    The head runs at the trained positions only, in chunks of `chunk_tokens`, or of as many as give
    `LOGITS_PER_CHUNK` logits; with more than one chunk each is recomputed in the backward pass, so
    memory holds one chunk whatever T' is. vocabulary: this rank's part where the head is split over
    ranks; the result is the whole one. float32_head: the logits are computed in float32 also where
    the parameters are bf16.
    """

    def __init__(
        self,
        head: nn.Module,
        *,
        chunk_tokens: int | None = None,
        vocabulary: VocabularyShard | None = None,
        float32_head: bool = False,
    ) -> None:
        super().__init__()
        self.head = head
        self.chunk_tokens = chunk_tokens
        self.vocabulary = vocabulary
        self.float32_head = float32_head

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, entropy: EntropyMode
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `logprobs_of_trained`. hidden [T', hidden]: at the trained positions."""
        head: nn.Module | Float32Head = self.head
        if self.float32_head:
            head, hidden = Float32Head(self.head), hidden.float()
        return _score_in_chunks(
            head, hidden, targets, temperature, entropy, self.chunk_tokens, self.vocabulary
        )


def _score_in_chunks(
    head: nn.Module | Float32Head,
    hidden: torch.Tensor,
    all_targets: torch.Tensor,
    temperature: float,
    entropy: EntropyMode,
    chunk_tokens: int | None,
    vocabulary: VocabularyShard | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    score: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = _score_positions
    width = cast(torch.Tensor, head.weight).shape[0]
    if vocabulary is not None:
        hidden, score, width = vocabulary.enter(hidden), vocabulary.score, vocabulary.most
    chunk = chunk_tokens or max(1, LOGITS_PER_CHUNK // width)
    if hidden.shape[0] <= chunk:
        return score(head, hidden, all_targets, temperature, entropy)
    parts = [
        checkpoint(score, head, part, targets, temperature, entropy, use_reentrant=False)
        for part, targets in zip(
            torch.split(hidden, chunk), torch.split(all_targets, chunk), strict=True
        )
    ]
    logprobs = torch.cat([part[0] for part in parts])
    return logprobs, None if entropy == "none" else torch.cat([part[1] for part in parts])


def _score_positions(
    head: nn.Module | Float32Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    entropy: EntropyMode,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    distribution = torch.log_softmax(logits, dim=-1)
    logprobs = -F.nll_loss(distribution, targets, reduction="none")
    if entropy == "none":
        return logprobs, None
    with torch.set_grad_enabled(entropy == "differentiable" and torch.is_grad_enabled()):
        return logprobs, -(distribution.exp() * distribution).sum(dim=-1)


class PolicyModule(nn.Module):
    """A model and its scoring: log-probs of a microbatch's trained tokens."""

    def __init__(self, causal_lm: PreTrainedModel, scoring: Scoring) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.scoring = scoring

    def forward(
        self, packed: PackedTensors, temperature: float, entropy: EntropyMode
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `logprobs_of_trained`."""
        output = decoder_of(self.causal_lm)(
            input_ids=packed.tokens[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            sample_boundaries=packed.boundaries,
        )
        hidden = output[0][0].index_select(0, packed.predictors)
        return self.scoring(hidden, packed.targets, temperature, entropy)
