"""The order in which demonstrations are taken: of the seed alone, without end."""

from __future__ import annotations

import xxhash


def drawn(count: int, seed: int, places: range) -> list[int]:
    """Which of `count` demonstrations stand at these places of an endless row.

    Each stretch of `count` places, an epoch, has every demonstration once, in an order of its own
    that is hashed from (seed, epoch, demonstration).
    """
    orders: dict[int, list[int]] = {}

    def order(epoch: int) -> list[int]:
        if epoch not in orders:
            orders[epoch] = sorted(range(count), key=lambda index: _key(seed, epoch, index))
        return orders[epoch]

    return [order(place // count)[place % count] for place in places]


def _key(seed: int, epoch: int, index: int) -> tuple[int, int]:
    text = f"demonstration|{seed}|{epoch}|{index}"
    return xxhash.xxh3_64_intdigest(text.encode()), index
