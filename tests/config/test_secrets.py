"""Secrets are refused in run files and overrides, with the reference to write in their place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from earl_core.config import ConfigError, check_references, dump_config, load_config, parse_config
from earl_core.environments.registry import check, create
from earl_core.secrets import redact, resolve

RUN: dict[str, Any] = {
    "name": "one",
    "iterations": 1,
    "model": {"path": "models/none"},
    "environment": {"name": "tests.config.test_secrets:Service"},
    "rollout": {"prompts_per_iteration": 4, "group_size": 2, "max_turns": 5},
}

# No real keys: made so that scanners of repositories leave them alone.
KEY = "sk-" + "a1B2" * 8
TOKEN = "gh" + "p_" + "Ab3" * 12
RANDOM = "q8Zr2Lw9" + "Tn4Xc7Vb1M5K"

SECRETS: list[tuple[str, Any]] = [
    ("AWS_SECRET_ACCESS_KEY", "abc/def"),
    ("AWS_SESSION_TOKEN", "abc"),
    ("aws_access_key_id", "abc"),
    ("authorization", "whatever"),
    ("Authorization", "Token abc"),
    ("private_key", "abc"),
    ("privateKey", "abc"),
    ("passphrase", "correct horse"),
    ("password", "swordfish"),
    ("password", 12345678),
    ("db_password", "swordfish"),
    ("PGPASSWORD", "swordfish"),
    ("passwd", "swordfish"),
    ("api_key", "abc"),
    ("apikey", "abc"),
    ("apiKey", "abc"),
    ("openai-api-key", "abc"),
    ("x-api-key", "abc"),
    ("client_secret", "abc"),
    ("secret", "abc"),
    ("token", "abc"),
    ("hf_token", "abc"),
    ("access_token", "abc"),
    ("auth_token", "abc"),
    ("bearer", "abc"),
    ("credentials", {"user": "me", "word": "abc"}),
    ("api_keys", ["abc", "def"]),
    ("ssh_key", "abc"),
    ("signing_key", "abc"),
    ("jwt", "abc"),
    ("connection_string", "Server=x;Pwd=y"),
    ("headers", {"Authorization": "Basic YWJjOmRlZg=="}),
    ("command", ["serve", "--api-key", "abc"]),
    ("command", "serve --api-key=abcdef"),
    ("command", ["curl", "-H", "Authorization: Bearer abc12345"]),
    ("anything", KEY),
    ("anything", TOKEN),
    ("anything", "AKIA" + "ABCDEFGH12345678"),
    ("anything", "hf_" + "AbCdEf" * 5),
    ("anything", "xoxb-" + "1234567890-abc"),
    ("anything", "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----"),
    ("anything", "eyJ" + "hbGciOi.eyJ" + "zdWIiOi.c2ln"),
    ("url", "https://me:swordfish@example.org/x"),
    ("url", "postgresql://me:sword@fish@example.org/x"),
    ("url", f"https://{RANDOM}@example.org/x"),
    ("url", "https://example.org/x?user=me&api_key=abc"),
    ("url", "https://example.org/x?sig=abc&se=2026"),
    ("url", "https://example.org/x?X-Amz-Signature=abc"),
    ("url", "https://example.org/x#access_token=abc"),
    ("session", RANDOM),
    ("nested", [{"deep": [{"password": "swordfish"}]}]),
    (KEY, 1),
]

INNOCENT: list[tuple[str, Any]] = [
    ("max_tokens_per_turn", 64),
    ("max_tokens", 64),
    ("token_budget", 128),
    ("tokenizer", "models/tokenizer"),
    ("eos_token", "<|im_end|>"),
    ("pad_token", "<pad>"),
    ("bos_token", "<s>"),
    ("stop_token", "</answer>"),
    ("end_of_turn_token", "<|im_end|>"),
    ("token", 17),
    ("tokens", ["a", "b"]),
    ("token_ids", [1, 2, 3]),
    ("key", "up"),
    ("keys", ["w", "a", "s", "d"]),
    ("door_key", "red"),
    ("answer_key", "B"),
    ("sort_key", "length"),
    ("public_key", "abc"),
    ("key_color", "red"),
    ("keyboard", "qwerty"),
    ("monkey", "george"),
    ("secret_word", "apple"),
    ("secret_number", 7),
    ("secret", 7),
    ("password_length", 8),
    ("password_policy", "strict"),
    ("author", "me"),
    ("authority", "bank"),
    ("passing_score", 0.5),
    ("passage", "Once upon a time."),
    ("compass", "north"),
    ("session_length", 30),
    ("signature_moves", ["castle"]),
    ("credentials", None),
    ("api_key", ""),
    ("api_key", "env:MY_KEY"),
    ("password", "file:/run/secrets/password"),
    ("anon", True),
    ("token", "anon"),
    ("digest", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"),
    ("uid", "4fd1a2b3c4d5"),
    ("url", "https://example.org/x?page=2&q=key"),
    ("url", "http://127.0.0.1:5000/a@b"),
    ("url", "s3://bucket/prefix"),
    ("repository", "ssh://git@example.org/x.git"),
    ("prompt", "Guess the secret word. The password: is hidden behind a basic knowledge question."),
    ("prompt", "Speak, bearer of the ring! What is the token of your authorization?"),
    ("model", "models/sk-learn-of-the-whole-world"),
    ("path", "/home/me/secret/keys/file.txt"),
    ("formula", "key=value"),
    ("epsilon", 1e-8),
]


class Service:
    """An environment that wants a key."""

    def __init__(self, api_key: str = "", limit: int = 0) -> None:
        self.api_key = api_key
        if limit > 3:
            raise ValueError(f"{api_key} allows 3 calls, not {limit}")

    def reset(self, prompt: int, seed: int) -> None: ...

    def step(self, text: str) -> None: ...

    def close(self) -> None: ...


def run_with(name: str, value: Any) -> dict[str, Any]:
    return {**RUN, "environment": {**RUN["environment"], "options": {name: value}}}


def shown(value: Any) -> str:
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("name", "value"), SECRETS)
def test_a_secret_in_a_run_file_is_refused_and_not_shown(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"holds a secret .*`env:NAME`.*`file:") as caught:
        parse_config(run_with(name, value))
    assert not shown(value) or shown(value) not in f"{caught.value}{caught.value.__cause__}"
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), INNOCENT)
def test_what_only_sounds_like_a_secret_is_taken(name: str, value: Any) -> None:
    config = parse_config(run_with(name, value))
    assert config.environment.options == {name: value}
    if isinstance(value, str):
        assert redact(value) == value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dispatch.spill_url", "s3://me:swordfish@bucket/x"),
        ("tracking.uri", "http://me:swordfish@127.0.0.1:5000"),
        ("model.builder_options.token", "swordfish"),
        ("evaluation.options.password", "swordfish"),
        ("algorithm.advantage.api_key", "swordfish"),
        ("name", "swordfish.hf_" + "AbCdEf" * 5),
    ],
)
def test_an_override_is_refused_and_said_to_be_known(tmp_path: Path, key: str, value: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN))
    with pytest.raises(ConfigError, match="everyone on this machine can read a command") as caught:
        load_config(file, [f"{key}={value}"])
    assert f"{key}=env:NAME" in str(caught.value)
    assert "swordfish" not in str(caught.value)


def test_the_value_of_a_secret_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAME_PASSWORD", "plain words")
    with pytest.raises(ConfigError, match="the value of the environment variable GAME_PASSWORD"):
        parse_config(run_with("greeting", "plain words"))


def test_a_reference_is_resolved_where_it_is_used_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "key"
    kept.write_text("open sesame\n")
    kept.chmod(0o600)
    monkeypatch.setenv("PLACE", "over the rainbow")
    for reference, secret in ((f"file:{kept}", "open sesame"), ("env:PLACE", "over the rainbow")):
        config = parse_config(run_with("api_key", reference))
        check_references(config)
        assert secret not in dump_config(config)
        assert reference in dump_config(config)
        made: Any = create(config.environment.name, config.environment.options)
        assert made.api_key == secret
        with pytest.raises(ConfigError, match=r"\(hidden\) allows 3 calls") as caught:
            check(config.environment.name, {"api_key": reference, "limit": 4})
        assert secret not in f"{caught.value}{caught.value.__cause__}"
        assert redact(f"<{secret}>") == "<(hidden)>"


@pytest.mark.timeout(30)
def test_a_reference_that_leads_to_nothing_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    open_to_all = tmp_path / "open"
    open_to_all.write_text("x")
    open_to_all.chmod(0o644)
    for reference, reason in (
        ("env:EARL_NOT_SET", "export EARL_NOT_SET"),
        (f"file:{tmp_path}/none", "cannot be read"),
        (f"file:{tmp_path}", "cannot be read|no regular file"),
        (f"file:{tmp_path}/fifo", "no regular file"),
        ("file:relative", "write the whole path"),
        (f"file:{open_to_all}", "chmod 600"),
    ):
        config = parse_config(run_with("api_key", reference))
        with pytest.raises(ConfigError, match=f"environment.options.*: .*({reason})"):
            check_references(config)
        with pytest.raises(ConfigError, match=reason):
            check(config.environment.name, config.environment.options)
    with pytest.raises(ConfigError):
        resolve({"deep": [{"x": "env:EARL_NOT_SET"}]})


def test_a_reference_is_refused_where_nothing_resolves_it() -> None:
    with pytest.raises(ConfigError, match=r"model\.path is a reference, but none"):
        parse_config({**RUN, "model": {"path": "env:MODEL"}})
    assert parse_config(
        {**RUN, "dispatch": {"durability": "spill", "spill_url": "file:///tmp/spill"}}
    )
