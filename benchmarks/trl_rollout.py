"""Games played in one batch with plain transformers: what a user of TRL's `rollout_func` writes.

Three ways: each forward pass encodes the whole left-padded conversations anew; or keys and values
stay in a cache across turns and each pass encodes only what is new; or TRL's own vLLM engine. All
live games move together, one token at a time.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import DynamicCache

from earl_core.environments.base import Environment
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.conversation import Conversation


class Player:
    """One game: its tokens, which of them were sampled (mask), and its reward."""

    def __init__(
        self, environment: Environment, chat: ChatTokenizer, prompt: int, seed: int, max_turns: int
    ) -> None:
        self._environment = environment
        self._chat = chat
        self._conversation = Conversation(chat)
        self._turns_left = max_turns
        self._answer: list[int] = []
        self.tokens = self._conversation.begin(environment.reset(prompt, seed))
        self.mask = [0] * len(self.tokens)
        self.prompt_length = len(self.tokens)
        self.reward = 0.0
        self.done = False

    def sampled(self, token: int, budget: int) -> bool:
        """Take a sampled token; whether the answer is complete now."""
        self._answer.append(token)
        self.tokens.append(token)
        self.mask.append(1)
        return len(self._answer) == budget or token in self._chat.stop_token_ids

    def step(self) -> None:
        """Give the answer to the environment and append what it says."""
        answer, self._answer = self._answer, []
        result = self._environment.step(self._chat.text_of(answer))
        self.reward += float(result.reward)
        self._turns_left -= 1
        self.done = result.done or not self._turns_left
        if self.done:
            self._environment.close()
            return
        following, new_sample = self._conversation.follow(answer, result.messages)
        if new_sample:
            raise RuntimeError("this chat template rewrites earlier turns; TRL has one stream")
        self.tokens += following
        self.mask += [0] * len(following)


class Sampler(Protocol):
    """Draws the next token of many games at once."""

    def sample(self, players: list[Player], temperature: float) -> list[int]:
        """One token for each player."""


@torch.inference_mode()
def play(players: list[Player], sampler: Sampler, temperature: float, budget: int) -> None:
    """Play all games in lockstep to their end; at most `budget` tokens a turn."""
    live = list(players)
    while live:
        waiting = live
        while waiting:
            drawn = sampler.sample(waiting, temperature)
            waiting = [
                player
                for player, token in zip(waiting, drawn, strict=True)
                if not player.sampled(token, budget)
            ]
        for player in live:
            player.step()
        live = [player for player in live if not player.done]


class Forward:
    """Samples with a transformers model under bfloat16 autocast."""

    def __init__(self, model: Any, use_cache: bool) -> None:
        self._model = model
        self._passes = _Cached(model) if use_cache else _Plain(model)

    def sample(self, players: list[Player], temperature: float) -> list[int]:
        """Sample a token for each player from a forward pass in bf16, as `Sampler` wants."""
        with torch.autocast(self._model.device.type, torch.bfloat16):
            logits = self._passes.logits(players)
        shares = torch.softmax(logits.float() / temperature, -1)
        return [int(token) for token in torch.multinomial(shares, 1).squeeze(1)]


class Colocated:
    """Samples with the vLLM engine that TRL holds in its own process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def sample(self, players: list[Player], temperature: float) -> list[int]:
        """Sample a token for each player with vLLM, whose prefix cache keeps the earlier turns."""
        from vllm import SamplingParams

        answers = self._llm.generate(
            [{"prompt_token_ids": player.tokens} for player in players],
            SamplingParams(
                max_tokens=1, temperature=temperature, ignore_eos=True, detokenize=False
            ),
            use_tqdm=False,
        )
        return [answer.outputs[0].token_ids[0] for answer in answers]


class _Plain:
    """One forward pass over the whole left-padded conversations."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(self, players: list[Player]) -> torch.Tensor:
        tokens, mask = _left_padded([player.tokens for player in players])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            logits_to_keep=1,
            use_cache=False,
        ).logits[:, -1]


class _Cached:
    """Keys and values stay; rows of games that are over are dropped from the cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        self._rows: list[Player] = []
        self._encoded: dict[int, int] = {}

    def logits(self, players: list[Player]) -> torch.Tensor:
        if self._rows:
            kept = torch.tensor([self._rows.index(player) for player in players])
            if len(players) < len(self._rows):
                self._cache.batch_select_indices(kept)
            self._mask = self._mask[kept]
        else:
            self._mask = torch.zeros(len(players), 0, dtype=torch.long)
        self._rows = list(players)
        new = [player.tokens[self._encoded.get(id(player), 0) :] for player in players]
        for player in players:
            self._encoded[id(player)] = len(player.tokens)
        tokens, fresh = _left_padded(new)
        seen = self._mask.sum(1, keepdim=True)
        self._mask = torch.cat([self._mask, fresh], dim=1)
        return self._model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=(seen + fresh.cumsum(1) - 1).clamp(min=0),
            past_key_values=self._cache,
            logits_to_keep=1,
            use_cache=True,
        ).logits[:, -1]


def _left_padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n, longest] tokens and mask; padding is token 0, masked."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return tokens, mask
