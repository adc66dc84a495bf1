"""Small random models and samples, and an independent plain-torch update to compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from earl_core.learner.data.packing import TrainingSample
from earl_core.pretrained.grammars import TokenMasks

VOCABULARY = 40
ARCHITECTURES = ("llama", "qwen2", "gpt2")


def build_model(kind: str) -> PreTrainedModel:
    """A two-layer random model: Llama with shared key heads, Qwen2 tied, GPT-2, Mistral."""
    torch.manual_seed(7)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True))
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**shape, sliding_window=9))
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=512)
    )


def save_model(kind: str | PreTrainedModel, directory: Path, spread: float = 5.0) -> Path:
    """A model directory with weights so many times the usual spread, and a tokenizer."""
    model = build_model(kind) if isinstance(kind, str) else kind
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                # The usual initialisation gives nearly uniform attention, which would hide errors.
                parameter.mul_(spread)
    model.save_pretrained(directory)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), chat_template="{{ messages }}"
    )
    tokenizer.save_pretrained(directory)
    return directory


def eager_model(directory: Path) -> PreTrainedModel:
    """The same weights with transformers' own attention, dropout off."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def random_samples(
    count: int,
    *,
    seed: int = 0,
    longest: int = 40,
    samples_per_episode: int = 1,
    masked: bool = True,
) -> list[TrainingSample]:
    """Samples with every column; two episodes in each group. masked: every third one was sampled
    under a grammar."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        length = int(rng.integers(3, longest + 1))
        mask = (rng.random(length) < 0.4).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        episode = index // samples_per_episode

        def column(scale: float, shift: float, size: int = length) -> np.ndarray:
            return (rng.normal(size=size) * scale + shift).astype(np.float32)

        tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
        samples.append(
            TrainingSample(
                tokens=tokens,
                loss_mask=mask,
                rollout_logprobs=column(0.3, -3.7) * mask,
                advantages=np.full(length, rng.normal(), dtype=np.float32),
                reference_logprobs=column(0.3, -3.7) * mask,
                old_logprobs=column(0.3, -3.7) * mask,
                masks=random_masks(tokens, index) if masked and index % 3 == 1 else None,
                episode_id=episode,
                group_id=episode // 2,
                sample_id=index,
            )
        )
    return samples


def random_masks(tokens: np.ndarray, seed: int) -> TokenMasks:
    """Masks that allow about every second token, and those that stand there; one in the place of
    four tokens allows nothing else; every fifth token has none."""
    rng = np.random.default_rng((seed, 1))
    allowed = rng.random((len(tokens), VOCABULARY)) < 0.5
    allowed[::4] = False
    allowed[np.arange(len(tokens)), tokens] = True
    bits = np.zeros((len(tokens), 32 * -(-VOCABULARY // 32)), np.uint8)
    bits[:, :VOCABULARY] = allowed
    rows = np.packbits(bits, axis=1, bitorder="little").view("<i4")
    index = np.arange(len(tokens), dtype=np.int32)
    index[::5] = -1
    return TokenMasks(rows, index)


def allowed_tokens(sample: TrainingSample) -> torch.Tensor:
    """Whether each token was allowed in each place, bool [L, vocabulary]."""
    if sample.masks is None:
        return torch.ones(len(sample.tokens), VOCABULARY, dtype=torch.bool)
    bits = np.unpackbits(sample.masks.rows.view(np.uint8), axis=1, bitorder="little")
    everywhere = np.ones_like(bits[:1])
    allowed = np.concatenate([bits, everywhere])[sample.masks.index, :VOCABULARY]
    return torch.from_numpy(allowed.astype(bool))


def plain_logprobs(
    model: PreTrainedModel, sample: TrainingSample, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [T'] of one unpacked sample, from full logits in float64."""
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    logits = model(input_ids=tokens).logits[0].double() / temperature
    forbidden = ~allowed_tokens(sample)[1:]
    logits = logits[:-1].masked_fill(forbidden, -torch.inf)
    distribution = torch.log_softmax(logits, dim=-1)
    chosen = distribution.gather(1, tokens[0, 1:, None])[:, 0]
    entropy = -(distribution.exp() * distribution.masked_fill(forbidden, 0.0)).sum(-1)
    mask = torch.from_numpy(sample.loss_mask[1:].astype(bool))
    return chosen[mask], entropy[mask]


def with_old_logprobs(
    samples: Sequence[TrainingSample], scored: Sequence[np.ndarray | None]
) -> list[TrainingSample]:
    """The samples with `PolicyLearner.score`'s result as their `old_logprobs`."""
    return [
        dataclasses.replace(sample, old_logprobs=values)
        for sample, values in zip(samples, scored, strict=True)
    ]
