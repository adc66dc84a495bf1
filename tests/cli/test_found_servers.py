"""Which server of `earl up` a command uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from earl_core.system.identity import new_identity
from earl_core.system.processes import ProcessId
from earl_core.system.service import Service, write_services
from earl_core.system.web_server import WebServer
from flows import server, server_access

pytestmark = pytest.mark.usefixtures("no_settings")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Service]:
    """A service with pages that answers as Prefect does."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"true"})

    certificate = tmp_path / "shown.pem"
    with server.listening() as secure, server.listening() as pages:
        identity = new_identity(certificate)
        serving = WebServer(application, identity, secure, pages, lifespan="off")
        serving.start()
        addresses = [f"127.0.0.1:{each.getsockname()[1]}/api" for each in (pages, secure)]
        yield Service(
            "prefect", f"http://{addresses[0]}", "earl", "word", str(ProcessId.current()),
            secure=f"https://{addresses[1]}", certificate=str(certificate),
        )  # fmt: skip
        serving.stop()
        serving.join(10)


def test_the_server_of_earl_up_is_found_with_its_password(tmp_path: Path, served: Service) -> None:
    write_services(tmp_path, [served])
    kept = tmp_path / "services" / "services.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    found = server.running_server(tmp_path, tmp_path)
    site = served.url.removesuffix("/api")
    assert found == (served.secure, "earl:word", served.certificate, site)
    assert server_access.healthy(served.url)
    for other in (
        replace(served, process=served.process + "1"),
        replace(served, certificate=""),
        replace(served, certificate="/nowhere.pem"),
    ):
        write_services(tmp_path, [other])
        assert server.running_server(tmp_path, tmp_path) is None
    new_identity(tmp_path / "other.pem")
    write_services(tmp_path, [replace(served, certificate=str(tmp_path / "other.pem"))])
    assert server.running_server(tmp_path, tmp_path) is None
    write_services(tmp_path, [served])
    kept.chmod(0o644)
    assert server.running_server(tmp_path, tmp_path) is None


def test_the_server_of_earl_up_is_asked_where_it_alone_answers_however_it_was_named(
    tmp_path: Path, served: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = server.access_of(served)
    write_services(tmp_path, [served])
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "of:another")
    for url in (served.url, served.secure):
        profile = f'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "{url}"\n'
        (tmp_path / "profiles.toml").write_text(profile)
        monkeypatch.delenv("PREFECT_API_URL", raising=False)
        assert server.running_server(tmp_path, tmp_path) == own
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/")
        assert server.running_server(tmp_path, tmp_path) == own


def test_the_server_of_earl_up_is_found_from_every_directory_of_its_user_alone(
    tmp_path: Path, served: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    there, here, home = (tmp_path / name for name in ("there", "here", "home"))
    write_services(there, [replace(served, since=1.0)])
    own = server.access_of(served)
    assert server.running_server(home, here) == own
    folder = tmp_path / "state" / "earl" / "services"
    (note,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, note.stat().st_mode & 0o777) == (0o700, 0o600)

    # This directory's own comes first, then the one that was started last.
    for runs, since in ((tmp_path / "later", 2.0), (here, 0.5)):
        mine = replace(served, password=runs.name, since=since)
        write_services(runs, [mine])
        assert server.running_server(home, here) == server.access_of(mine)
        write_services(runs, [mine.ended()])
        assert server.running_server(home, here) == own
    assert list(folder.iterdir()) == [note]

    text = note.read_bytes()
    for spoil in (
        lambda: note.chmod(0o644),
        lambda: note.write_bytes(b"there"),
        lambda: note.write_bytes(b"\0"),
        lambda: (note.rename(tmp_path / "note"), note.symlink_to(tmp_path / "note")),
        lambda: note.chmod(0o660) if os.geteuid() else os.chown(note, 65534, 65534),
    ):
        spoil()
        assert server.running_server(home, here) is None
        note.unlink()
        write_services(there, [served])
        assert note.read_bytes() == text
    write_services(there, [replace(served, process=served.process + "1")])
    assert server.running_server(home, here) is None
