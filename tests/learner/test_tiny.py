"""The tiny model: its tokenizer, its warm start, its directory."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from earl_core.config.environment import EnvironmentConfig
from earl_core.environments.games.tic_tac_toe import TicTacToe
from earl_core.environments.registry import create
from earl_core.models.tiny import build, character_tokenizer, legal_play
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.system.errors import ConfigError

USER = "tests.environments.user_environments"
SMALL = {"hidden": 32, "layers": 1, "heads": 2, "warm_start_games": 4}


def test_one_token_a_character_and_back() -> None:
    tokenizer = character_tokenizer(TicTacToe.compact_characters)
    for _ in range(20):
        text = "".join(random.choices(TicTacToe.compact_characters, k=30))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert len(tokens) == 30
        assert tokenizer.decode(tokens) == text
    assert tokenizer.encode("z", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_the_template_ends_turns_and_keeps_answers_in_place() -> None:
    tokenizer = character_tokenizer(TicTacToe.compact_characters)
    chat = ChatTokenizer(tokenizer)
    assert chat.prefix_stable()
    assert chat.stop_token_ids == (tokenizer.eos_token_id,)
    first = chat.first_prompt([{"role": "user", "content": "123|456|789"}])
    answer = [*chat.encode("5"), tokenizer.eos_token_id]
    after = chat.next_prompt(answer, [{"role": "user", "content": "1X3"}])
    assert tokenizer.decode([*first, *answer, *after]) == "<bos>>123|456|789=5<end>>1X3="
    assert chat.text_of(answer) == "5"


def compact(name: str) -> dict[str, object]:
    return {"name": name, "options": {"style": "compact"}}


@pytest.mark.parametrize("name", ["tic_tac_toe", "connect_four"])
def test_the_directory_is_reproducible_and_loads(name: str, tmp_path: Path) -> None:
    for number, steps in (("a", 3), ("b", 3), ("c", 0)):
        torch.manual_seed(ord(number))
        build(tmp_path / number, environments=[compact(name)], warm_start_steps=steps, **SMALL)
    same = [(tmp_path / n / "model.safetensors").read_bytes() for n in "abc"]
    assert same[0] == same[1] != same[2]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}
    before = (tmp_path / "a" / "model.safetensors").stat().st_mtime_ns
    build(tmp_path / "a", environments=[compact(name)], seed=5)
    assert (tmp_path / "a" / "model.safetensors").stat().st_mtime_ns == before


def test_environments_of_ones_own_name_their_characters(tmp_path: Path) -> None:
    """Together with a built-in one; the first knows no legal answers, the second does."""
    mixture = [{"name": f"{USER}:Echo"}, compact("tic_tac_toe")]
    build(tmp_path / "m", environments=mixture, characters="z", warm_start_steps=1, **SMALL)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    known = "ab?z" + TicTacToe.compact_characters
    assert tokenizer.unk_token_id not in tokenizer.encode(known, add_special_tokens=False)
    assert tokenizer.encode("c", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_the_warm_start_sees_the_legal_answers_of_ones_own_environment() -> None:
    own = EnvironmentConfig(name=f"{USER}:Echo", options={"knows": True})
    played = [own, EnvironmentConfig(name=f"{USER}:Echo")]
    told = legal_play(played, 40, seed=1)
    assert told.characters == "?ab"
    assert len(told.games) == 40
    assert {answer for ((_, answer),) in told.games} == {"a", "bb"}
    assert all(messages[0]["content"] == "?" for ((messages, _),) in told.games)
    assert legal_play(played, 40, seed=1) == told
    with pytest.raises(ConfigError, match="warm_start_steps to 0"):
        legal_play([EnvironmentConfig(name=f"{USER}:Failing")], 1, seed=1)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"name": "tests.environments.user_environments:Counting"}, "Counting' names none"),
        ({"agent": "tests.rollout.agents:tic_tac_toe"}, "'agent:.*tic_tac_toe' names none"),
        ({"name": f"{USER}:Untold"}, "`characters` .* is no text: 7"),
    ],
)
def test_environments_without_characters_are_refused(
    environment: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(tmp_path / "m", environments=[environment])


@pytest.mark.campaign
def test_the_warm_start_wins_about_a_quarter_of_its_games(tmp_path: Path) -> None:
    build(tmp_path / "m", environments=[compact("tic_tac_toe")])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert 1_500_000 < model.num_parameters() < 2_500_000
    chat = ChatTokenizer(AutoTokenizer.from_pretrained(tmp_path / "m"))
    outcomes: Counter[str] = Counter()
    torch.manual_seed(0)
    for number in range(200):
        game = create("tic_tac_toe", {"style": "compact"})
        row = chat.first_prompt(game.reset(number, 10**6 + number))
        while True:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([row])).logits[0, -1]
            answer = int(torch.multinomial(logits.softmax(-1), 1))
            result = game.step(chat.text_of([answer]))
            if result.done:
                outcomes[result.info["outcome"]] += 1
                break
            row += [answer, *chat.next_prompt([answer], result.messages)]
    assert 0.2 < outcomes["win"] / 200 < 0.45, outcomes
