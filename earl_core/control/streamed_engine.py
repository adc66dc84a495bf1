"""An engine that plays groups as a stream, as the controller knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from earl_core.cluster.group import Group


@dataclass
class StreamedEngine:
    """An engine, as far as this process knows it. group: its ranks; None: nothing is known of them.
    version: that it plays; None: it has to load one. digest: of its weights. wanted: the version
    that it was last told to play. room: for how many further episodes. peak: most bytes of its
    ranks since the last result."""

    member: int
    group: Group | None = None
    version: int | None = None
    digest: str = ""
    wanted: int | None = None
    room: int = 0
    peak: float = 0.0
    playing: set[int] = field(default_factory=set)
