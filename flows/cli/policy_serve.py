"""`earl serve`: a checkpoint, or any model, behind the gateway, for OpenAI clients with the key."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from earl_core.config import RunConfig, parse_config
from earl_core.control.policy_player import PlayedPolicy, PolicyPlayer, find_checkpoint
from earl_core.run.record import stored_config
from earl_core.system.errors import ConfigError
from earl_core.system.files import write_atomic
from flows.cli.found_runs import find_run
from flows.cli.interrupt import exit_on_sigterm
from flows.cli.tables import make_console

KEY = "EARL_SERVE_KEY"
"""Environment variable: the key to use. A command line would show it to everyone."""

_FILE = "serve.key"


def serve(
    what: tuple[str, str], which: str, overrides: list[str], port: int, temperature: float | None
) -> None:
    """Serve until Ctrl-C. what: a run's name or path, or a model directory; and the directory of
    runs. which: the checkpoint. temperature: of every answer; None as in the run."""
    path = Path(what[0])
    if (path / "config.json").is_file():
        if which != "last":
            raise ConfigError(f"{path} is a model, which has no checkpoints: drop --checkpoint")
        config, checkpoint = _of_model(path, overrides), PlayedPolicy(path, 0, "the model")
        secret = Path(what[1]) / f"{path.resolve().name}.key"
    else:
        path = find_run(*what)
        config = stored_config(path, overrides)
        checkpoint = find_checkpoint(path, config, which)
        secret = path / _FILE
    console = make_console()
    for text in checkpoint.damaged:
        console.print(text, style="yellow")
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be listened on ({error.strerror}): choose another with --port"
        ) from None
    key, place = _choose_key(secret)
    exit_on_sigterm()
    console.print(f"Loading {checkpoint.label} of {path.name} …", style="dim")
    try:
        with PolicyPlayer(config, checkpoint) as player:
            console.print(f"base_url: http://127.0.0.1:{port}/v1")
            console.print(f"api_key:  in {place}")
            console.print("Ctrl-C ends it.", style="dim")
            player.serve(port, key, temperature)
    except KeyboardInterrupt:
        console.print()


def _of_model(path: Path, overrides: list[str]) -> RunConfig:
    """A run's configuration as far as it concerns who only answers."""
    raw = {
        "name": "serve",
        "iterations": 1,
        "model": {"path": str(path)},
        "environment": {"name": "prompt"},
        "rollout": {"prompts_per_iteration": 1, "group_size": 2, "max_turns": 1},
    }
    return parse_config(raw, str(path), overrides)


def _choose_key(secret: Path) -> tuple[str, str]:
    """The key of the environment, else a new one in the file `secret`; and where it stands."""
    given = os.environ.get(KEY, "").strip()
    if given:
        return given, KEY
    key = secrets.token_urlsafe(24)
    secret.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(secret, key.encode())
    return key, str(secret)
