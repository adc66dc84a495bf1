"""Small random models for engine tests, and the reference they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.families.registry import build

VOCABULARY = 256
POSITIONS = 256


def make(kind: str, directory: Path, seed: int = 0) -> PreTrainedModel:
    """Write a float32 model whose distributions are far from uniform; returns it."""
    torch.manual_seed(seed)
    llama = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model: PreTrainedModel
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=128, n_layer=2, n_head=4
        )
        config.initializer_range = 0.15
        model = GPT2LMHeadModel(config)
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**llama, tie_word_embeddings=True))
    else:
        tied = {"llama_tied": True, "llama_untied": False}[kind]
        model = LlamaForCausalLM(LlamaConfig(**llama, tie_word_embeddings=tied))
    model.eval().save_pretrained(directory)
    return model


def reference_logprobs(
    directory: Path, prompt: Sequence[int], answer: Sequence[int], temperature: float
) -> list[float]:
    """Log-probs of the answer by one plain float32 forward pass, no cache, no batch."""
    return model_logprobs(read(directory), prompt, answer, temperature)


def make_hybrid(name: str, directory: Path, seed: int = 0) -> PreTrainedModel:
    """Write a float32 model of which most layers have a state; returns it."""
    # With larger weights transformers' own cache is 1e-4 off its forward pass.
    more = {"max_position_embeddings": POSITIONS, "initializer_range": 0.05}
    layers = [*["linear_attention"] * 3, "full_attention"]
    model = build(
        name, seed, vocab_size=VOCABULARY, num_hidden_layers=4, layer_types=layers, **more
    ).eval()
    model.save_pretrained(directory)
    return model


@lru_cache(maxsize=4)
def read(directory: Path) -> PreTrainedModel:
    """The model of a directory, in float32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def model_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], temperature: float
) -> list[float]:
    """The same for a model in memory."""
    tokens = torch.tensor([[*prompt, *answer]])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return logprobs.gather(1, torch.tensor(answer)[:, None]).squeeze(1).tolist()


def prompt_of(seed: int, length: int) -> list[int]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
