"""Batches for a lockstep engine: for whom they wait."""

from __future__ import annotations

import asyncio

from earl_core.rollout.engines.engine import GenerationRequest
from earl_core.rollout.gateway.batches import Batches
from tests.rollout.asking import answering


def test_a_batch_waits_for_every_asker_whatever_one_asks_for() -> None:
    """One asks for three answers before the other two ask at all."""
    engine = answering()

    async def scenario() -> None:
        batches = Batches(engine, lambda: 3, 5.0)

        async def ask(number: int, asker: str) -> None:
            await batches.ask(GenerationRequest(number, [1], 2, 1.0, 0), asker)

        first = [asyncio.create_task(ask(number, "a")) for number in range(3)]
        await asyncio.sleep(0.05)
        assert not engine.batches
        others = [asyncio.create_task(ask(3 + at, name)) for at, name in enumerate("bc")]
        await asyncio.gather(*first, *others)
        await batches.close()

    asyncio.run(scenario())
    assert [[each.sequence_id for each in batch] for batch in engine.batches] == [[0, 1, 2, 3, 4]]
