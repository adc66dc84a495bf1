"""One forward pass of a causal model over pieces of many sequences, on the slot cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from earl_core.rollout.engines.slot_cache import Row, SlotCache
from earl_core.system.errors import ConfigError

_LONG, _SHORT, _MORE = 7, 2, 3
"""Tokens of a test: of one row, of its neighbour, and of both afterwards."""


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
    cache.states.begin(starts, valid, device)
    hidden = model.base_model(
        input_ids=torch.from_numpy(tokens).to(device),
        position_ids=columns,
        attention_mask=_causal(columns, visible, model.dtype),
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


def _causal(columns: torch.Tensor, visible: int, dtype: torch.dtype) -> torch.Tensor:
    """What hides later columns from each of `columns` [rows, width]: [rows, 1, width, visible]."""
    hidden_from = torch.arange(visible, device=columns.device) > columns[:, None, :, None]
    mask = torch.zeros(hidden_from.shape, dtype=dtype, device=columns.device)
    return mask.masked_fill_(hidden_from, float("-inf"))


@torch.inference_mode()
def check_states(model: PreTrainedModel, cache: SlotCache) -> None:
    """Raise `ConfigError` where a model's states, of rows of uneven lengths that are continued, do
    not give what one pass without a cache gives. The cache is empty before and afterwards."""
    tokens = [(5 * place + 3) % 13 + 1 for place in range(_LONG + _MORE)]
    rows = cache.arrange([0, 1])
    append(model, cache, rows, [tokens[:_LONG], tokens[:_SHORT]], [1, 1])
    append(model, cache, rows, [[], tokens[_SHORT : _SHORT + 1]], [1, 1])
    at = _LONG, _SHORT + 1
    pieces = [tokens[start : start + _MORE] for start in at]
    found = append(model, cache, rows, pieces, [_MORE, _MORE]).float()
    whole = torch.tensor([tokens], device=model.device)
    places = torch.arange(len(tokens), device=model.device)[None]
    plain = model.base_model(
        input_ids=whole,
        attention_mask=_causal(places, len(tokens), model.dtype),
        use_cache=False,
    ).last_hidden_state[0]
    expected = torch.cat([plain[start : start + _MORE] for start in at]).float()
    cache.clear()
    # Rounded to 16 bits, a mixture may choose other experts.
    share = 1e-3 if model.dtype == torch.float32 else 0.2
    # Weights that have diverged are told when they answer.
    if (found - expected).norm() > share * expected.norm():
        raise ConfigError(
            f"the torch engine computes {model.config.model_type} models otherwise than "
            "transformers when their states are kept: choose another model"
        )
