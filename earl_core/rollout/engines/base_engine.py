"""The part that all engines share: settings, running requests, versions, totals, loss."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import torch

from earl_core.config.rollout import DraftsConfig
from earl_core.rollout.engines.engine import GenerationRequest, check_requests
from earl_core.rollout.engines.held_versions import HeldVersion, HeldVersions, Loaded
from earl_core.rollout.errors import EngineError, EngineLost, WeightSyncError
from earl_core.tensors.errors import WeightsError
from earl_core.trajectory.routing import RoutingShape
from earl_core.weights.adapter_pairs import Pair, matched_pairs
from earl_core.weights.load import matched
from earl_core.weights.manifest import WeightsManifest


@dataclass(frozen=True)
class EngineSettings:
    """Settings that every engine gets.

    policy_version: of the model directory's weights; None: undefined until `play_under`.
    max_running_requests: what the engine is built for. max_model_len: in tokens; None: the model's
    own position range. threads: how many of the allowed
    CPU cores compute; 0: all. float32_head: compute the logits in float32. adapter_rank: the
    largest of the pairs that versions are, beside the model directory's weights; None: versions are
    whole weights. drafts: from past answers; None: there are none. masked: requests may have forms.
    record_routing: say which experts a mixture gave each token, where its routers tell.
    """

    dtype: str = "float32"
    policy_version: int | None = 0
    max_running_requests: int = 256
    max_model_len: int | None = None
    threads: int = 0
    float32_head: bool = False
    trust_remote_code: bool = False
    adapter_rank: int | None = None
    drafts: DraftsConfig | None = None
    masked: bool = False
    record_routing: bool = False


class BaseEngine(ABC, Generic[Loaded]):
    """Base of the engines. `start` sets `max_model_len`, `_vocabulary` and `_config_digest`.

    `Loaded` is what the pairs of one version are in the engine.
    """

    def __init__(self, model_directory: Path, settings: EngineSettings) -> None:
        self.policy_version = settings.policy_version
        self.max_model_len = settings.max_model_len or 0
        self._directory = Path(model_directory)
        self._settings = settings
        self._limit = settings.max_running_requests
        self._vocabulary = 0
        self._config_digest = ""
        self.routing: RoutingShape | None = None
        self._lost: str | None = None
        self._running: dict[int, str] = {}
        self._names = itertools.count()
        self._versions: HeldVersions[Loaded] = HeldVersions()
        self._changing = asyncio.Lock()
        self._totals = dict.fromkeys(
            ("generated_tokens", "prompt_tokens", "prefix_hit_tokens", "requests"), 0.0
        )

    def limit_running(self, requests: int) -> None:
        """Note the limit, at most the number that the engine was built for."""
        self._limit = min(requests, self._settings.max_running_requests)

    async def play_under(self, manifest: WeightsManifest) -> None:
        """Load the version if it is not held, and make it the current one, as `Engine` wants."""
        self._check_alive()
        rank, adapter = self._settings.adapter_rank, manifest.adapter
        if (adapter is None) != (rank is None) or (adapter and rank and adapter.rank > rank):
            given = "whole weights" if adapter is None else f"pairs of rank {adapter.rank}"
            wanted = "whole weights" if rank is None else f"pairs of rank {rank} or less"
            raise WeightSyncError(
                f"policy version {manifest.policy_version} was not loaded: it is {given}, and the "
                f"engine was started for {wanted}"
            )
        async with self._changing:
            if adapter is None:
                await self._load_whole(manifest)
                return
            held = self._versions.find(manifest)
            if held is None:
                held = self._versions.add(manifest, await self._load_pairs(manifest))
            self._versions.current = held
            self.policy_version = held.number
            await self._unload_unneeded()

    async def keep(self, versions: Collection[int]) -> None:
        """Hold these versions, too, as `Engine` wants."""
        self._versions.keep(versions)
        await self._unload_unneeded()

    @abstractmethod
    def _check_alive(self) -> None:
        """Raise `EngineLost` or `EngineError` for an engine that cannot answer."""

    @abstractmethod
    async def _load_whole(self, manifest: WeightsManifest) -> None:
        """Replace the model's weights, and set `policy_version`."""

    @abstractmethod
    async def _load_pairs(self, manifest: WeightsManifest) -> Loaded:
        """Load a version's pairs beside those that are held. Raises `WeightSyncError`, after which
        nothing of them is left."""

    @abstractmethod
    async def _unload_pairs(self, loaded: Loaded) -> None:
        """Free a version that nobody uses."""

    async def _unload_unneeded(self) -> None:
        for each in self._versions.take_unneeded():
            await self._unload_pairs(each.loaded)

    @asynccontextmanager
    async def _entered(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[HeldVersion[Loaded] | None]:
        """Requests that run in the block, under the version that was current at its begin; none
        where that is the model's own weights. Raises `ValueError` for what cannot be served."""
        self._enter(requests)
        held = self._versions.enter()
        try:
            yield held
        finally:
            self._versions.leave(held)
            self._leave(requests)
            await self._unload_unneeded()

    def _check_usable(self, started: object) -> None:
        """Raise `EngineLost` or `EngineError` for an engine that cannot answer. started: what
        `start` makes, None before it."""
        if self._lost is not None:
            raise EngineLost(f"{self._lost}; stop the engine and start a fresh one")
        if started is None:
            raise EngineError("the engine is not running: call start() first")

    def _version(self) -> int:
        if self.policy_version is None:
            raise EngineError("the engine has no weights yet: call play_under() first")
        return self.policy_version

    def _enter(self, requests: Sequence[GenerationRequest]) -> None:
        """Name the requests as running, until `_leave`. Raises `ValueError` for what cannot be
        served."""
        check_requests(requests, self._vocabulary)
        for request in requests:
            if request.sequence_id in self._running:
                raise ValueError(
                    f"sequence {request.sequence_id} still has a running request: await its "
                    "answer before sending the next turn"
                )
        for request in requests:
            self._running[request.sequence_id] = f"{request.sequence_id}-{next(self._names)}"

    def _leave(self, requests: Sequence[GenerationRequest]) -> None:
        """The requests run no more."""
        for request in requests:
            del self._running[request.sequence_id]

    def _matched(
        self, manifest: WeightsManifest, parameters: Mapping[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The model's parameters beside the published ones. Raises `WeightSyncError`; nothing was
        changed then."""
        with _refusing(manifest):
            return matched(manifest, parameters, self._directory, self._config_digest)

    def _matched_pairs(
        self, manifest: WeightsManifest, matrices: Mapping[str, torch.Tensor]
    ) -> dict[str, Pair]:
        """The pairs of the model's matrices, as `matched_pairs` has them. Raises
        `WeightSyncError`."""
        with _refusing(manifest):
            return matched_pairs(manifest, matrices, self._directory, self._config_digest)


@contextmanager
def _refusing(manifest: WeightsManifest) -> Iterator[None]:
    try:
        yield
    except WeightsError as error:
        raise WeightSyncError(
            f"policy version {manifest.policy_version} was not loaded: {error}"
        ) from error
