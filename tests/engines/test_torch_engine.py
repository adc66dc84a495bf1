"""What the torch engine promises beyond the contract: exactness, other models, bounded memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PhimoeConfig, PhimoeForCausalLM

from earl_core.rollout.engines import slot_cache, torch_engine
from earl_core.rollout.engines.engine import (
    Completion,
)
from earl_core.rollout.engines.sampling import sample, uniform
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.rollout.errors import (
    EngineError,
    EngineLost,
)
from earl_core.rollout.rollout_worker import RolloutWorker
from earl_core.system.errors import ConfigError
from tests.engines.driver import Driver, request
from tests.engines.models import POSITIONS, make, prompt_of, reference_logprobs


def _start(directory: Path, **options: object) -> Driver:
    driver = Driver(TorchEngine(directory, **options), directory)  # type: ignore[arg-type]
    driver.run(driver.engine.start())
    return driver


def _play(driver: Driver, lengths: list[int], turns: int = 3) -> list[list[Completion]]:
    """Turns of games of different lengths, some of which end early."""
    contexts = {index: prompt_of(index, length) for index, length in enumerate(lengths)}
    history = []
    for turn in range(turns):
        requests = [
            request(index, context, max_tokens=1 + index % 4, seed=99 * turn + index)
            for index, context in contexts.items()
        ]
        answers = driver.generate(requests)
        history.append(answers)
        for (index, context), answer in zip(list(contexts.items()), answers, strict=True):
            context += answer.tokens + prompt_of(1000 * turn + index, 1 + index % 5)
            if index % 3 == turn:
                driver.engine.finish([index])
                del contexts[index]
    driver.engine.finish(list(contexts))
    return history


@pytest.mark.parametrize("kind", ["llama_untied", "qwen2", "gpt2"])
@pytest.mark.parametrize("prefill_tokens", [8192, 16])
def test_models_of_other_styles_answer_as_without_a_cache(
    kind: str, prefill_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "_PREFILL_TOKENS", prefill_tokens)
    make(kind, tmp_path)
    driver = _start(tmp_path)
    try:
        contexts = [prompt_of(seed, length) for seed, length in enumerate((4, 90, 7, 12, 5))]
        for turn in range(3):
            requests = [
                request(index, context, max_tokens=5, seed=turn)
                for index, context in enumerate(contexts)
            ]
            for context, answer in zip(contexts, driver.generate(requests), strict=True):
                expected = reference_logprobs(tmp_path, context, answer.tokens, 0.7)
                np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5, rtol=1e-5)
                context += answer.tokens + prompt_of(turn, 3)
        statistics = driver.engine.statistics()
        assert statistics["prefix_hit_tokens"] > 0.5 * statistics["prompt_tokens"]
    finally:
        driver.close()


def test_equal_batches_give_equal_bits_in_fresh_engines(tmp_path: Path) -> None:
    make("llama_tied", tmp_path)
    histories = []
    for _ in range(2):
        driver = _start(tmp_path)
        try:
            histories.append(_play(driver, [5, 9, 33, 12, 60, 7, 21]))
        finally:
            driver.close()
    assert histories[0] == histories[1]
    # An engine that has played before and forgotten is as good as new.
    driver = _start(tmp_path)
    try:
        _play(driver, [100, 3, 17])
        assert _play(driver, [5, 9, 33, 12, 60, 7, 21]) == histories[0]
    finally:
        driver.close()


def test_small_batches_sample_the_same_tokens(tmp_path: Path) -> None:
    make("llama_tied", tmp_path)
    played = []
    for running in (256, 2):
        driver = _start(tmp_path, max_running_requests=running)
        try:
            played.append(_play(driver, [5, 9, 33, 12, 60, 7, 21]))
        finally:
            driver.close()
    for one, other in zip(*played, strict=True):
        assert [answer.tokens for answer in one] == [answer.tokens for answer in other]


def test_forgetting_sequences_frees_their_memory(tmp_path: Path) -> None:
    make("llama_tied", tmp_path)
    driver = _start(tmp_path)
    try:
        requests = [request(index, prompt_of(index, 30)) for index in range(16)]
        driver.generate(requests)
        assert driver.engine.statistics()["cache_bytes"] > 0
        driver.engine.finish(range(8))
        driver.engine.finish(range(8, 99))
        assert driver.engine.statistics()["cache_bytes"] == 0
        driver.generate(requests)
        driver.run(driver.engine.release_memory())
        assert driver.engine.statistics()["cache_bytes"] == 0
        with pytest.raises(EngineError, match="restore_memory"):
            driver.generate(requests)
        driver.run(driver.engine.restore_memory())
        assert len(driver.generate(requests)) == 16
        driver.run(driver.engine.stop())
        with pytest.raises(EngineLost, match="stopped"):
            driver.generate(requests)
    finally:
        driver.close()


def test_what_it_would_answer_wrongly_is_refused(tmp_path: Path) -> None:
    config = PhimoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=16, num_local_experts=2,
        max_position_embeddings=64,
    )  # fmt: skip
    PhimoeForCausalLM(config).save_pretrained(tmp_path / "window")
    with pytest.raises(ConfigError, match="do not hand on their sliding window of 16 tokens"):
        _start(tmp_path / "window")
    driver = _start(tmp_path / "window", max_model_len=16)
    assert len(driver.answer([1, 2, 3], max_tokens=4).tokens) == 4
    driver.close()
    make("llama_tied", tmp_path / "plain")
    with pytest.raises(ConfigError, match="max_model_len"):
        _start(tmp_path / "plain", max_model_len=POSITIONS + 1)


def test_diverged_weights_are_an_error_not_a_sample(tmp_path: Path) -> None:
    model = make("llama_tied", tmp_path)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    driver = _start(tmp_path)
    try:
        with pytest.raises(EngineError, match="diverged"):
            driver.answer([1, 2, 3])
    finally:
        driver.close()


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20), st.integers(0, 10**6))
def test_uniforms_are_pure_functions_below_one(seeds: list[int], counter: int) -> None:
    array = np.array(seeds, dtype=np.uint64)
    counters = np.full(len(seeds), counter, dtype=np.uint64)
    together = uniform(array, counters)
    assert np.all((together >= 0) & (together < 1))
    alone = [uniform(array[i : i + 1], counters[i : i + 1])[0] for i in range(len(seeds))]
    assert together.tolist() == alone


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    seeds, counters = np.meshgrid(np.arange(300), np.arange(300))
    drawn = uniform(seeds.ravel().astype(np.uint64), counters.ravel().astype(np.uint64))
    counts = np.histogram(drawn, bins=100, range=(0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 99 + 5 * np.sqrt(198)
    grid = drawn.reshape(300, 300)
    for one, other in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.sampled_from([0.0, 0.3, 1.0, 2.0]))
def test_sampling_inverts_the_distribution(seed: int, vocabulary: int, temperature: float) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(5, vocabulary)) * 4
    logits[:, 0] = -np.inf  # an impossible token is never drawn
    uniforms = generator.random(5)
    tokens, logprobs, _ = sample(torch.tensor(logits), np.full(5, temperature), uniforms)
    scaled = logits / (temperature or 1.0)
    expected = scaled - np.log(np.exp(scaled - scaled.max(1, keepdims=True)).sum(1, keepdims=True))
    expected -= scaled.max(1, keepdims=True)
    for row in range(5):
        token = int(tokens[row])
        if temperature == 0.0:
            assert token == int(np.argmax(logits[row]))
        else:
            cumulative = np.cumsum(np.exp(expected[row]))
            low = cumulative[token - 1] if token else 0.0
            assert low - 1e-5 <= uniforms[row] <= cumulative[token] + 1e-5
        assert token != 0
        assert float(logprobs[row]) == pytest.approx(expected[row, token], abs=1e-4)


@pytest.mark.parametrize("width", [1, 5])
def test_the_attention_of_a_gpu_is_that_of_a_cpu(width: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, width, 8, 16).transpose(1, 2)
    key, value = (torch.randn(4, 2, 30, 16)[:3, :, :20] for _ in range(2))
    hidden = torch.arange(20) > torch.randint(0, 20, (3, 1, width, 1))
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    expected = slot_cache.attend_on_cpu(query, key, value, mask, 0.25)
    found = slot_cache.attend_on_gpu(query, key, value, mask, 0.25)
    assert float(expected.std()) > 0.1
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("method", ["release_memory", "restore_memory"])
def test_a_worker_whose_engine_is_lost_gives_its_memory_back_by_ending_it(
    method: str, tmp_path: Path
) -> None:
    make("llama_untied", tmp_path)
    driver = _start(tmp_path)
    driver.engine._lost = "it ran out of memory"  # type: ignore[attr-defined]
    worker = RolloutWorker.__new__(RolloutWorker)
    worker._engine, worker._digest = driver.engine, "of its weights"
    worker._run_directory, worker._groups = tmp_path, None
    driver.run(getattr(worker, method)())
    assert worker._engine is None
    assert worker._digest == ""
    assert driver.engine._model is None  # type: ignore[attr-defined]
