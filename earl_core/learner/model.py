"""A causal language model over packed microbatches: log-probs of the trained tokens only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from earl_core.deployment.stage_deployment import Checkpointing
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.recurrence import carry_states
from earl_core.learner.attention.varlen import register_attention
from earl_core.learner.compiled_layers import layers_compiled
from earl_core.learner.data.packing import PackedMicrobatch
from earl_core.learner.layer_probe import layer_probe
from earl_core.learner.lm_head import EntropyMode, decoder_of, head_of
from earl_core.learner.low_rank import pairs_of
from earl_core.learner.packing_check import check_packing
from earl_core.learner.parallel.vocabulary_parallel import VocabularyShard
from earl_core.learner.target_masks import TargetMasks
from earl_core.learner.token_logprobs import HeadScore, multiply
from earl_core.pretrained.huggingface import GradientCheckpointingLayer, PreTrainedModel
from earl_core.pretrained.logit_transform import LogitTransform
from earl_core.pretrained.routers import Charge, routers_of


@dataclass(frozen=True)
class PackedTensors:
    """The tensors that the model needs of a `PackedMicrobatch`, on the model's device; T and T' as
    there. targets: None: the likeliest ones. masks: of those that were sampled under a grammar.
    routing: [T, width], the experts that tokens are given; None: the routers choose. copies:
    float32 [T], how many samples have each token, where there is a routing. charge: of the routers,
    for this pass."""

    tokens: torch.Tensor
    position_ids: torch.Tensor
    boundaries: SampleBoundaries
    predictors: torch.Tensor
    targets: torch.Tensor | None
    masks: TargetMasks | None = None
    routing: torch.Tensor | None = None
    copies: torch.Tensor | None = None
    charge: Charge | None = None

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
            masks=TargetMasks.of(packed.masks, device),
            routing=None if packed.routing is None else move(packed.routing),
            copies=None if packed.copies is None else move(packed.copies),
        )


def checkpoint_activations(model: PreTrainedModel, rung: Checkpointing) -> None:
    """Have the layers keep what the rung says, and compute the rest again in the backward pass.

    Call it after the layers are compiled: the compiler keeps one product more than `selective`, and
    computes the rest again in fewer kernels.
    """
    if rung == "none" or (rung == "selective" and layers_compiled(model)):
        if model.is_gradient_checkpointing:
            model.gradient_checkpointing_disable()
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if rung == "selective":
        ranks = {part.shape[0] for name, part in pairs_of(model).items() if name.endswith("lora_A")}
        options["context_fn"] = partial(_selective_contexts, frozenset(ranks))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def prepare_for_packing(model: PreTrainedModel) -> None:
    """Choose `earl_varlen`, switch dropout and caches off, and prove that packing is exact. Raises
    ConfigError for a model that mixes packed samples or changes logits as no other does."""
    settle(model)
    small = layer_probe(model)
    check_packing(small, decoder_of(small), head_of(small))


def settle(model: PreTrainedModel) -> None:
    """Choose `earl_varlen`, and for layers with a state what computes them over trees; switch
    dropout, other randomness and caches off.

    Layers that can be checkpointed stay in training mode, because transformers checkpoints
    activations only then; what is inside of them does not.
    """
    model.set_attn_implementation(register_attention())
    carry_states(model)
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

    Returns float32 [T'] and float32 [T'] or None. The head runs at the trained positions only, in
    chunks, so that memory holds one chunk whatever T' is; see `HeadScore` for the settings.
    """
    scoring = Scoring(
        head_of(model),
        LogitTransform.of(model.config),
        chunk_tokens=chunk_tokens,
        float32_head=float32_head,
    )
    return PolicyModule(model, scoring)(packed, temperature, entropy)


class Scoring(nn.Module):
    """A model's head and what is made of its logits, so that what wraps modules gathers the head
    once, whatever the chunks. See `HeadScore` for the settings.
    """

    def __init__(
        self,
        head: nn.Module,
        transform: LogitTransform,
        *,
        chunk_tokens: int | None = None,
        vocabulary: VocabularyShard | None = None,
        float32_head: bool = False,
    ) -> None:
        super().__init__()
        self.head = head
        self.transform = transform
        self.chunk_tokens = chunk_tokens
        self.vocabulary = vocabulary
        self.float32_head = float32_head
        self.compiled = False

    def forward(
        self, states: torch.Tensor, packed: PackedTensors, temperature: float, entropy: EntropyMode
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Score the trained tokens as `logprobs_of_trained` does; without targets the likeliest
        ones, returned in place of entropies, int64 [T']. states: [T, hidden], of all positions."""
        score = HeadScore(
            temperature,
            entropy,
            self.chunk_tokens,
            self.vocabulary,
            self.float32_head,
            compiled=self.compiled,
            transform=self.transform,
        )
        if packed.targets is not None:
            return score(self.head, states, packed.predictors, packed.targets, packed.masks)
        tokens = likeliest(
            self.head, states, packed.predictors, self.vocabulary, float32=self.float32_head
        )
        return score(self.head, states, packed.predictors, tokens)[0], tokens


class PolicyModule(nn.Module):
    """A model and its scoring: log-probs of a microbatch's trained tokens."""

    def __init__(self, causal_lm: PreTrainedModel, scoring: Scoring) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.scoring = scoring
        self.routers = routers_of(causal_lm)

    def forward(
        self, packed: PackedTensors, temperature: float, entropy: EntropyMode
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the decoder and score as `Scoring` does."""
        if self.routers is not None:
            self.routers.choose(packed.routing, packed.charge)
        output = decoder_of(self.causal_lm)(
            input_ids=packed.tokens[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            sample_boundaries=packed.boundaries,
        )
        return self.scoring(output[0].squeeze(0), packed, temperature, entropy)


# Scores of short samples on a CPU (`baddbmm`) are large and not among them.
_KEPT = frozenset(
    {
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten._grouped_mm",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "torch_attn._varlen_attn",
        "_c10d_functional.all_reduce",
        "_c10d_functional.all_to_all_single",
        "_c10d_functional.reduce_scatter_tensor",
    }
)


def _selective_contexts(ranks: frozenset[int]) -> tuple[Any, Any]:
    """Selective activation checkpointing: the contexts of a layer's forward pass and of computing
    it again, as `checkpoint` takes them (`context_fn`). ranks: of an adapter's pairs.

    Results that are dear to compute are kept: matrix products, attention, and the sums over tensor
    ranks that follow a product. Norms, activations and everything else that goes element by element
    is computed again, and so are the keys and values that context ranks gather, and the product of
    a pair's B, which is as large as the matrix's own and has as few summands as the pair has ranks.
    After torchtitan's `activation_checkpoint.py`.
    """
    policy = partial(_checkpoint_policy, ranks)
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts


def _checkpoint_policy(
    ranks: frozenset[int], context: Any, operator: Any, *arguments: Any, **named: Any
) -> CheckpointPolicy:
    kept = _is_kept(operator)
    if kept and operator is torch.ops.aten.mm.default:
        kept = arguments[1].shape[0] not in ranks
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_kept(operator: Any) -> bool:
    # By name, because a kernel may be registered when it is first used.
    return str(operator).removesuffix(".default") in _KEPT


@torch.no_grad()
def likeliest(
    head: nn.Module,
    states: torch.Tensor,
    predictors: torch.Tensor,
    vocabulary: VocabularyShard | None = None,
    *,
    float32: bool = False,
) -> torch.Tensor:
    """The likeliest token, the first of equal ones, after these rows of the states; int64 [T'].

    A transform of the logits does not change their order, up to a cap that float32 reaches. head,
    states, predictors, float32: see `HeadScore`. vocabulary: this rank's part where the head
    is split over ranks; the result is that of the whole head. All T' rows of logits exist at a
    time, so it is meant for few. Collective where the vocabulary is split.
    """
    weight = cast(torch.Tensor, head.weight)
    bias = cast("torch.Tensor | None", getattr(head, "bias", None))
    if vocabulary is not None:
        weight = vocabulary.local(weight)
        bias = None if bias is None else vocabulary.local(bias)
    weight = weight.float() if float32 else weight
    logits = states.new_empty(len(predictors), len(weight), dtype=torch.float32)
    multiply(states[predictors].to(weight.dtype), weight.t(), logits)
    if bias is not None:
        logits += bias
    if vocabulary is None:
        return logits.argmax(-1)
    # A rank without rows of the head has none to offer.
    top = logits.new_full((len(predictors),), -torch.inf)
    negated = predictors.new_full((len(predictors),), torch.iinfo(torch.int64).min)
    if vocabulary.rows:
        top, place = logits.max(-1)
        negated = -(place + vocabulary.start)
    largest = top.clone()
    vocabulary.largest(largest)
    negated = negated.masked_fill(top < largest, torch.iinfo(torch.int64).min)
    vocabulary.largest(negated)
    return -negated
