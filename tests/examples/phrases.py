"""A model that answers each of a few phrases equally often, whatever it is asked, and ends there.

Its weights are written, not trained: examples whose answers are calls of tools or words need a
model that gives such, and nothing else that a trained one could.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from earl_core.models.narrow import narrow_model
from earl_core.models.tiny import write_model
from tests.rollout.chat_models import CHATML, SPECIAL

_LIKELY = 8.0


def phrase_model(directory: Path, phrases: Sequence[str]) -> Path:
    """Write it. Every phrase is a token, and so is any other word, an unknown one."""
    tokenizer = _tokenizer(phrases)
    torch.manual_seed(0)
    model = narrow_model("llama", tokenizer, hidden=32, layers=2, heads=2, positions=4096)
    ids = tokenizer.convert_tokens_to_ids(list(phrases))
    head = torch.nn.Linear(32, len(tokenizer), bias=False)
    model.config.tie_word_embeddings = False
    model.lm_head = head
    with torch.no_grad():
        for layer in model.model.layers:
            # What a token's embedding says reaches the head.
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
        embeddings = model.model.embed_tokens.weight
        embeddings[:, :2] = torch.tensor([1.0, 0.0])
        embeddings[ids, :2] = torch.tensor([0.0, 1.0])
        head.weight.mul_(0.05)
        head.weight[ids, 0] = _LIKELY
        head.weight[tokenizer.eos_token_id, 1] = _LIKELY
    write_model(directory, model, tokenizer)
    return directory


def called(name: str, **arguments: str) -> str:
    """A call of a tool, as a model whose template knows no tools is told to write it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def _tokenizer(phrases: Sequence[str]) -> PreTrainedTokenizerFast:
    words = [*SPECIAL, "<unk>", "\n", " ", *phrases]
    vocabulary = {text: number for number, text in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    known = "|".join(re.escape(phrase) for phrase in sorted(phrases, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{known}|\n| |[^\n ]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token=SPECIAL[1],
        pad_token=SPECIAL[0],
        unk_token="<unk>",
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    return fast
