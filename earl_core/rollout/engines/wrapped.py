"""An engine around another one, which stops between two tokens and goes on when it is told to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest
from earl_core.trajectory.routing import RoutingShape
from earl_core.weights.manifest import WeightsManifest


class WrappedEngine(ABC):
    """Base of such engines, for which callers need not wait for each other. All methods are of one
    event loop."""

    lockstep = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @abstractmethod
    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample all answers, however often they stop meanwhile."""

    @abstractmethod
    async def cancel(self, sequence_ids: Collection[int]) -> None:
        """End these requests for good."""

    @abstractmethod
    async def hold(self) -> None:
        """Stop all answers between two tokens, until `go_on`; nothing runs when this returns."""

    async def abandon(self) -> None:
        """The same for good, without waiting for answers that cannot stop."""
        await self.hold()

    @abstractmethod
    def go_on(self) -> None:
        """Undo `hold`."""

    @abstractmethod
    async def stop(self) -> None:
        """Answer nothing more. The engine itself goes on."""

    # The rest of the interface is the engine's own.

    @property
    def policy_version(self) -> int | None:
        """The version that the next tokens are sampled under."""
        return self._engine.policy_version

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, as the engine has it."""
        return self._engine.max_model_len

    @property
    def routing(self) -> RoutingShape | None:
        """What completions say of experts, as the engine has it."""
        return self._engine.routing

    async def start(self) -> None:
        """Start the engine."""
        await self._engine.start()

    def limit_running(self, requests: int) -> None:
        """Limit the engine."""
        self._engine.limit_running(requests)

    def finish(self, sequence_ids: Collection[int]) -> None:
        """Forget these sequences, as the engine does."""
        self._engine.finish(sequence_ids)

    async def play_under(self, manifest: WeightsManifest) -> None:
        """Have the next tokens sampled under this version."""
        await self._engine.play_under(manifest)

    async def keep(self, versions: Collection[int]) -> None:
        """Hold versions in the engine."""
        await self._engine.keep(versions)

    async def release_memory(self) -> None:
        """Release the engine's memory."""
        await self._engine.release_memory()

    async def restore_memory(self) -> None:
        """Restore the engine's memory."""
        await self._engine.restore_memory()

    def statistics(self) -> dict[str, float]:
        """Return the engine's totals."""
        return self._engine.statistics()

    def pids(self) -> list[int]:
        """Return the engine's processes."""
        return self._engine.pids()
