"""Logits of tokens that a mask does not allow."""

from __future__ import annotations

import torch


def forbid(logits: torch.Tensor, masks: torch.Tensor, value: float, first: int = 0) -> None:
    """Give the logits of tokens whose bit is 0 this value, in place.

    logits: [n, tokens]. masks: int32 [n, words], bit b of word w is token 32 w + b; tokens beyond
    all words have none. first: the token of the first column.
    """
    tokens = torch.arange(first, first + logits.shape[1], device=logits.device)
    words = tokens >> 5
    bits = masks.index_select(1, words.clamp(max=masks.shape[1] - 1))
    bits = bits >> (tokens & 31).to(torch.int32)
    logits.masked_fill_(((bits & 1) == 0) | (words >= masks.shape[1]), value)
