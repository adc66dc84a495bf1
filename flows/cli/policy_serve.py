"""`earl serve`: a checkpoint behind the gateway, for OpenAI clients that know the key."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from pathlib import Path

from earl_core.config import RunConfig
from earl_core.control.policy_player import PolicyPlayer, find_checkpoint
from earl_core.system.errors import ConfigError
from earl_core.system.files import write_atomic
from flows.cli.tables import make_console

KEY = "EARL_SERVE_KEY"
"""Environment variable: the key to use. A command line would show it to everyone."""

_FILE = "serve.key"


def serve(path: Path, config: RunConfig, which: str, port: int, temperature: float | None) -> None:
    """Serve until Ctrl-C. which: the checkpoint. temperature: of every answer; None as in the
    run."""
    checkpoint = find_checkpoint(path, config, which)
    console = make_console()
    for text in checkpoint.damaged:
        console.print(text, style="yellow", highlight=False)
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be listened on ({error.strerror}): choose another with --port"
        ) from None
    key, place = _choose_key(path)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console.print(f"Loading {checkpoint.label} of {path.name} …", style="dim")
    try:
        with PolicyPlayer(config, checkpoint) as player:
            console.print(f"base_url: http://127.0.0.1:{port}/v1", highlight=False)
            console.print(f"api_key:  in {place}", highlight=False)
            console.print("Ctrl-C ends it.", style="dim")
            player.serve(port, key, temperature)
    except KeyboardInterrupt:
        console.print()


def _choose_key(run: Path) -> tuple[str, str]:
    """The key of the environment, else a new one in a file of the run; and where it stands."""
    given = os.environ.get(KEY, "").strip()
    if given:
        return given, KEY
    key = secrets.token_urlsafe(24)
    write_atomic(run / _FILE, key.encode())
    return key, str(run / _FILE)
