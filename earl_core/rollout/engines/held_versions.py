"""The versions of a policy that one engine holds side by side."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from earl_core.weights.manifest import WeightsManifest

Loaded = TypeVar("Loaded")


@dataclass(eq=False)
class HeldVersion(Generic[Loaded]):
    """A version in an engine. loaded: what it is there. users: calls that are answered under it."""

    number: int
    digest: str
    loaded: Loaded
    users: int = 0


class HeldVersions(Generic[Loaded]):
    """Each version is held until no call uses it, another one is current, and nobody keeps it.

    It belongs to one event loop. `current` is none before the first version.
    """

    def __init__(self) -> None:
        self.current: HeldVersion[Loaded] | None = None
        self._held: list[HeldVersion[Loaded]] = []
        self._kept: frozenset[int] = frozenset()

    def __len__(self) -> int:
        """How many versions are held."""
        return len(self._held)

    def find(self, manifest: WeightsManifest) -> HeldVersion[Loaded] | None:
        """The held version that the manifest describes. A number that came again with other tensors
        is another version."""
        wanted = manifest.policy_version, manifest.digest
        return next((each for each in self._held if (each.number, each.digest) == wanted), None)

    def add(self, manifest: WeightsManifest, loaded: Loaded) -> HeldVersion[Loaded]:
        """Hold a version that was loaded."""
        held = HeldVersion(manifest.policy_version, manifest.digest, loaded)
        self._held.append(held)
        return held

    def enter(self) -> HeldVersion[Loaded] | None:
        """Use the current version, until `leave`."""
        if self.current is not None:
            self.current.users += 1
        return self.current

    def leave(self, held: HeldVersion[Loaded] | None) -> None:
        """Undo `enter`."""
        if held is not None:
            held.users -= 1

    def keep(self, numbers: Collection[int]) -> None:
        """Hold these versions from now on, whoever uses them, and no longer those of the last
        call."""
        self._kept = frozenset(numbers)

    def take_unneeded(self) -> list[HeldVersion[Loaded]]:
        """The versions that nobody needs; they are no longer held."""
        unneeded = [
            each
            for each in self._held
            if not each.users and each is not self.current and each.number not in self._kept
        ]
        self._held = [each for each in self._held if each not in unneeded]
        return unneeded
