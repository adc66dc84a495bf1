"""Certificates that a user has as files: checked before work, and served."""

from __future__ import annotations

import datetime
import ipaddress
import shlex
import ssl
import stat
from pathlib import Path
from typing import Any

from earl_core.system.errors import ConfigError
from earl_core.system.files import read_file


def check_certificate(certificate: Path, key: Path, host: str | None) -> None:
    """Raise `ConfigError` unless clients that trust the certificate could connect now. host: the
    name or address that they connect to; None: not known."""
    from cryptography import x509

    for path in (certificate, key):
        try:
            read_file(path, follow_links=True)
        except OSError as error:
            raise ConfigError(
                f"the file {path} cannot be read ({error.strerror})", remedy="correct the path"
            ) from error
    try:
        first = x509.load_pem_x509_certificates(certificate.read_bytes())[0]
    except ValueError as error:
        raise ConfigError(
            f"{certificate} holds no certificate in PEM form", remedy="name one that does"
        ) from error
    now = datetime.datetime.now(datetime.UTC)
    if not first.not_valid_before_utc <= now <= first.not_valid_after_utc:
        raise ConfigError(
            f"the certificate {certificate} is valid from {first.not_valid_before_utc:%Y-%m-%d} to "
            f"{first.not_valid_after_utc:%Y-%m-%d %H:%M}, and not now",
            remedy="renew it",
        )
    serving(certificate, key)
    if key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"the key {key} can be read by others", remedy=f"chmod 600 {shlex.quote(str(key))}"
        )
    if host and not any(_covers(each, host) for each in _names(first)):
        told = ", ".join(str(each) for each in _names(first)) or "no name"
        raise ConfigError(
            f"the certificate {certificate} is for {told}, and clients connect to {host}, so they "
            "would refuse it",
            remedy="have its subjectAltName hold that name",
        )


def serving(certificate: Path, key: Path) -> ssl.SSLContext:
    """Make the TLS context of a server. Raises `ConfigError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Otherwise OpenSSL would ask for a passphrase at the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key} is not the key of the certificate {certificate}, or has a passphrase "
            f"({getattr(error, 'reason', None) or error})",
            remedy="name the key that it was made with, without a passphrase",
        ) from error
    return context


def _names(certificate: Any) -> list[Any]:
    """Names and addresses, in the form that people write."""
    from cryptography import x509

    try:
        held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*held.get_values_for_type(x509.DNSName), *held.get_values_for_type(x509.IPAddress)]


def _covers(name: Any, host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host) == name)
    except ValueError:
        pass
    if not isinstance(name, str):
        return False
    one, other = name.lower(), host.lower()
    if one.startswith("*."):
        return one[2:] == other.partition(".")[2]
    return one == other
