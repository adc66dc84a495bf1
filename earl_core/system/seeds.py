"""Seeds: every random draw of a run is keyed by what it is for, never by what ran before it."""

from __future__ import annotations

import hashlib
import json

SEED_BITS = 63
"""Seeds fit a signed 64-bit integer."""


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from what a draw is for: (run seed, iteration, stage, episode, turn).

    The same parts give the same seed in every process and on every machine; different parts, or
    the same in another order, give independent ones (BLAKE2b, RFC 7693).
    """
    # JSON keeps the parts apart: 1 from "1", and ("a", "b") from ("ab",).
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
