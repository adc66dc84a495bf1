"""The model of `no_limit`: a tiny Llama, warmed up on the play of somebody careless."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.no_limit_game import ALPHABET, Descent, demonstration
from earl_core.learner.data.packing import TrainingSample, pack
from earl_core.learner.model import PackedTensors, logprobs_of_trained, prepare_for_packing
from earl_core.models.tiny import character_tokenizer, narrow_llama, write_model
from earl_core.rollout.chat.chat import ChatTokenizer

logger = logging.getLogger(__name__)


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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = narrow_llama(tokenizer, hidden, layers, heads, max_position_embeddings)
        prepare_for_packing(model)
        chat = ChatTokenizer(tokenizer)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=warm_start_learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        )
        for step in range(warm_start_steps):
            first = step * warm_start_games
            samples = [
                _demonstrated(chat, Descent(**environment), number, care, warm_start_floors)
                for number in range(first, first + warm_start_games)
            ]
            loss = _loss(model, samples)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rising = min(1.0, (step + 1) / (1 + warm_start_steps // 8))
            rate = warm_start_learning_rate * rising * (1.0 - step / warm_start_steps)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            if step % 20 == 0 or step == warm_start_steps - 1:
                logger.info("warm start, step %d: loss %.3f", step, loss.item())
    write_model(target, model, tokenizer)


def _loss(model: LlamaForCausalLM, samples: list[TrainingSample]) -> torch.Tensor:
    rows = sorted(range(len(samples)), key=lambda row: -len(samples[row].tokens))
    packed = PackedTensors.from_microbatch(pack(samples, rows))
    logprobs, _ = logprobs_of_trained(model, packed, temperature=1.0)
    return -logprobs.mean()


def _demonstrated(
    chat: ChatTokenizer, game: Descent, number: int, care: float, floors: int
) -> TrainingSample:
    """Floors of one demonstration, tokens exactly as the agent loop would lay them out.

    Odd ones begin at the top, where every episode begins; the others anywhere.
    """
    begin = 0 if number % 2 else (number * 7919) % max(1, game.floors - floors + 1)
    tokens: list[int] = []
    mask: list[int] = []
    answer: list[int] = []
    for messages, text in islice(demonstration(game, number, care), begin, begin + floors):
        given = chat.next_prompt(answer, messages) if tokens else chat.first_prompt(messages)
        answer = [*chat.encode(text), chat.stop_token_ids[0]]
        tokens += given + answer
        mask += [0] * len(given) + [1] * len(answer)
    return TrainingSample(
        tokens=np.array(tokens, dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.uint8),
        rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
        sample_id=number,
    )
