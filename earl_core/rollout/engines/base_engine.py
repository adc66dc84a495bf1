"""The part that all engines share: settings, running requests, totals, loss."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from earl_core.rollout.engines.engine import GenerationRequest, check_requests
from earl_core.rollout.errors import EngineError, EngineLost, WeightSyncError
from earl_core.tensors.errors import WeightsError
from earl_core.weights.load import matched
from earl_core.weights.manifest import WeightsManifest


@dataclass(frozen=True)
class EngineSettings:
    """Settings that every engine gets.

    policy_version: of the model directory's weights; None: undefined until `load_weights`.
    max_running_requests: what the engine is built for. max_model_len: in tokens; None: the model's
    own position range. threads: how many of the allowed
    CPU cores compute; 0: all. float32_head: compute the logits in float32.
    """

    dtype: str = "float32"
    policy_version: int | None = 0
    max_running_requests: int = 256
    max_model_len: int | None = None
    threads: int = 0
    float32_head: bool = False
    trust_remote_code: bool = False


class BaseEngine:
    """Base of the engines. `start` sets `max_model_len`, `_vocabulary` and `_config_digest`."""

    def __init__(self, model_directory: Path, settings: EngineSettings) -> None:
        self.policy_version = settings.policy_version
        self.max_model_len = settings.max_model_len or 0
        self._directory = Path(model_directory)
        self._settings = settings
        self._limit = settings.max_running_requests
        self._vocabulary = 0
        self._config_digest = ""
        self._lost: str | None = None
        self._running: dict[int, str] = {}
        self._names = itertools.count()
        self._totals = dict.fromkeys(
            ("generated_tokens", "prompt_tokens", "prefix_hit_tokens", "requests"), 0.0
        )

    def limit_running(self, requests: int) -> None:
        """Note the limit, at most the number that the engine was built for."""
        self._limit = min(requests, self._settings.max_running_requests)

    def _check_usable(self, started: object) -> None:
        """Raise `EngineLost` or `EngineError` for an engine that cannot answer. started: what
        `start` makes, None before it."""
        if self._lost is not None:
            raise EngineLost(f"{self._lost}; stop the engine and start a fresh one")
        if started is None:
            raise EngineError("the engine is not running: call start() first")

    def _version(self) -> int:
        if self.policy_version is None:
            raise EngineError("the engine has no weights yet: call load_weights() first")
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

    def _leave(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """The requests run no more; returns the names that they had."""
        return [self._running.pop(request.sequence_id) for request in requests]

    def _matched(
        self, manifest: WeightsManifest, parameters: Mapping[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The model's parameters beside the published ones. Raises `WeightSyncError`; nothing was
        changed then."""
        try:
            return matched(manifest, parameters, self._directory, self._config_digest)
        except WeightsError as error:
            raise WeightSyncError(
                f"policy version {manifest.policy_version} was not loaded: {error}"
            ) from error
