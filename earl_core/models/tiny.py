"""A tiny model with one token a character, made on the spot and warmed up on random legal play.

For fast runs and tests: about two million parameters that already know how a move looks, so that
reinforcement learning has something to start from. It serves every environment that names its
characters; a conversation of tic-tac-toe reads `<bos>>123|456|789=5<end>>1X3|...=`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

from earl_core.config.environment import EnvironmentConfig
from earl_core.environments.base import EnvironmentFailed, Message
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.learner.data.packing import TrainingSample, pack
from earl_core.learner.model import PackedTensors, logprobs_of_trained, prepare_for_packing
from earl_core.models.foreseen import Sizes
from earl_core.models.narrow import narrow_model
from earl_core.models.progress import Progress, quiet
from earl_core.pretrained.huggingface import PreTrainedModel, PreTrainedTokenizerFast
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.system.errors import ConfigError

logger = logging.getLogger(__name__)

_SPECIAL = ("<pad>", "<bos>", "<end>", "<unk>")
_USUAL = Sizes()
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}={{ message['content'] }}{{ eos_token }}"
    "{% else %}>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def build(
    directory: str | Path,
    *,
    environments: Sequence[Mapping[str, Any]],
    characters: str = "",
    family: str = _USUAL.family,
    hidden: int = _USUAL.hidden,
    layers: int = _USUAL.layers,
    heads: int = _USUAL.heads,
    max_position_embeddings: int = _USUAL.max_position_embeddings,
    warm_start_steps: int = 80,
    warm_start_games: int = 32,
    warm_start_learning_rate: float = 1e-3,
    seed: int = 0,
    progress: Progress = quiet,
) -> None:
    """Make the model and its tokenizer as a Hugging Face directory; nothing if it is there.

    environments: those of the run, dumped `EnvironmentConfig`s, whose characters become the tokens.
    characters: further ones. All others are one unknown token. family: of `foreseen.FAMILIES`.
    warm_start_steps: supervised steps on the answers of `warm_start_games` random legal games
    each; 0 leaves random weights, and so do environments that do not know their legal answers.
    progress: told of the steps. Equal arguments and thread counts give equal bytes. The
    directory appears by a rename, complete or not at all. Raises ConfigError for environments
    that name no characters, or that fail.
    """
    target = Path(directory)
    if target.exists():
        return
    played = [EnvironmentConfig.model_validate(environment) for environment in environments]
    told = legal_play(played, warm_start_steps * warm_start_games, seed)
    if not (told.characters or characters):
        names = ", ".join(repr(environment.played) for environment in played)
        raise ConfigError(
            f"the tiny model has a token for each character, and {names} names none",
            remedy="give the class an attribute `characters`, a text that has every character of "
            "its messages and of the answers, or set model.builder_options.characters",
        )
    tokenizer = character_tokenizer(told.characters + characters)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = narrow_model(family, tokenizer, hidden, layers, heads, max_position_embeddings)
        if told.games:
            warm_start(
                model, tokenizer, told.games, warm_start_games, warm_start_learning_rate, progress
            )
        else:
            logger.info("Random weights: no environment names its legal answers, or none is asked.")
    write_model(target, model, tokenizer)


_Game = list[tuple[list[Message], str]]
"""For each turn the messages that are new, and a legal answer to them."""

_MOST_TURNS = 100
_SIDE_BY_SIDE = 32


class LegalPlay(NamedTuple):
    """characters: of all environments, each once. games: in their order, those of environments that
    know their legal answers; none where no environment does."""

    characters: str
    games: list[_Game]


def legal_play(environments: Sequence[EnvironmentConfig], games: int, seed: int) -> LegalPlay:
    """Play in host processes; equal arguments give equal games. games: how many in all, which the
    environments share evenly. Raises ConfigError."""
    try:
        return asyncio.run(_play(environments, games, seed))
    except EnvironmentFailed as error:
        raise ConfigError(
            f"the new model cannot watch a game of legal answers: {error}",
            remedy="correct the environment, or set model.builder_options.warm_start_steps to 0",
        ) from error


async def _play(environments: Sequence[EnvironmentConfig], games: int, seed: int) -> LegalPlay:
    async with AsyncExitStack() as stack:
        characters: set[str] = set()
        knowing: list[tuple[str, EnvironmentPool]] = []
        for environment in environments:
            pool = EnvironmentPool.of(
                environment, hosts=1, concurrency=_SIDE_BY_SIDE, log_path=None
            )
            await pool.start()
            stack.push_async_callback(pool.stop)
            characters |= set(pool.characters)
            # An agent plays as it is begun, and has no policy to ask here.
            if environment.agent is None and games and await _knows(pool):
                knowing.append((environment.played, pool))
        played: list[_Game] = []
        for first in range(0, games if knowing else 0, _SIDE_BY_SIDE):
            numbers = range(first, min(games, first + _SIDE_BY_SIDE))
            jobs = (_game(*knowing[number % len(knowing)], number, seed) for number in numbers)
            played += filter(None, await asyncio.gather(*jobs))
    return LegalPlay("".join(sorted(characters)), played)


async def _knows(pool: EnvironmentPool) -> bool:
    await pool.reset(0, 0, 0)
    answers = await pool.legal_answers(0)
    await pool.close(0)
    return bool(answers)


async def _game(name: str, pool: EnvironmentPool, number: int, seed: int) -> _Game:
    chooser = random.Random(f"{name}/legal/{number}/{seed}")
    messages, game = await pool.reset(number, number, seed), _Game()
    for _ in range(_MOST_TURNS):
        answers = await pool.legal_answers(number)
        if not answers:
            break
        game.append((messages, chooser.choice(answers)))
        result = await pool.step(number, game[-1][1])
        if result.done:
            break
        messages = result.messages
    await pool.close(number)
    return game


def write_model(target: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write both as a Hugging Face directory, which appears complete or not at all."""
    building = target.parent / f".{target.name}.building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    model.save_pretrained(building)
    tokenizer.save_pretrained(building)
    building.rename(target)


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token a character, with `>` before observations, `=` before answers, `<end>` after."""
    words = [*_SPECIAL, *sorted(set(alphabet) | set(">="))]
    core = Tokenizer(
        WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<end>",
        unk_token="<unk>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _sample(chat: ChatTokenizer, game: _Game, number: int) -> TrainingSample:
    """A game as a sample, tokens exactly as the agent loop would lay them out."""
    tokens: list[int] = []
    mask: list[int] = []
    answer: list[int] = []
    for messages, text in game:
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


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    games: list[_Game],
    games_per_step: int,
    learning_rate: float,
    progress: Progress,
) -> None:
    """Supervised steps on the answers of the games; the rate rises briefly, then falls to zero."""
    steps = len(games) // games_per_step
    prepare_for_packing(model)
    chat = ChatTokenizer(tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    for step in range(steps):
        first = step * games_per_step
        seen = games[first : first + games_per_step]
        samples = [_sample(chat, game, first + index) for index, game in enumerate(seen)]
        rows = sorted(range(len(samples)), key=lambda row: -len(samples[row].tokens))
        packed = PackedTensors.from_microbatch(pack(samples, rows))
        logprobs, _ = logprobs_of_trained(model, packed, temperature=1.0)
        loss = -logprobs.mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = min(1.0, (step + 1) / (1 + steps // 8)) * (1.0 - step / steps)
        optimizer.param_groups[0]["lr"] = learning_rate * factor
        optimizer.step()
        progress({"steps_done": step + 1, "steps": steps})
    logger.info("The warm start ended with a loss of %.3f after %d steps.", loss.item(), steps)
