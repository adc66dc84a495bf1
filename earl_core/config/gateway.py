"""The address at which agents in containers and on other machines reach the policy."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from earl_core.config.environment import EnvironmentConfig
from earl_core.system.certificates import check_certificate
from earl_core.system.errors import ConfigError
from earl_core.system.listening import listen_within
from earl_core.system.processes import host_name
from earl_core.system.settings import Settings

_LAST_PORT = 65535
_ADDRESS = re.compile(r"https?://[^/?#\s]+[^?#\s]*")
PORT, HOST = "{port}", "{host}"
"""Stand for port and host in `public_url`."""


class GatewayConfig(Settings):
    """A listener in front of each engine beside the one on its loopback, with TLS by files."""

    host: str = Field(
        default="127.0.0.1",
        description="Address of the machine's own that it listens at; 0.0.0.0: all. Any but the "
        "loopback needs a certificate.",
    )
    ports: str | None = Field(
        default=None,
        pattern=r"^\d{1,5}(-\d{1,5})?$",
        description="A port, or a range such as 8100-8115: each engine of a host takes the first "
        "that is free. None: any free one.",
    )
    public_url: str | None = Field(
        default=None,
        description="URL at which agents reach it, without /v1, such as "
        "https://trainer.example:{port}; {port} stands for the engine's port, {host} for the "
        "name of its host (EARL_HOST, or the host's own), which several hosts need. It is what "
        "agents get as base_url, with the episode's name and /v1 behind it. None: agents get the "
        "loopback.",
    )
    certfile: str | None = Field(
        default=None,
        description="PEM file of the certificate, with those between it and its authority, on each "
        "host that has engines.",
    )
    keyfile: str | None = Field(
        default=None, description="PEM file of the certificate's private key, without a passphrase."
    )

    @field_validator("public_url")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        if url is not None and not _ADDRESS.fullmatch(url):
            raise ValueError(
                f"{url!r} is no address: begin it with https:// and a host, such as "
                "https://trainer.example:{port}, and leave out ? and #"
            )
        return url

    @model_validator(mode="after")
    def _safe(self) -> GatewayConfig:
        if bool(self.certfile) != bool(self.keyfile):
            raise ValueError(
                "rollout.gateway.certfile and rollout.gateway.keyfile belong together: "
                "give both, or neither"
            )
        if not _is_loopback(self.host) and not self.certfile:
            raise ValueError(
                f"rollout.gateway.host {self.host!r} is not the loopback, and there is no TLS, so "
                "keys and episodes could be read on the way: give "
                "rollout.gateway.certfile and rollout.gateway.keyfile"
            )
        if self.public_url is None:
            if self.model_dump(exclude_defaults=True):
                raise ValueError(
                    "rollout.gateway.public_url is missing: say how agents reach the listener, "
                    "such as https://trainer.example:{port}"
                )
            return self
        parts = urlsplit(filled(self.public_url, 1))
        if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
            raise ValueError(
                f"rollout.gateway.public_url {self.public_url!r} is not the loopback, and has no "
                "TLS, so keys and episodes could be read on the way: begin it with https://"
            )
        if parts.scheme == "http" and self.certfile:
            raise ValueError(
                f"rollout.gateway.public_url {self.public_url!r} has no TLS, which the listener "
                "speaks with its certificate: begin it with https://"
            )
        return self

    @model_validator(mode="after")
    def _ports(self) -> GatewayConfig:
        first, last = self.port_range
        if self.ports and not 0 < first <= last <= _LAST_PORT:
            raise ValueError(
                f"rollout.gateway.ports is {self.ports!r}: give a port, or the first and the last "
                f"of a range, of 1 to {_LAST_PORT}"
            )
        if self.public_url and PORT not in self.public_url and (first != last or not first):
            raise ValueError(
                f"rollout.gateway.public_url {self.public_url!r} does not say which port, and "
                "engines have one each: put {port} into it, or name one port by "
                "rollout.gateway.ports"
            )
        return self

    @property
    def port_range(self) -> tuple[int, int]:
        """The first and the last port; (0, 0): any free one."""
        first, _, last = (self.ports or "0").partition("-")
        return int(first), int(last or first)


def filled(url: str, port: int) -> str:
    """A public URL with port and host of this machine."""
    return url.replace(PORT, str(port)).replace(HOST, host_name())


def check_gateway(
    config: GatewayConfig, played: Iterable[EnvironmentConfig], hosts: int = 1, engines: int = 1
) -> None:
    """Raise `ConfigError` unless agents could connect with its certificate, now, and containers at
    all. played: the environments of the run. hosts, engines: machines, and engines of one."""
    url = config.public_url
    host = urlsplit(filled(url, 1)).hostname or "" if url else "127.0.0.1"
    for each in played:
        docker = each.agent == "task_directories" and each.options.get("runtime") == "docker"
        if docker and _is_loopback(host) and each.options.get("network") != "host":
            raise ConfigError(
                "containers of task_directories do not reach the gateway on the loopback",
                remedy="set rollout.gateway.public_url to an address of this machine's, or "
                "environment.options.network to host",
            )
    if url is None:
        return
    if hosts > 1 and HOST not in url:
        raise ConfigError(
            f"rollout.gateway.public_url {url!r} does not say which of {hosts} hosts",
            remedy="put {host} into it",
        )
    first, last = config.port_range
    if config.ports and last - first + 1 < engines:
        raise ConfigError(
            f"rollout.gateway.ports {config.ports!r} has fewer ports than a host has engines "
            f"({engines})",
            remedy=f"name a range of {engines} or more",
        )
    if config.certfile and config.keyfile:
        check_certificate(Path(config.certfile), Path(config.keyfile), host)
    if hosts == 1:
        listen_within(config.host, config.port_range).close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
