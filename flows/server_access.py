"""Address of a Prefect server, its owner, and whether it lives; without importing Prefect."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shlex
import subprocess
import threading
import time
import tomllib
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from earl_core.system.errors import EarlError
from earl_core.system.identity import trusting
from earl_core.system.listeners import is_mine

DEFAULT_URL = "http://127.0.0.1:4200/api"
"""Address at which `prefect server start` and `earl up` listen unless told otherwise."""

PROBE_SECONDS = 1.0
_BUSY_SECONDS = 0.3
START_SECONDS = 120.0
"""A server that does not answer for so long after its start is given up."""

STOP_SECONDS = 5.0


class Access(NamedTuple):
    """The API URL of a server, and the password (`user:word`) that it wants, if any.

    certificate: a file with the one that the server must show; None where it speaks plain HTTP, or
    has one that everybody trusts. pages: where a browser finds it, if not at the same address.
    """

    url: str
    auth: str | None = None
    certificate: str | None = None
    pages: str | None = None

    @property
    def site(self) -> str:
        """Address that people open in a browser."""
        return self.pages or self.url.rstrip("/").removesuffix("/api")

    def environment(self) -> dict[str, str]:
        """Return the variables that Prefect's clients read."""
        given = {
            "PREFECT_API_URL": self.url,
            "PREFECT_API_AUTH_STRING": self.auth,
            "PREFECT_API_SSL_CERT_FILE": self.certificate,
        }
        return {name: value for name, value in given.items() if value}

    def healthy(self, timeout: float = PROBE_SECONDS) -> bool:
        """Tell whether a Prefect server answers there, the right one where that can be told. It is
        told no password."""
        return healthy(self.url, timeout, self.certificate)

    def ask(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float = 10.0,
        method: str | None = None,
    ) -> Any:
        """POST to the API (GET without a body; or `method`); the decoded JSON.

        timeout: seconds, also for asking again while the server says that its database is busy.
        Raises `OSError` (an `HTTPError` for an answer such as 404) or `ValueError`.
        """
        headers = {"Content-Type": "application/json"}
        if self.auth:
            headers["Authorization"] = f"Basic {base64.b64encode(self.auth.encode()).decode()}"
        elif key := os.environ.get("PREFECT_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/{path}", data, headers, method=method
        )
        deadline = time.monotonic() + timeout
        while True:
            try:
                with opener(self.certificate).open(request, timeout=timeout) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except http.client.HTTPException as error:  # another protocol, or half an answer
                raise ConnectionError(f"{self.url} does not answer as a server does") from error
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:
                    raise
            time.sleep(_BUSY_SECONDS)

    def lets_in(self) -> bool:
        """Tell whether the server answers a client with this password, or with none."""
        with suppress(OSError, ValueError):
            self.ask("admin/version", timeout=PROBE_SECONDS)
            return True
        return False


def opener(certificate: str | None) -> urllib.request.OpenerDirector:
    """Opens URLs of servers on loopback. certificate: as of `Access`. Raises `OSError` when the
    certificate cannot be read."""
    # Proxies of the environment are for the outside; a server on loopback is not behind one.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if certificate:
        handlers.append(urllib.request.HTTPSHandler(context=trusting(certificate)))
    return urllib.request.build_opener(*handlers)


def healthy(api_url: str, timeout: float = PROBE_SECONDS, certificate: str | None = None) -> bool:
    """Tell whether a Prefect server answers at this API URL. It is told no password. certificate:
    as of `Access`."""
    try:
        asking = opener(certificate)
        with asking.open(f"{api_url.rstrip('/')}/health", timeout=timeout) as response:
            # Anything may listen there; only Prefect answers plain `true`.
            return response.status == 200 and json.loads(response.read(64)) is True
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)  # a server with a password is a server
    except (OSError, ValueError, http.client.HTTPException):
        return False


def is_open(access: Access) -> bool:
    """Tell whether a Prefect server of this user answers there and lets this process in: that of
    another project has another password."""
    return is_mine(access.url) and access.healthy() and access.lets_in()


def named_by_profile(home: Path) -> Access | None:
    """The server that the active profile of a Prefect home names."""
    try:
        profiles = tomllib.loads((home / "profiles.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return None
    profile = profiles.get("profiles", {}).get(profiles.get("active"), {})
    if not isinstance(profile, dict) or not isinstance(profile.get("PREFECT_API_URL"), str):
        return None
    names = "PREFECT_API_AUTH_STRING", "PREFECT_API_SSL_CERT_FILE"
    auth, certificate = (
        value if isinstance(value := profile.get(name), str) else None for name in names
    )
    return Access(profile["PREFECT_API_URL"], auth, certificate)


# A temporary server leaves its address and password in the Prefect home, for its user.


def write_access(path: Path, access: Access) -> None:
    """Write what a shell can source and only this user can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        for name, value in access.environment().items():
            stream.write(f"export {name}={shlex.quote(value)}\n")


def read_access(path: Path) -> Access | None:
    """Read the access that `write_access` wrote, if this user wrote it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor) as stream:
            if os.fstat(stream.fileno()).st_uid != os.geteuid():
                return None
            words = shlex.split(stream.read())
    except (OSError, ValueError):
        return None
    values = dict(word.split("=", 1) for word in words if "=" in word)
    url = values.get("PREFECT_API_URL")
    rest = (values.get(f"PREFECT_API_{name}") for name in ("AUTH_STRING", "SSL_CERT_FILE"))
    return Access(url, *rest) if url else None


_EVERY_SECONDS = 5.0
SILENT_SECONDS = 60.0
"""A server that does not answer for so long is taken for lost; a restart is shorter."""
_UNANSWERED = 6
"""Questions in a row without an answer, beside that time: a machine that was paused has asked none,
and the first one after it may have been on its way."""


class ServerLost(EarlError):
    """The Prefect server ended, or answers no more."""


class ServerWatch:
    """Notices that the Prefect server in use is gone, so that a run ends instead of waiting for it.
    It asks for the server's health in a thread of its own. process: the server's, if it is ours."""

    def __init__(self, access: Access, process: subprocess.Popen[bytes] | None) -> None:
        self._access, self._process = access, process
        self._answered, self._unanswered = time.monotonic(), 0
        threading.Thread(target=self._ask, name="server-watch", daemon=True).start()

    def check(self) -> None:
        """Raise `ServerLost` once the server is lost; returns at once."""
        silent = time.monotonic() - self._answered
        ended = self._process is not None and self._process.poll() is not None
        if ended or (silent > SILENT_SECONDS and self._unanswered >= _UNANSWERED):
            how = "has ended" if ended else f"has not answered for {silent:.0f} s"
            raise ServerLost(
                f"the Prefect server at {self._access.site} {how}: start one with `earl up`, or "
                "let the command start its own. Nothing that is finished is lost"
            )

    def _ask(self) -> None:
        while True:
            if self._access.healthy(_EVERY_SECONDS):
                self._answered, self._unanswered = time.monotonic(), 0
            else:
                self._unanswered += 1
            time.sleep(_EVERY_SECONDS)
