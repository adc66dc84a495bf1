"""The part of a rollout worker that owns its engine: build it, tell it what to play, end it.

torch, transformers and vllm are imported when the engine is built, not before.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.pretrained.adapter_directory import is_adapter
from earl_core.pretrained.grammars import Grammars, grammars_of
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.rollout.chat.call_grammars import check_call_form
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engine_factory import build_engine, load_chat_tokenizer, most_running
from earl_core.rollout.engines.engine import Engine
from earl_core.rollout.errors import EngineLost, WeightSyncError
from earl_core.rollout.probing import answered
from earl_core.run.worker import RunWorker
from earl_core.system.memory import OutOfMemory
from earl_core.weights.manifest import WeightsManifest

logger = logging.getLogger(__name__)
Generating = Callable[..., Coroutine[Any, Any, Any]]


def playing(generate: Generating) -> Generating:
    """Have the method play under `weights`, if it is given any."""

    @functools.wraps(generate)
    async def ensured(
        worker: EngineWorker, *arguments: Any, weights: dict[str, Any] | None = None, **named: Any
    ) -> Any:
        if weights is not None:
            await worker.ensure(weights)
        return await generate(worker, *arguments, **named)

    return ensured


class EngineWorker(RunWorker):
    """A rank with an engine. A lost engine is built by the next `ensure`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._engine: Engine | None = None
        self._chat: ChatTokenizer | None = None
        self._digest = ""
        self._probe: dict[str, float] = {}
        self._directory: tuple[dict[str, Any], WeightsManifest] | None = None
        self._positions: int | None = None

    async def prepare(self) -> None:
        """Start the engine, with the model's initial weights; raises as `ensure` does."""
        if self._engine is not None:
            return
        if self._config.rollout.requests.constrained == "engine":
            # Seconds for a large vocabulary, which the first request need not wait for.
            await asyncio.to_thread(self._grammars)
        self._chat = load_chat_tokenizer(self._config)
        if self._config.rollout.requests.constrained == "engine":
            check_call_form(self._chat)
        self._positions = read_model_shape(Path(self._config.initial_model.path)).max_positions
        engine = build_engine(self._config, self._deployment)
        try:
            await engine.start()
        except BaseException:
            await engine.stop()
            raise
        self._engine = engine

    def _grammars(self) -> Grammars:
        """The grammars of the model's tokenizer. Raises as `grammars_of`."""
        model = self._config.initial_model
        return grammars_of(Path(model.path), model.trust_remote_code)

    async def ensure(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Make the engine play under these weights: a dumped `WeightsManifest`, or {"directory",
        "policy_version"} of a Hugging Face model directory, or an adapter's, such as a
        checkpoint's.

        The first call, or `prepare`, builds the engine; weights are loaded only when version or
        digest differ, and then the engine answers their probe: `probe` in the result has what
        `probing.answered` found. Raises `WeightSyncError`, also where it answers as another model
        would, `EngineLost` or `OutOfMemory`; after a lost engine the next call builds anew.
        """
        started = time.perf_counter()
        manifest = await self._described(weights)
        await self.prepare()
        engine = self._engine
        assert engine is not None
        wanted = manifest.policy_version, manifest.digest
        loaded = (engine.policy_version, self._digest) != wanted
        if loaded:
            self._digest = ""
            try:
                await engine.play_under(manifest)
                self._probe = await answered(engine, manifest.probe)
                if unlike := self._config.mismatch_watch.unlike(self._probe, wanted[0]):
                    raise WeightSyncError(unlike, engine_lost=True)
            except (EngineLost, OutOfMemory):
                await self._drop_engine()
                raise
            except WeightSyncError as error:
                if error.engine_lost:
                    await self._drop_engine()
                raise
            self._digest = manifest.digest
        return {
            "policy_version": engine.policy_version,
            "digest": self._digest,
            "loaded": loaded,
            "probe": self._probe,
            "seconds": time.perf_counter() - started,
            "pids": engine.pids(),
            "max_model_len": engine.max_model_len,
        }

    async def reshard(self, deployment: dict[str, Any]) -> dict[str, Any]:
        """Take another limit on the running sequences, all that may differ while an engine lives.
        deployment: a dumped `StageDeployment`."""
        self._deployment = StageDeployment(**deployment)
        if self._engine is not None:
            self._engine.limit_running(most_running(self._config, self._deployment))
        return {}

    async def _described(self, weights: dict[str, Any]) -> WeightsManifest:
        if "directory" not in weights:
            return WeightsManifest.model_validate(weights)
        if self._directory is None or self._directory[0] != weights:
            path, version = Path(weights["directory"]), int(weights["policy_version"])
            self._directory = weights, await asyncio.to_thread(self._on_disk, path, version)
        return self._directory[1]

    def _on_disk(self, path: Path, version: int) -> WeightsManifest:
        """A policy in a directory. An engine for pairs takes the model itself as pairs, too."""
        from earl_core.weights.adapter import manifest_of_policy
        from earl_core.weights.adapter_pairs import publish_unchanged
        from earl_core.weights.renamed import has_names_of_parameters, publish_renamed

        model, trusted = self._config.model, self._config.model.trust_remote_code
        if model.adapter is not None and not is_adapter(path):
            return publish_unchanged(model, self._own_weights, version)
        manifest = manifest_of_policy(path, version, model)
        if is_adapter(path) or has_names_of_parameters(manifest, path, trusted):
            return manifest
        return publish_renamed(manifest, path, self._own_weights, trusted)

    @property
    def _own_weights(self) -> Path:
        """The folder of what this worker has published, which goes with the engine."""
        return self._run_directory / f"own-weights-{os.getpid()}"

    async def release_memory(self) -> None:
        """Give the engine's memory back; `ensure` must follow `restore_memory`."""
        if self._engine is not None:
            await self._or_end(self._engine.release_memory())

    async def restore_memory(self) -> None:
        """Undo `release_memory`; an engine that cannot is gone."""
        if self._engine is not None:
            await self._or_end(self._engine.restore_memory())

    async def _or_end(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception:
            logger.warning("the engine is ended; the next rollout starts one", exc_info=True)
            await self._drop_engine()

    def _ready(self) -> tuple[Engine, ChatTokenizer]:
        if self._engine is None or self._chat is None:
            raise RuntimeError("the rollout worker has no weights yet: call `ensure` first")
        return self._engine, self._chat

    async def _drop_engine(self) -> None:
        engine, self._engine, self._digest = self._engine, None, ""
        self._directory = None
        if engine is not None:
            await engine.stop()
        await asyncio.to_thread(shutil.rmtree, self._own_weights, ignore_errors=True)

    def _processes(self) -> list[int]:
        """This process and those of its engine."""
        pids = self._engine.pids() if self._engine is not None else []
        return sorted({os.getpid(), *pids})
