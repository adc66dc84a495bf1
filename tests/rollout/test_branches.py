"""Random sessions against the chat template itself: what stands in a prompt is what was said."""

from __future__ import annotations

import itertools
import random

import pytest

from earl_core.environments.base import Message
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.tool_calls import NO_TOOLS, Tools
from earl_core.rollout.engines.engine import Completion
from earl_core.rollout.gateway.branches import Branches, Prompt
from earl_core.rollout.gateway.repeated import _is_what_is_left
from earl_core.system.errors import ConfigError
from earl_core.trajectory.samples import VersionSpan
from tests.rollout.chat_models import CHATML, DROPS_REASONING, READS_REASONING, char_tokenizer

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


def said_by(branches: Branches, messages: list[Message], text: str, tools: Tools) -> Message:
    """Have the policy answer this."""
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False), END]
    spans = [VersionSpan(1, 0, len(tokens))]
    completion = Completion(tokens, [-1.0] * len(tokens), "stop", spans)
    return branches.answer(branches.prompt(messages, tools), completion)[0]


CALLS = Tools([{"type": "function", "function": {"name": "look", "parameters": {}}}])
REASONED = "<think>hm</think>hello"
CALLED = 'I look.<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("tools", "answer", "kept", "after"),
    [
        (NO_TOOLS, REASONED, "hello", "user"),
        (CALLS, CALLED, "", "tool"),
        (CALLS, f"<think>a</think>{CALLED}", "", "tool"),
    ],
)
def test_an_answer_that_comes_back_with_less_extends_its_sample(
    tools: Tools, answer: str, kept: str, after: str
) -> None:
    branches = Branches(ChatTokenizer(TOKENIZER), 5)
    messages: list[Message] = [{"role": "user", "content": "hi"}]
    for turn in range(3):
        message = said_by(branches, messages, answer, tools)
        assert message["content"] != kept
        # The ids of calls are the agent's own.
        back: Message = {**message, "content": kept}
        if calls := message.get("tool_calls"):
            back["tool_calls"] = [{**call, "id": f"own{turn}"} for call in calls]
        messages += [back, {"role": after, "content": "go on"}]
    (sample,) = branches.samples
    assert len(sample.turn_starts) == 3
    assert text(sample.tokens).count(answer) == 3
    # What is no answer's remainder is another conversation.
    said_by(branches, [*messages[:1], {**messages[1], "content": "other"}, messages[2]], "x", tools)
    assert len(branches.samples) == 2


def test_reasoning_beside_the_text_extends_its_sample_or_reaches_the_template() -> None:
    def after(template: str, reasoning: str) -> tuple[Branches, str]:
        branches = Branches(ChatTokenizer(char_tokenizer(template)), 5)
        first: list[Message] = [{"role": "user", "content": "hi"}]
        back = said_by(branches, first, REASONED, NO_TOOLS)
        back |= {"content": "hello", "reasoning_content": reasoning}
        prompt = branches.prompt([*first, back, {"role": "user", "content": "go on"}])
        before = prompt.sample.tokens if prompt.sample else []
        return branches, text([*before, *prompt.given])

    for template in (CHATML, READS_REASONING):
        branches, said = after(template, "hm")
        assert len(branches.all) == 1
        assert said.count(REASONED) == 1
    twice: Message = {"role": "assistant", "content": "<think>a</think>b</think>c"}
    for thought, content in (("a", "b</think>c"), ("a</think>b", "c")):
        beside: Message = {**twice, "content": content, "reasoning_content": thought}
        assert _is_what_is_left(twice, beside)
    assert not _is_what_is_left(twice, {**twice, "content": "c", "reasoning_content": "a"})
    branches, said = after(READS_REASONING, "other")
    assert len(branches.all) == 2
    assert "[other]hello" in said
    with pytest.raises(ConfigError, match="does not read reasoning_content"):
        after(CHATML, "other")


def test_what_could_be_left_of_two_answers_is_neither() -> None:
    branches = Branches(ChatTokenizer(TOKENIZER), 5)
    first: list[Message] = [{"role": "user", "content": "hi"}]
    for reasoning in ("a", "b"):
        said_by(branches, first, f"<think>{reasoning}</think>hello", NO_TOOLS)
    goes_on: Message = {"role": "user", "content": "go on"}
    bare_one: Message = {"role": "assistant", "content": "hello"}
    said_by(branches, [*first, bare_one, goes_on], "x", NO_TOOLS)
    assert [len(sample.turn_starts) for sample in branches.samples] == [1, 1, 1]
    whole: Message = {"role": "assistant", "content": "<think>b</think>hello"}
    said_by(branches, [*first, whole, goes_on], "x", NO_TOOLS)
    assert [len(sample.turn_starts) for sample in branches.samples] == [1, 2, 1]
