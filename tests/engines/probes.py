"""Probes of small models, by plain forward passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from earl_core.weights.probe import ProbedRow


@torch.no_grad()
def probe_of(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> tuple[ProbedRow, ...]:
    """What the model holds likely after the last tokens of each row."""
    found = []
    for tokens in rows:
        logits = model(input_ids=torch.tensor([list(tokens)])).logits[0].double()
        logprobs, likeliest = torch.log_softmax(logits, dim=-1).max(-1)
        lengths = range(max(1, len(tokens) - 6), len(tokens) + 1)
        found.append(
            ProbedRow(
                tokens=tuple(tokens),
                lengths=tuple(lengths),
                likeliest=tuple(int(likeliest[length - 1]) for length in lengths),
                logprobs=tuple(float(logprobs[length - 1]) for length in lengths),
            )
        )
    return tuple(found)
