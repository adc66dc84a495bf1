"""A tiny Llama with one token a character, made on the spot and warmed up on random legal play.

For fast runs and tests: about two million parameters that already know how a move looks, so that
reinforcement learning has something to start from. Observations are the compact boards of
`earl_core.environments.games`; a conversation reads `<bos>>123|456|789=5<end>>1X3|...=`.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

from earl_core.environments.games.board_game import BoardGame, random_legal_game
from earl_core.environments.registry import create
from earl_core.learner.data.packing import TrainingSample, pack
from earl_core.learner.model import PackedTensors, logprobs_of_trained, prepare_for_packing
from earl_core.pretrained.huggingface import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from earl_core.rollout.chat import ChatTokenizer
from earl_core.system.errors import ConfigError

logger = logging.getLogger(__name__)

_SPECIAL = ("<pad>", "<bos>", "<end>", "<unk>")
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}={{ message['content'] }}{{ eos_token }}"
    "{% else %}>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def build(
    directory: str | Path,
    *,
    environment: Mapping[str, Any] | None = None,
    hidden: int = 192,
    layers: int = 4,
    heads: int = 4,
    max_position_embeddings: int = 4096,
    warm_start_steps: int = 80,
    warm_start_games: int = 32,
    warm_start_learning_rate: float = 1e-3,
    seed: int = 0,
) -> None:
    """Make the model and its tokenizer as a Hugging Face directory; nothing if it is there.

    environment: `name` and `options` of a built-in board game (default tic-tac-toe); its compact
    style is used whatever the options say. warm_start_steps: supervised steps on the answers of
    `warm_start_games` random legal games each; 0 leaves random weights. Equal arguments and
    thread counts give equal bytes. The directory appears by a rename, complete or not at all.
    Raises ConfigError for an environment without a compact alphabet.
    """
    target = Path(directory)
    if target.exists():
        return
    wanted = dict(environment or {"name": "tic_tac_toe"})
    options = dict(wanted.get("options") or {}) | {"style": "compact"}
    if options.get("opponent") == "policy":
        # There is none yet.
        options["opponent"] = "random"
    game = create(wanted["name"], options)
    alphabet = getattr(sys.modules[type(game).__module__], "COMPACT_ALPHABET", None)
    if not isinstance(game, BoardGame) or alphabet is None:
        raise ConfigError(
            f"The tiny model can be made for the built-in board games, not for {wanted['name']!r}: "
            "set model.builder_options.environment to tic_tac_toe or connect_four, or use another "
            "model."
        )
    tokenizer = character_tokenizer(alphabet)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = narrow_llama(tokenizer, hidden, layers, heads, max_position_embeddings)
        if warm_start_steps:
            _warm_start(
                model, tokenizer, game, warm_start_steps, warm_start_games,
                warm_start_learning_rate, seed,
            )  # fmt: skip
    write_model(target, model, tokenizer)


def narrow_llama(
    tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int, heads: int, positions: int
) -> LlamaForCausalLM:
    """A Llama with tied embeddings and random weights from torch's generator."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            # The next multiple of 64 above 8/3 of the hidden size, Llama's own proportion.
            intermediate_size=-(-hidden * 8 // (3 * 64)) * 64,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=positions,
            # The usual 0.02 suits wide models; this narrow one then needs twice the steps.
            initializer_range=hidden**-0.5,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def write_model(target: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
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


def _legal_sample(chat: ChatTokenizer, game: BoardGame[Any], number: int, seed: int) -> Any:
    """A random legal game as a sample, tokens exactly as the agent loop would lay them out."""
    tokens: list[int] = []
    mask: list[int] = []
    answer: list[int] = []
    for messages, text in random_legal_game(game, number, seed):
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


def _warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    game: BoardGame[Any],
    steps: int,
    games: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Supervised steps on the answers; the rate rises briefly, then falls to zero."""
    prepare_for_packing(model)
    chat = ChatTokenizer(tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    for step in range(steps):
        first = step * games
        samples = [_legal_sample(chat, game, first + index, seed) for index in range(games)]
        rows = sorted(range(games), key=lambda row: -len(samples[row].tokens))
        packed = PackedTensors.from_microbatch(pack(samples, rows))
        logprobs, _ = logprobs_of_trained(model, packed, temperature=1.0)
        loss = -logprobs.mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = min(1.0, (step + 1) / (1 + steps // 8)) * (1.0 - step / steps)
        optimizer.param_groups[0]["lr"] = learning_rate * factor
        optimizer.step()
    logger.info("The warm start ended with a loss of %.3f after %d steps.", loss.item(), steps)
