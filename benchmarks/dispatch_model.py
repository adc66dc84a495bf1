"""How long a batch takes to cross a network, by either way: a bandwidth and latency model.

N hosts, each with one full-duplex link and b bytes of the batch.

- single controller: N - 1 hosts send their bytes to the controller's host and, after a barrier,
  receive as many from it: 2 (N - 1) b through one link. The controller is charged one copy of
  every byte even where several hosts need it, and nothing for pickling: both favour it.
- direct: every host receives what it needs and does not hold, (1 - l) f d b on average, all links
  at once; the busiest one decides, k = 1 + imbalance times the average.

So the speedup tends to 2 (N - 1) / ((1 - l) f d k) for large batches. Latency is what remains
when nothing has to move: peers agree that they are done.
"""

from __future__ import annotations

from typing import Literal

Manner = Literal["single_controller", "direct"]

PAYLOAD_SHARE = 1448 / 1514
"""Payload of a full TCP segment (timestamps on) over its Ethernet frame."""
ROUND_SECONDS = 0.7e-3
"""One round of small messages among all hosts: what a fetch took with every row local."""


def predict(
    hosts: int,
    bytes_per_host: float,
    link_bits_per_second: float,
    local_share: float,
    needed_share: float,
    duplication: float,
    imbalance: float,
    manner: Manner,
) -> float:
    """Seconds to bring a batch from its producers to its consumers.

    bytes_per_host: bytes that each of the `hosts` made. local_share: share of the needed bytes
    that lie on the host that needs them. needed_share: share of the bytes (columns, tokens) that
    any consumer needs. duplication: hosts that need the same bytes. imbalance: how far the
    busiest host's transfers lie above the mean, as a share of it. Raises `ValueError`.
    """
    if hosts < 1 or link_bits_per_second <= 0:
        raise ValueError("a prediction needs at least one host and a link rate above 0")
    rate = link_bits_per_second / 8 * PAYLOAD_SHARE
    if manner == "single_controller":
        return 2 * (hosts - 1) * bytes_per_host / rate + 2 * ROUND_SECONDS
    if manner == "direct":
        received = (1 - local_share) * needed_share * duplication * bytes_per_host
        return received * (1 + imbalance) / rate + ROUND_SECONDS
    raise ValueError(f"{manner!r} is neither 'single_controller' nor 'direct'")
