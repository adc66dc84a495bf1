"""What the vLLM engine promises beyond the contract: exact updates, clean ends, clear errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import transformers

from earl_core.config.engine_models import CPU_HEADS, CPU_LATENTS, check_on_vllm
from earl_core.pretrained.architecture import shape_of
from earl_core.rollout.engines import vllm_environment
from earl_core.rollout.engines.engine import (
    Completion,
)
from earl_core.rollout.errors import (
    EngineLost,
)
from earl_core.system.errors import ConfigError
from earl_core.weights.publish import publish
from tests.engines.driver import Driver, request
from tests.engines.models import make, prompt_of
from tests.engines.starting import start
from tests.families.registry import build

pytest.importorskip("vllm")


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _greedy(driver: Driver, count: int = 6, tokens: int = 16) -> list[Completion]:
    """One after the other: batches depend on when requests arrive, and bfloat16 on batches."""
    requests = [
        request(index, prompt_of(index, 20 + index), temperature=0.0, max_tokens=tokens)
        for index in range(count)
    ]
    return [driver.generate([each])[0] for each in requests]


def _end(driver: Driver, before: set[str]) -> None:
    pids = driver.engine.pids()
    driver.close()
    assert len(pids) >= 1
    assert not any(psutil.pid_exists(pid) for pid in pids)
    # Others may use shared memory at the same time; ours is what these processes had open.
    left = {name for name in _shared_memory() - before if any(str(pid) in name for pid in pids)}
    assert left == set()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="rpc") as directory:
        yield Path(directory)


@pytest.mark.slow
def test_an_update_equals_a_fresh_engine_and_a_killed_engine_is_lost(
    tmp_path: Path, scratch: Path
) -> None:
    """Untied weights in bfloat16, prefix cache warm; the difference must be exactly zero."""
    before = _shared_memory()
    make("llama_untied", tmp_path / "old")
    model = make("llama_untied", tmp_path / "new", seed=5)
    manifest = publish(model.state_dict(), tmp_path / "published", 3, "bfloat16")

    driver = start("vllm", tmp_path / "old", scratch, dtype="bfloat16")
    try:
        old = _greedy(driver)
        driver.run(driver.engine.play_under(manifest))
        updated = _greedy(driver)
        repeated = _greedy(driver)
    finally:
        _end(driver, before)
    assert list(scratch.iterdir()) == []

    driver = start("vllm", tmp_path / "new", scratch, dtype="bfloat16")
    try:
        fresh = _greedy(driver)
        assert [a.tokens for a in updated] == [a.tokens for a in fresh]
        np.testing.assert_array_equal(_logprobs(updated), _logprobs(fresh))
        assert [a.tokens for a in old] != [a.tokens for a in fresh]
        # The yardstick: a cached prefix changes rounding, new weights change everything.
        noise = np.abs(_logprobs(repeated)[:, 0] - _logprobs(fresh)[:, 0]).max()
        assert np.abs(_logprobs(old)[:, 0] - _logprobs(fresh)[:, 0]).mean() > 10 * noise
        _kill_and_notice(driver)
    finally:
        _end(driver, before)


def _logprobs(answers: list[Completion]) -> np.ndarray:
    return np.array([answer.logprobs for answer in answers])


def _kill_and_notice(driver: Driver) -> None:
    """SIGKILL the engine process in the middle of answers: an error at once, not a hang."""
    engine_process, *_ = driver.engine.pids()

    async def killed() -> None:
        import asyncio

        requests = [request(index, prompt_of(index, 20), max_tokens=200) for index in range(64)]
        running = asyncio.create_task(driver.engine.generate(requests))
        await asyncio.sleep(0.1)
        os.kill(engine_process, signal.SIGKILL)
        await running

    started = time.monotonic()
    with pytest.raises(EngineLost, match="fresh"):
        driver.run(killed())
    assert time.monotonic() - started < 60
    with pytest.raises(EngineLost):
        driver.answer([1, 2, 3])


def test_a_vllm_that_cannot_be_imported_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('torchvision::nms')")
    script = """
from earl_core.rollout.engines import vllm_environment
from earl_core.system.errors import ConfigError
try:
    vllm_environment.load()
except ConfigError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    for part in ("torchvision::nms", "pip uninstall", "torch==2.13.0", "rollout.engine=torch"):
        assert part in done.stdout


@pytest.mark.campaign
def test_smollm2_is_updated_exactly_and_matches_transformers(tmp_path: Path, scratch: Path) -> None:
    """The demo's model: tied, bfloat16; an update moves log-probs ten times more than the noise."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from earl_core.models.smollm2 import build

    before = _shared_memory()
    build(tmp_path / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]

    driver = start("vllm", tmp_path / "smollm2", scratch, dtype="bfloat16")
    try:
        # Its words depend on the processor: the first two candidates are nearly alike.
        answer = driver.answer(prompt, temperature=0.0, max_tokens=20, stop_token_ids=(2,))
        noise = np.abs(_difference(model, prompt, answer)).mean()
        assert noise < 0.1
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter += 0.25 * parameter.std() * drawn
        model.save_pretrained(tmp_path / "moved")
        manifest = publish(model.state_dict(), tmp_path / "published", 1, "bfloat16")
        moved = np.abs(_difference(model, prompt, answer)).mean()
        assert moved > 10 * noise
        driver.run(driver.engine.play_under(manifest))
        updated = _greedy(driver)
    finally:
        _end(driver, before)
    driver = start("vllm", tmp_path / "moved", scratch, dtype="bfloat16")
    try:
        fresh = _greedy(driver)
        np.testing.assert_array_equal(_logprobs(updated), _logprobs(fresh))
    finally:
        _end(driver, before)


@torch.inference_mode()
def _difference(model: torch.nn.Module, prompt: list[int], answer: Completion) -> np.ndarray:
    logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(answer.tokens)[:, None]).squeeze(1).numpy()
    return np.asarray(own - np.array(answer.logprobs))


def test_heads_that_vllm_would_die_of_are_refused_before_it_starts() -> None:
    """It died at the first prompt, as EngineLost."""
    vllm_environment.load()
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    assert list(CPU_HEADS) == CPUAttentionBackend.get_supported_head_sizes()
    assert list(CPU_LATENTS) == CPUMLABackend.get_supported_head_sizes()
    narrow = shape_of(build("Llama", head_dim=16).config)
    with pytest.raises(ConfigError, match=r"heads of 32, 64.*has heads of 16: use rollout\.engine"):
        check_on_vllm(narrow, 1, on_cpu=True)
    check_on_vllm(narrow, 1, on_cpu=False)
    check_on_vllm(shape_of(build("Qwen3").config), 1, on_cpu=True)
    with pytest.raises(ConfigError, match=r"takes latent attention heads of 576 numbers.*of 48"):
        check_on_vllm(shape_of(build("MiniCPM3").config), 1, on_cpu=True)


def test_an_output_layer_that_vllm_leaves_out_is_refused_before_it_starts() -> None:
    """It answered by the embeddings, a nat from the trainer."""
    for kind in (transformers.Cohere2Config, transformers.Gemma2Config):
        with pytest.raises(ConfigError, match=r"logits of .*with their embeddings.*engine=torch"):
            check_on_vllm(shape_of(kind(tie_word_embeddings=False)), 1, on_cpu=False)
        check_on_vllm(shape_of(kind(tie_word_embeddings=True)), 1, on_cpu=True)
    untied = transformers.LlamaConfig(tie_word_embeddings=False)
    check_on_vllm(shape_of(untied), 1, on_cpu=True)


def test_mixtures_that_the_cpu_build_could_not_reload_are_refused_before_it_starts() -> None:
    shape = shape_of(build("Qwen3Moe").config)
    check_on_vllm(shape, 2, on_cpu=True)
    check_on_vllm(shape, 4, on_cpu=False)
    with pytest.raises(ConfigError, match=r"multiple of 32.*has 64 over 4 ranks.*engine=torch"):
        check_on_vllm(shape, 4, on_cpu=True)
    check_on_vllm(shape_of(build("Qwen3").config), 3, on_cpu=True)
