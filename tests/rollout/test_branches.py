"""Random sessions against the chat template itself: what stands in a prompt is what was said."""

from __future__ import annotations

import itertools
import random

import pytest

from earl_core.environments.base import Message
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion
from earl_core.rollout.gateway.branches import Branches, Prompt
from earl_core.trajectory.samples import VersionSpan
from tests.rollout.chat_models import CHATML, DROPS_REASONING, char_tokenizer

TOKENIZER = char_tokenizer(CHATML)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
LETTERS = TOKENIZER.encode("abc xyz\n", add_special_tokens=False)


def answer(branches: Branches, prompt: Prompt, chance: random.Random) -> str:
    tokens = chance.choices(LETTERS, k=chance.randrange(6))
    if chance.random() < 0.8 or not tokens:
        tokens = [*tokens, END]
    values = [-chance.random() for _ in tokens]
    spans = [VersionSpan(1, 0, len(tokens))]
    message, _ = branches.answer(prompt, Completion(tokens, values, "stop", spans))
    return message["content"]


@pytest.mark.parametrize("template", [CHATML, DROPS_REASONING])
def test_a_thousand_random_sessions_extend_exactly(template: str) -> None:
    chat = ChatTokenizer(char_tokenizer(template))
    extended = forked = 0
    for number in range(1000):
        chance = random.Random(number)
        branches = Branches(chat, number)
        conversations: list[list[Message]] = []
        pending: list[tuple[list[Message], Prompt]] = []
        for _ in range(chance.randrange(1, 12)):
            if not conversations or chance.random() < 0.2:
                said: list[Message] = [{"role": "user", "content": f"hi {chance.randrange(3)}"}]
            else:
                said = list(chance.choice(conversations))
                while chance.random() < 0.2 and len(said) > 2:
                    said = said[:-2]
                said.append({"role": "user", "content": f"next {chance.randrange(3)}"})
            prompt = branches.prompt(said)
            standing = list(prompt.sample.tokens) if prompt.sample else []
            assert prompt.tokens[: len(standing)] == standing
            assert bare(text(prompt.tokens)) == bare(chat.render(said)), number
            extended += bool(standing)
            forked += len(said) > 1 and not standing
            if chance.random() < 0.3:
                pending.append((said, prompt))
                continue
            if chance.random() < 0.1:
                branches.give_up(prompt)
                continue
            conversations.append([*said, echo(answer(branches, prompt, chance), chance)])
        for said, prompt in pending:
            conversations.append([*said, echo(answer(branches, prompt, chance), chance)])
        for sample in branches.samples:
            assert len(sample.tokens) == len(sample.loss_mask) == len(sample.rollout_logprobs)
        turns = sum(len(sample.turn_starts) for sample in branches.samples)
        assert turns == len(conversations)
        numbers = [sample.turn_numbers for sample in branches.samples]
        assert sorted(itertools.chain(*numbers)) == list(range(turns))
        assert all(each == sorted(each) for each in numbers)
    assert extended > 1000
    assert forked > 100


def echo(content: str, chance: random.Random) -> Message:
    """As a client gives it back: white space around it may be another."""
    changed = chance.choice([content, content.strip(), content + " "])
    return {"role": "assistant", "content": changed}


def text(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=False))


def bare(said: str) -> str:
    """Without white space, of which answers have their own."""
    return "".join(said.split())


def test_equal_conversations_have_draws_of_their_own() -> None:
    branches = Branches(ChatTokenizer(char_tokenizer(CHATML)), 5)
    said: list[Message] = [{"role": "user", "content": "hi"}]
    prompts = [branches.prompt(said) for _ in range(3)]
    seeds = {branches.draw_seed(prompt.branch) for prompt in prompts}
    assert len(seeds) == 3
    again = Branches(ChatTokenizer(char_tokenizer(CHATML)), 5)
    again.prompt([{"role": "user", "content": "something else first"}])
    assert again.draw_seed(again.prompt(said).branch) in seeds


def test_equal_conversations_draw_apart_whichever_of_them_was_given_up() -> None:
    branches = Branches(ChatTokenizer(char_tokenizer(CHATML)), 5)
    said: list[Message] = [{"role": "user", "content": "hi"}]
    first, second = (branches.prompt(said) for _ in range(2))
    seeds = [branches.draw_seed(each.branch) for each in (first, second)]
    branches.give_up(first)
    third, fourth = (branches.prompt(said) for _ in range(2))
    # The same request may have come again: it draws what it would have drawn.
    assert branches.draw_seed(third.branch) == seeds[0]
    assert branches.draw_seed(fourth.branch) not in seeds


def test_a_turn_says_the_versions_of_its_first_and_its_last_token() -> None:
    branches = Branches(ChatTokenizer(TOKENIZER), 0)
    prompt = branches.prompt([{"role": "user", "content": "hi"}])
    spans = [VersionSpan(4, 0, 2), VersionSpan(5, 2, 3)]
    branches.answer(prompt, Completion(LETTERS[:3], [-1.0] * 3, "length", spans))
    (sample,) = branches.samples
    assert (sample.policy_version_first, sample.policy_version_last) == ([4], [5])
