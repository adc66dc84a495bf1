"""Proof by TLS, on each connection, that a server of ours is the one that was started.

A port says nothing: once its server is dead, any user of the machine may listen there. So each
start of a server makes a key that never leaves its process, and a certificate for it in a file that
only this user can write. Clients trust that certificate alone, whoever signed others.
"""

from __future__ import annotations

import datetime
import os
import ssl
from functools import cache
from pathlib import Path

from earl_core.system.files import write_atomic

_DAYS = 3650
"""A server may run for long; what ends a certificate is the next start."""

_NAMES = "localhost"
_ADDRESS = "127.0.0.1"


def new_identity(certificate: Path) -> ssl.SSLContext:
    """Make the TLS context of a server on loopback, and write its certificate for its clients.
    certificate: a file in a folder of this user's, replaced."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "EARL on this machine")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(_NAMES), x509.IPAddress(ipaddress.ip_address(_ADDRESS))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks may be set back.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public = made.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # OpenSSL reads files only: one in memory, so that the key lies on no disk.
    descriptor = os.memfd_create("earl-identity")
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(private + public)
        stream.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    write_atomic(certificate, public)
    return context


def trusting(certificate: str | Path) -> ssl.SSLContext:
    """Make the TLS context of a client that trusts the server of this certificate alone. Raises
    `OSError` (`ssl.SSLError` for what is no certificate)."""
    about = os.stat(certificate)
    return _trusting(str(certificate), about.st_ino, about.st_mtime_ns)


@cache
def _trusting(certificate: str, inode: int, changed: int) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate)
