"""One forward pass of a causal model over pieces of many sequences, on the slot cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from earl_core.rollout.engines.slot_cache import Row, SlotCache


def append(
    model: PreTrainedModel,
    cache: SlotCache,
    rows: Sequence[Row],
    pieces: Sequence[Sequence[int]],
    drawn: Sequence[int],
) -> torch.Tensor:
    """Append a piece of tokens to each row: the model's last hidden states after so many of its
    last tokens, of one row after the other. drawn: how many, at least 1, also for an empty piece,
    whose states mean nothing."""
    device, width = model.device, max(len(piece) for piece in pieces)
    lengths = np.array([len(piece) for piece in pieces])
    starts = np.array([len(row.tokens) for row in rows])
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    for index, piece in enumerate(pieces):
        tokens[index, : len(piece)] = piece
    valid = np.arange(width)[None, :] < lengths[:, None]
    positions = np.where(valid, starts[:, None] + np.arange(width)[None, :], 0)
    visible = int((starts + lengths).max())
    columns = torch.from_numpy(positions).to(device)
    cache.window(columns, torch.from_numpy(valid).to(device), visible)
    hidden_from = torch.arange(visible, device=device) > columns[:, None, :, None]
    mask = torch.zeros(hidden_from.shape, dtype=model.dtype, device=device)
    mask.masked_fill_(hidden_from, float("-inf"))
    hidden = model.base_model(
        input_ids=torch.from_numpy(tokens).to(device),
        position_ids=columns,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    for row, piece in zip(rows, pieces, strict=True):
        row.tokens.extend(piece)
    places = [
        range(max(length - count, 0), max(length, count))
        for length, count in zip(lengths.tolist(), drawn, strict=True)
    ]
    of_row = torch.from_numpy(np.repeat(np.arange(len(rows)), drawn)).to(device)
    at = torch.from_numpy(np.concatenate(places)).to(device)
    return hidden[of_row, at]
