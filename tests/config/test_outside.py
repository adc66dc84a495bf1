"""Files that people name: regular, within bounds, UTF-8."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from earl_core.system.errors import ConfigError
from earl_core.system.outside import read_text


@pytest.mark.timeout(20)
def test_what_is_read_has_bounds(tmp_path: Path) -> None:
    file = tmp_path / "x.jinja"

    def refused(place: Path, message: str) -> None:
        with pytest.raises(ConfigError, match=f"the template .*{place.name} {message}"):
            read_text(place, f"the template {place}", 100)

    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    refused(tmp_path / "fifo", "is no regular file")
    refused(tmp_path / "device", "is no regular file")
    refused(tmp_path, "is no regular file")
    file.write_bytes(b"a" * 101)
    refused(file, "has more than")
    for encoding in ("utf-16", "utf-16-be", "utf-32"):
        file.write_bytes("öl".encode(encoding))
        refused(file, "is not UTF-8 .it is UTF-")
    file.write_bytes("a\nöl".encode("latin-1"))
    refused(file, "is not UTF-8 .byte 0xf6 in line 2, as in Latin-1")
    file.write_bytes("öl".encode("utf-8-sig"))
    assert read_text(file, "it") == "öl"
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "nothing", "it")
