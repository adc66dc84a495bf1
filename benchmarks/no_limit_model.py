"""The model of `no_limit`: a tiny Llama, warmed up on the play of somebody careless."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.no_limit_game import ALPHABET, Descent, demonstration
from earl_core.environments.base import Message
from earl_core.models.narrow import narrow_model
from earl_core.models.progress import quiet
from earl_core.models.tiny import character_tokenizer, warm_start, write_model


def build(
    directory: str | Path,
    *,
    environment: Mapping[str, Any],
    care: float = 0.8,
    hidden: int = 64,
    layers: int = 8,
    heads: int = 2,
    max_position_embeddings: int = 32768,
    warm_start_steps: int = 150,
    warm_start_games: int = 8,
    warm_start_floors: int = 12,
    warm_start_learning_rate: float = 2e-3,
    seed: int = 0,
) -> None:
    """Make model and tokenizer as a Hugging Face directory; nothing if it is there.

    environment: the options of `Descent`. care: share of the demonstrated answers that are right.
    warm_start_floors: floors of each demonstration.
    """
    target = Path(directory)
    if target.exists():
        return
    tokenizer = character_tokenizer(ALPHABET)
    games = [
        _demonstrated(Descent(**environment), number, care, warm_start_floors)
        for number in range(warm_start_steps * warm_start_games)
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = narrow_model("llama", tokenizer, hidden, layers, heads, max_position_embeddings)
        if games:
            rate = warm_start_learning_rate
            warm_start(model, tokenizer, games, warm_start_games, rate, quiet)
    write_model(target, model, tokenizer)


def _demonstrated(
    game: Descent, number: int, care: float, floors: int
) -> list[tuple[list[Message], str]]:
    """Floors of one demonstration. Odd ones begin at the top, where every episode begins; the
    others anywhere."""
    begin = 0 if number % 2 else (number * 7919) % max(1, game.floors - floors + 1)
    return list(islice(demonstration(game, number, care), begin, begin + floors))
