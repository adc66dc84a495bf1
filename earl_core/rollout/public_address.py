"""Where agents elsewhere reach the gateways of a process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from earl_core.config.gateway import GatewayConfig


@dataclass(frozen=True)
class PublicAddress:
    """A host of this machine's own, the first and the last port, the URL that agents use, and files
    of TLS; see `GatewayConfig`."""

    host: str
    ports: tuple[int, int]
    url: str
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def of(cls, config: GatewayConfig) -> PublicAddress | None:
        """None where agents are on the loopback."""
        if config.public_url is None:
            return None
        files = (config.certfile, config.keyfile)
        paths = (None if each is None else Path(each) for each in files)
        return cls(config.host, config.port_range, config.public_url, *paths)
