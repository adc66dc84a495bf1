"""Engines in other processes that end for lack of memory: told from what they left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from earl_core.cluster.errors import Raised, Where, WorkerCallFailed
from earl_core.config.rollout import VllmConfig
from earl_core.control.failure_diagnosis import diagnose
from earl_core.rollout.engines import processes
from earl_core.rollout.engines.processes import MemoryWatch
from earl_core.rollout.errors import ContextOverflow
from earl_core.selector.choice.policy import select
from earl_core.selector.profile.observations import Observation, forbidden_of
from earl_core.system.memory import OutOfMemory
from tests.engines.driver import Driver, request
from tests.engines.forked import forked_engines
from tests.engines.models import POSITIONS, make, prompt_of
from tests.engines.starting import start
from tests.selector.examples import given

FAILED = RuntimeError(
    "Engine core initialization failed. See root cause above. Failed core proc(s): "
    "{'EngineCore_DP0': 1}"
)
KILLED = RuntimeError(str(FAILED).replace(": 1}", ": -9}"))
CACHE = (
    "ValueError: To serve at least one request with the model's max seq len (4096), (2.25 GiB KV "
    "cache is needed, which is larger than the available KV cache memory (1.0 GiB)."
)
LITTLE_LEFT = (
    "ValueError: Free memory on device cuda:0 (11.93/79.1 GiB) on startup is less than desired GPU "
    "memory utilization (0.85, 67.24 GiB). Decrease GPU memory utilization or reduce GPU memory "
    "used by other processes."
)


@pytest.fixture
def log() -> Iterator[Callable[[str], object]]:
    """Standard error as a worker has it: a file. What is called writes to it."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda text: os.write(2, text.encode())
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        (CACHE, int(2.25 * 2**30)),
        ("ValueError: No available memory for the cache blocks. Try increasing", None),
        (LITTLE_LEFT, int(67.24 * 2**30)),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't "
         "allocate memory: you tried to allocate 4096 bytes.", 4096),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB.", 3 * 2**29),
    ],
)  # fmt: skip
def test_the_cause_stands_in_the_log(
    log: Callable[[str], object], said: str, asked: int | None
) -> None:
    log("an older engine: DefaultCPUAllocator: can't allocate memory\n")
    watch = MemoryWatch()
    assert watch.problem(FAILED, "starting vLLM") is None
    log(f"(EngineCore pid=7) ERROR 11-21 Traceback\n(EngineCore pid=7) ERROR {said}\n")
    found = watch.problem(FAILED, "starting vLLM")
    assert isinstance(found, OutOfMemory)
    assert found.payload == {"stage": "rollout", "bytes_asked": asked}
    assert str(found).startswith("starting vLLM ran out of memory")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["(EngineCore pid=7) ERROR 11-21 10:00:00 [core.py:866] ValueError: no head of 48",
          "(EngineCore pid=7) INFO bye", f"RuntimeError: {FAILED}"], "ValueError: no head of 48"),
        (["x.cpp:3:10: fatal error: omp.h: No such file or directory"],
         "x.cpp:3:10: fatal error: omp.h: No such file or directory"),
        (["/usr/bin/ld: cannot find -ltorch", "collect2: error: ld returned 1 exit status",
          "subprocess.CalledProcessError: Command 'c++' returned 1", "all is well"],
         "subprocess.CalledProcessError: Command 'c++' returned 1"),
        (["KeyError: 'a'", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an "
          "issue. See stack trace (above) for the root cause."], "KeyError: 'a'"),
        (["INFO started", "WARNING slow"], ""),
    ],
)  # fmt: skip
def test_a_death_says_the_last_error_of_its_log(
    log: Callable[[str], object], lines: list[str], said: str
) -> None:
    log("ValueError: of an older engine\n")
    watch = MemoryWatch()
    log("\n".join(lines) + "\n")
    expected = f"it died; its log's last error: {said}" if said else "it died"
    assert watch.with_cause("it died") == expected


def test_a_gpu_that_others_fill_has_select_choose_again(log: Callable[[str], object]) -> None:
    watch = MemoryWatch()
    log(f"(EngineCore pid=7) ERROR {LITTLE_LEFT}\n")
    found = watch.problem(FAILED, "starting vLLM")
    assert found is not None
    assert "lower rollout.vllm.gpu_memory_utilization" in str(found)
    where = Where("rollout", 0, "ensure", "rollout", 5)
    infeasible = diagnose(WorkerCallFailed(where, Raised.of(found)))
    assert infeasible is not None
    assert infeasible[:2] == ("out_of_memory", "rollout")
    base = given()
    first = select(base)["rollout"]
    seen = Observation(iteration=5, stage="rollout", kind=infeasible.kind, deployment=first)
    again = select(base.model_copy(update={"forbidden": forbidden_of([seen], 5)}))["rollout"]
    assert again != first


def test_a_kill_counts_when_the_kernel_counted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, kills = MemoryWatch(), 0
    monkeypatch.setattr(processes, "out_of_memory_kills_since", lambda before: kills)
    assert watch.problem(KILLED, "starting vLLM") is None
    kills = 1
    assert watch.problem(KILLED, "starting vLLM") is not None
    # Somebody else's process: ours ended by itself.
    assert watch.problem(FAILED, "starting vLLM") is None


@pytest.mark.slow
def test_vllm_without_room_for_one_sequence_is_out_of_memory(
    tmp_path: Path, log: Callable[[str], object]
) -> None:
    """A position range whose keys and values take more than the whole cache."""
    pytest.importorskip("vllm")
    from transformers import AutoConfig

    from earl_core.rollout.engines.vllm_engine import VllmEngine

    make("llama_tied", tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    config.max_position_embeddings = 2**21
    config.save_pretrained(tmp_path / "model")
    with tempfile.TemporaryDirectory(prefix="rpc") as scratch:
        engine = VllmEngine(
            tmp_path / "model",
            dtype="float32",
            scratch=Path(scratch),
            settings=VllmConfig(kv_cache_gib=1),
        )
        driver = Driver(engine, tmp_path / "model")
        try:
            with forked_engines(), pytest.raises(OutOfMemory) as caught:
                driver.run(engine.start())
        finally:
            driver.close()
        assert list(Path(scratch).iterdir()) == []
    assert caught.value.payload["stage"] == "rollout"
    assert caught.value.payload["bytes_asked"] > 2**30


@pytest.mark.slow
def test_a_vllm_engine_built_too_short_is_outgrown(tmp_path: Path) -> None:
    """The engine says where its context ended; the agent loop knows that the model goes on."""
    pytest.importorskip("vllm")
    from earl_core.rollout.agent_loop import play
    from earl_core.rollout.episode_player import PlaySettings
    from earl_core.trajectory.samples import EpisodeSpec
    from tests.rollout.scripted import ScriptedEnvironments
    from tests.rollout.test_agent_loop import CHAT

    # Its vocabulary holds that of the chat tokenizer.
    directory = tmp_path / "model"
    make("llama_tied", directory)
    with tempfile.TemporaryDirectory(prefix="rpc") as scratch:
        driver = start("vllm", directory, Path(scratch), max_model_len=64)
        try:
            specs = [EpisodeSpec(i, i, i, seed=i) for i in range(4)]
            limits = PlaySettings(max_turns=50, positions=POSITIONS)
            pool = ScriptedEnvironments(lambda i: 50)
            with pytest.raises(ContextOverflow) as caught:
                driver.run(play(driver.engine, pool, CHAT, specs, limits))  # type: ignore[arg-type]
            assert caught.value.payload["tokens"] > 64
            # It still answers: nothing was lost but the episodes.
            answer = driver.generate([request(9, prompt_of(1, 8), max_tokens=4)])[0]
            assert len(answer.tokens) == 4
        finally:
            driver.close()
