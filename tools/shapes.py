"""Random models in the shapes of known ones, their floating-point operations, and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from earl_core.deployment.shapes import ModelShape
from earl_core.learner.data.packing import TrainingSample
from earl_core.selector.model.catalogue import MODELS

_KINDS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
}


@dataclass(frozen=True)
class Shape:
    """A decoder with gated feed-forward layers and shared key heads."""

    name: str
    kind: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = True
    window: int | None = None

    @classmethod
    def of(cls, name: str, model: ModelShape) -> Shape:
        """A shape of the selector's catalogue."""
        return cls(
            name=name,
            kind=model.model_type,
            hidden=model.hidden_size,
            intermediate=model.feed_forward,
            layers=model.layers,
            heads=model.attention_heads,
            kv_heads=model.key_value_heads,
            head_dim=model.query_size // model.attention_heads,
            vocabulary=model.vocabulary,
            tied=model.tied_embeddings,
        )

    @property
    def matrix_parameters(self) -> int:
        """Parameters that every token meets: of all layers, without embedding and head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """Number of parameters, with embedding and head; norms and biases left out."""
        return self.matrix_parameters + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def update_flops(self, lengths: Sequence[int], trained: int) -> float:
        """Model FLOPs of forward and backward pass over whole samples; see `FORMULA`."""
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        forward = (
            2 * self.matrix_parameters * sum(lengths)
            + 4 * self.layers * self.heads * self.head_dim * pairs
            + 2 * self.hidden * self.vocabulary * trained
        )
        return 3.0 * forward

    def config(self, positions: int) -> PretrainedConfig:
        """Make the configuration for transformers, with at least this many positions."""
        more = {} if self.window is None else {"sliding_window": self.window}
        return _KINDS[self.kind](
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=positions,
            tie_word_embeddings=self.tied,
            bos_token_id=1,
            eos_token_id=2,
            **more,
        )


FORMULA = (
    "FLOPs of an update = 3 x [2 N T + 4 L h d P + 2 H V T'], for forward and backward pass: N "
    "parameters of the layers' matrices, T tokens, L layers, h heads of size d, P causal (query, "
    "key) pairs = sum of n (n + 1) / 2 over the samples, H hidden size, V vocabulary, T' trained "
    "tokens (the head runs for these only). Recomputation (activation checkpointing, chunked "
    "logits), the embedding lookup, norms, softmax, loss and the optimizer step count nothing, but "
    "their time does."
)

SHAPES = {
    name: Shape.of(name, model)
    for name, model in MODELS.items()
    if not model.experts and model.states is None
} | {
    shape.name: shape
    for shape in (
        Shape("qwen2.5-0.5b", "qwen2", 896, 4864, 24, 14, 2, 64, 151936),
        Shape("llama-3.2-1b", "llama", 2048, 8192, 16, 32, 8, 64, 128256),
        Shape("qwen2.5-1.5b", "qwen2", 1536, 8960, 28, 12, 2, 128, 151936),
        Shape("tiny", "llama", 64, 128, 2, 4, 2, 16, 512),
    )
}


def save_random_model(
    shape: Shape, directory: Path, *, positions: int, scale: float = 1.0, seed: int = 0
) -> Path:
    """Random bfloat16 weights and a tokenizer, as `from_pretrained` reads them. scale: of the
    matrices, against transformers' initialisation, whose attention is nearly uniform."""
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = AutoModelForCausalLM.from_config(shape.config(positions), dtype=torch.bfloat16)
    if scale != 1.0:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(scale)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """Write a tokenizer of 16 words, for models that are given tokens."""
    words = {f"w{index}": index for index in range(16)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), chat_template="{{ messages }}"
    ).save_pretrained(directory)


def random_sample(
    rng: np.random.Generator,
    length: int,
    vocabulary: int,
    *,
    number: int = 0,
    prefix: np.ndarray | None = None,
) -> TrainingSample:
    """A sample in which observations and answers of 64 tokens alternate, so half is trained."""
    tokens = rng.integers(3, vocabulary, length).astype(np.int32)
    if prefix is not None:
        tokens[: prefix.size] = prefix[:length]
    mask = (np.arange(length) // 64 % 2).astype(np.uint8)
    # A short sample has an answer too.
    mask[-1] = 1
    engine = (rng.normal(size=length) * 0.1 - np.log(vocabulary)).astype(np.float32) * mask
    return TrainingSample(
        tokens=tokens,
        loss_mask=mask,
        rollout_logprobs=engine,
        advantages=np.full(length, rng.normal(), dtype=np.float32),
        episode_id=number,
        group_id=number // 4,
        sample_id=number,
    )
