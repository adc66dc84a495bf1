"""Models of which layers have a state, on the torch engine, against plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from earl_core.config.rollout import DraftsConfig
from earl_core.rollout.engines import row_states, torch_engine
from earl_core.rollout.engines.engine import Completion
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.system.errors import ConfigError
from earl_core.weights.publish import publish
from tests.engines.driver import Driver, request
from tests.engines.models import (
    VOCABULARY,
    make_hybrid,
    model_logprobs,
    prompt_of,
    reference_logprobs,
)
from tests.families.registry import build

_LENGTHS = (4, 90, 1, 7, 33)


def _start(directory: Path, **options: Any) -> Driver:
    driver = Driver(TorchEngine(directory, **options), directory)
    driver.run(driver.engine.start())
    return driver


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("Qwen3_5")
    make_hybrid("Qwen3_5", directory)
    return directory


def _assert_plain(directory: Path, prompt: list[int], answer: Completion) -> None:
    expected = reference_logprobs(directory, prompt, answer.tokens, 0.7)
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5, rtol=0)


def _play(driver: Driver, turns: int = 3) -> list[tuple[list[int], Completion]]:
    """Games of uneven lengths, of which one ends each turn and another takes its place."""
    contexts = {index: prompt_of(index, length) for index, length in enumerate(_LENGTHS)}
    played = []
    for turn in range(turns):
        asked = [
            request(index, context, max_tokens=2 + index % 4, seed=99 * turn + index)
            for index, context in contexts.items()
        ]
        for item, answer in zip(asked, driver.generate(asked), strict=True):
            played.append((list(item.tokens), answer))
            contexts[item.sequence_id] += answer.tokens + prompt_of(turn, 1 + item.sequence_id)
        driver.engine.finish([turn])
        del contexts[turn]
        contexts[10 + turn] = prompt_of(50 + turn, 3 + 8 * turn)
    driver.engine.finish(list(contexts))
    return played


@pytest.mark.parametrize(
    ("kind", "prefill_tokens"),
    [
        ("Qwen3Next", 8192),
        ("Qwen3_5", 8192),
        ("Qwen3_5", 16),
        ("Qwen3_5Moe", 16),
        ("OlmoHybrid", 16),
    ],
)
def test_uneven_games_answer_as_without_a_cache(
    kind: str, prefill_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts padded to each other and in parts, answers that end before others, further turns,
    and slots that were another's."""
    monkeypatch.setattr(torch_engine, "_PREFILL_TOKENS", prefill_tokens)
    make_hybrid(kind, tmp_path)
    driver = _start(tmp_path, record_routing=True)
    try:
        for prompt, answer in _play(driver):
            _assert_plain(tmp_path, prompt, answer)
            assert (answer.routing is None) == (kind in ("Qwen3_5", "OlmoHybrid"))
        statistics = driver.engine.statistics()
        assert statistics["prefix_hit_tokens"] > 0.4 * statistics["prompt_tokens"]
    finally:
        driver.close()


def test_equal_batches_give_equal_bits(dense: Path) -> None:
    histories = []
    for _ in range(2):
        driver = _start(dense)
        try:
            histories.append(_play(driver))
            # One that has played before and forgotten is as good as new.
            histories.append(_play(driver))
        finally:
            driver.close()
    assert all(history == histories[0] for history in histories)


def test_a_prompt_that_is_not_a_continuation_begins_with_nothing(dense: Path) -> None:
    driver = _start(dense)
    try:
        prompt = prompt_of(3, 40)
        first = driver.generate([request(0, prompt)])[0]
        assert driver.generate([request(0, prompt)])[0] == first
        other = [*prompt, *first.tokens[:4], 7, 9]
        _assert_plain(dense, other, driver.generate([request(0, other)])[0])
        assert driver.engine.statistics()["prefix_hit_tokens"] == 0
    finally:
        driver.close()


def test_new_weights_amid_an_answer_have_states_of_their_own(dense: Path, tmp_path: Path) -> None:
    driver = _start(dense)
    try:
        prompt = prompt_of(3, 20)
        begun = driver.generate([request(0, prompt, max_tokens=5)])[0]
        model = make_hybrid("Qwen3_5", tmp_path / "new", seed=1)
        driver.run(
            driver.engine.play_under(publish(model.state_dict(), tmp_path / "w", 1, torch.float32))
        )
        answer = driver.generate([request(0, prompt, max_tokens=12, begun=begun)])[0]
        after = model_logprobs(model, prompt, answer.tokens, 0.7)
        before = reference_logprobs(dense, prompt, answer.tokens, 0.7)
        np.testing.assert_allclose(answer.logprobs, [*before[:5], *after[5:]], atol=1e-5)
        assert np.abs(np.subtract(before, after)).max() > 0.1
    finally:
        driver.close()


def test_a_slots_memory_counts_its_states(dense: Path) -> None:
    driver = _start(dense)
    try:
        driver.generate([request(n, prompt_of(n, 20), max_tokens=2) for n in range(3)])
        states = 4 * 16 * 16
        window = 3 * (2 * 2 * 16 + 4 * 16)
        # 64 columns and one for padding, of keys and of values.
        attention = 65 * 2 * 2 * 32
        expected = 4 * 3 * (3 * (states + window) + attention)
        assert driver.engine.statistics()["cache_bytes"] == expected
        driver.engine.finish(range(3))
        assert driver.engine.statistics()["cache_bytes"] == 0
    finally:
        driver.close()


def test_there_are_no_drafts(dense: Path) -> None:
    with pytest.raises(ConfigError, match="no drafts for qwen3_5_text models"):
        _start(dense, drafts=DraftsConfig())


def test_a_released_directory_plays_its_text_alone(tmp_path: Path) -> None:
    text = build("Qwen3_5", vocab_size=VOCABULARY).config.to_dict()
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
        "out_hidden_size": 128, "num_position_embeddings": 16,
    }  # fmt: skip
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = {name: 250 + n for n, name in enumerate(special)}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **tokens)
    whole = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    driver = _start(tmp_path)
    try:
        prompt = prompt_of(3, 20)
        answer = driver.answer(prompt)
        expected = model_logprobs(whole, prompt, answer.tokens, 0.7)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)
    finally:
        driver.close()


def test_states_of_another_rule_are_refused(tmp_path: Path) -> None:
    model = build("MiniMax")
    with pytest.raises(ConfigError, match="another state than that of a gated"):
        row_states.RowStates(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="layers of type linear_attention, which neither"):
        _start(tmp_path)


@pytest.mark.parametrize("kind", ["Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "OlmoHybrid"])
def test_padding_that_leaves_a_trace_is_found(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hybrid(kind, tmp_path)
    monkeypatch.setattr(row_states, "_shut", lambda states, gate, inputs, output: output)
    with pytest.raises(ConfigError, match="otherwise than transformers"):
        _start(tmp_path)
