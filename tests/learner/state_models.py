"""Small random models with layers that carry a state, and packs of them beside plain passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import transformers
from torch.nn import functional

from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.data.prefix_tree import PrefixTree
from tests.families.registry import FAMILIES, build
from tests.learner.helpers import VOCABULARY

HYBRIDS = ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next", "OlmoHybrid")


_NARROW = {
    "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_NARROW_EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


def build_hybrid(name: str) -> transformers.PreTrainedModel:
    """A random narrow model with weights three times the usual spread. With more, float32 rounds a
    recurrence by more than what is compared: other chunks of plain transformers are 1e-5 apart."""
    made = build(name, 5, **_NARROW, **(_NARROW_EXPERTS if FAMILIES[name].experts else {}))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3)
    return made


def build_with_vision(name: str) -> transformers.PreTrainedModel:
    """The same with a vision tower beside it, as released checkpoints have."""
    text = build_hybrid(name)
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": 32, "num_position_embeddings": 16, "temporal_patch_size": 1,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        text_config=text.config.to_dict(),
        vision_config=vision,
        tie_word_embeddings=text.config.tie_word_embeddings,
        **{
            f"{name}_token_id": VOCABULARY - 1 - number
            for number, name in enumerate(("image", "video", "vision_start", "vision_end"))
        },
    )
    made: transformers.PreTrainedModel = getattr(transformers, f"{name}ForConditionalGeneration")(
        config
    )
    made.model.language_model.load_state_dict(text.model.state_dict())
    made.lm_head.load_state_dict(text.lm_head.state_dict())
    return made


def forked_samples() -> list[np.ndarray]:
    """Samples of a tree three deep, among them runs of one token and of more than one chunk, and
    one that continues nothing; int32 each."""
    rng = np.random.default_rng(0)

    def tokens(count: int, first: int) -> np.ndarray:
        return np.array([first, *rng.integers(1, VOCABULARY, count - 1)], dtype=np.int32)

    stem, long, one = tokens(37, 1), tokens(70, 2), tokens(1, 3)
    ends = [tokens(count, first) for first, count in enumerate((5, 1, 66, 2, 9, 1), start=4)]
    return [
        np.concatenate(parts)
        for parts in (
            [stem, long, ends[0]], [stem, long, ends[1]], [stem, long, ends[2]],
            [stem, one, ends[3]], [stem, one, ends[4]], [stem, ends[5]], [tokens(21, 9)],
        )
    ]  # fmt: skip


def separate_samples() -> list[np.ndarray]:
    """Samples of uneven lengths that share nothing; int32 each."""
    rng = np.random.default_rng(1)
    return [rng.integers(1, VOCABULARY, n).astype(np.int32) for n in (2, 64, 3, 130, 65, 1, 50)]


def losses(model: torch.nn.Module, samples: Sequence[np.ndarray], tree: PrefixTree) -> torch.Tensor:
    """Log-probs of all tokens that others predict, sample after sample, from one packed pass."""
    device = next(model.parameters()).device
    packed = torch.zeros(1, tree.size, dtype=torch.int64)
    places = [torch.from_numpy(tree.positions(index)) for index in range(len(samples))]
    positions = torch.zeros_like(packed)
    for sample, place in zip(samples, places, strict=True):
        packed[0, place] = torch.from_numpy(sample.astype(np.int64))
        positions[0, place] = torch.arange(len(sample))
    logits = model(
        input_ids=packed.to(device),
        position_ids=positions.to(device),
        use_cache=False,
        sample_boundaries=SampleBoundaries.from_tree(tree, device),
    ).logits[0]
    return torch.cat([_chosen(logits[at], packed[0, at].to(device)) for at in places])


def plain_losses(model: torch.nn.Module, samples: Sequence[np.ndarray]) -> torch.Tensor:
    """The same by plain transformers, one sample at a time."""
    found = []
    for sample in samples:
        tokens = torch.from_numpy(sample.astype(np.int64))
        found.append(_chosen(model(input_ids=tokens[None], use_cache=False).logits[0], tokens))
    return torch.cat(found)


def _chosen(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    distribution = functional.log_softmax(logits[:-1].float(), dim=-1)
    return distribution.gather(1, tokens[1:, None])[:, 0]
