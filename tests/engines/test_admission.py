"""The bound on requests in an engine: order, changes while they run, and who gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from earl_core.rollout.engines.admission import Admission


class Room:
    """Requests by name that stay inside until they are told to go."""

    def __init__(self, limit: int | None) -> None:
        self.admission = Admission()
        self.admission.limit(limit)
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._go: dict[str, asyncio.Event] = {}

    async def ask(self, *names: str, priority: int = 0) -> None:
        for name in names:
            self._go[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._stay(name, priority))
        await settled()

    async def _stay(self, name: str, priority: int) -> None:
        async with self.admission.entered(name, priority):
            self.inside.append(name)
            try:
                await self._go[name].wait()
            finally:
                self.inside.remove(name)

    async def leave(self, *names: str) -> None:
        for name in names:
            self._go[name].set()
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def timely() -> None:
        await asyncio.wait_for(work(), 200)

    asyncio.run(timely())


def test_places_go_to_those_who_waited_longest() -> None:
    async def work() -> None:
        room = Room(2)
        await room.ask("a", "b", "c", "d")
        assert room.inside == ["a", "b"]
        await room.leave("b")
        assert room.inside == ["a", "c"]
        await room.ask("e")
        await room.leave("a", "c")
        assert room.inside == ["d", "e"]
        await room.leave("d", "e")

    run(work)


def test_places_go_to_the_lowest_priority_first() -> None:
    async def work() -> None:
        room = Room(1)
        await room.ask("a", priority=5)
        await room.ask("b", "c", priority=2)
        await room.ask("d", priority=1)
        await room.ask("e", priority=2)
        order = []
        for _ in range(5):
            order += room.inside
            await room.leave(*room.inside)
        assert order == ["a", "d", "b", "c", "e"]

    run(work)


def test_the_limit_changes_for_those_who_wait() -> None:
    async def work() -> None:
        room = Room(1)
        await room.ask("a", "b", "c", "d")
        room.admission.limit(3)
        await settled()
        assert room.inside == ["a", "b", "c"]
        room.admission.limit(1)
        await room.leave("a", "b")
        assert room.inside == ["c"], "whoever is in stays in; the place of others is gone"
        room.admission.limit(None)
        await settled()
        assert room.inside == ["c", "d"]
        await room.leave("c", "d")

    run(work)


def test_one_who_is_cancelled_takes_no_place() -> None:
    async def work() -> None:
        room = Room(1)
        await room.ask("a", "b", "c")
        room.tasks["b"].cancel()
        # A place becomes free before the cancelled one has noticed.
        await room.leave("a")
        assert room.inside == ["c"]
        await room.ask("d", "e")
        await room.leave("c")
        room.tasks["d"].cancel()
        await settled()
        assert room.inside == ["e"]
        await room.ask("f")
        room.admission.give_up("f")
        await settled()
        assert room.inside == ["e", "f"]
        await room.leave("e", "f")
        await room.ask("g", "h")
        assert room.inside == ["g"]
        await room.leave("g", "h")
        assert room.inside == []

    run(work)


def test_one_who_was_let_in_and_cancelled_at_once_gives_its_place_on() -> None:
    async def work() -> None:
        room = Room(1)
        await room.ask("a", "b", "c")
        room._go["a"].set()
        while "a" in room.inside:
            await asyncio.sleep(0)
        room.tasks["b"].cancel()
        await settled()
        assert room.inside == ["c"]
        await room.leave("c")

    run(work)
