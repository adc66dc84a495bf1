"""Environments in the caller's own process, for a debugger."""

from __future__ import annotations

import asyncio
import signal

import pytest

from earl_core.environments.hosting.pool import EnvironmentPool
from tests.environments.user_environments import Counting


class Interrupted(Counting):
    """Somebody presses Ctrl-C while its code runs."""

    def reset(self, prompt: int, seed: int) -> list[dict[str, str]]:
        signal.raise_signal(signal.SIGINT)
        return []


class InterruptedEarly(Counting):
    """As `Interrupted`, while the second one of them is made; a pool tries the first."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        InterruptedEarly.made += 1
        if InterruptedEarly.made > 1:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("name", ["Interrupted", "InterruptedEarly"])
def test_ctrl_c_ends_the_command_and_no_episode(name: str) -> None:
    pool = EnvironmentPool(f"{__name__}:{name}", here=True)
    # asyncio.run would take the signal for itself.
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(pool.start())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(pool.reset(0, 0, 0))
        loop.run_until_complete(pool.stop())
    finally:
        loop.close()
