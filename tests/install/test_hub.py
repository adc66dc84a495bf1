"""`model.path: org/name`: fetched once from a hub, here one of the test's own on loopback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from earl_core.config.model import ModelConfig
from earl_core.pretrained.model_directory import needed_files
from tests.cli.conftest import Earl

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """The part of the hub's API that a download needs, for one model. Remembers what was asked."""

    def __init__(self, files: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0]
        names = sorted(file.name for file in self.server.files.iterdir())
        if path.startswith("/api/models/acme/tiny/tree/"):
            sizes = {name: (self.server.files / name).stat().st_size for name in names}
            content = json.dumps(
                [
                    {"type": "file", "path": name, "oid": name.encode().hex(), "size": size}
                    for name, size in sizes.items()
                ]
            ).encode()
            self.send({"Content-Type": "application/json"}, content, body)
        elif path.startswith("/api/models/acme/tiny"):
            siblings = [{"rfilename": name} for name in [*names, "original/model.safetensors"]]
            content = json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}).encode()
            self.send({"Content-Type": "application/json"}, content, body)
        elif path.startswith(f"/acme/tiny/resolve/{COMMIT}/") and path.rpartition("/")[2] in names:
            name = path.rpartition("/")[2]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name.encode().hex()}"'}
            self.send(headers, (self.server.files / name).read_bytes(), body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send(self, headers: dict[str, str], content: bytes, body: bool) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    files = tmp_path / "served"
    files.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"):
        (files / name).write_text(f"{{}} {name}")
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def fetch(directory: Path, endpoint: str, name: str = "acme/tiny") -> str:
    """Build as the model worker does, in a process that is told to stay offline; its error."""
    code = (
        "import pathlib; from earl_core.models import hub\n"
        "from earl_core.system.errors import EarlError\n"
        f"try: hub.build(pathlib.Path({name!r}))\n"
        "except EarlError as error: print(error)"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(directory / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_model_is_downloaded_once_though_all_else_is_offline(hub: Hub, tmp_path: Path) -> None:
    assert fetch(tmp_path, hub.url) == ""
    made = tmp_path / "acme" / "tiny"
    names = {file.name for file in made.iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (made / "config.json").read_text() == "{} config.json"
    assert COMMIT in str(made.resolve())
    asked = len(hub.asked)
    assert fetch(tmp_path, hub.url) == ""
    assert len(hub.asked) == asked
    shutil.rmtree(tmp_path / "cache")
    assert fetch(tmp_path, hub.url) == ""
    assert (made / "config.json").is_file()


def test_what_cannot_be_fetched_is_said_in_one_sentence(hub: Hub, tmp_path: Path) -> None:
    shown = fetch(tmp_path, hub.url, "acme/nothing")
    assert "the model hub gives this user no model of that name" in shown
    shown = fetch(tmp_path, "http://127.0.0.1:9")
    assert "cannot be reached" in shown
    assert "Set model.path to a directory with a model" in shown
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert "move what is there out of the way" in fetch(tmp_path, hub.url)


@pytest.mark.slow
def test_train_says_that_it_downloads_and_what_stopped_it(
    tmp_path: Path, shared_memory: Path
) -> None:
    earl = Earl(tmp_path, shared_memory)
    environment = {**earl.environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    options = earl.settings(model__path="acme/tiny", model__builder="null")
    done = subprocess.run(
        earl.command("train", "tictactoe_tiny", "--name", "hub", "--plain", *options),
        cwd=earl.directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert "downloading the model acme/tiny from the model hub" in done.stdout + done.stderr
    assert "the model hub, from which a model of that name would be downloaded" in done.stderr


def test_which_paths_are_names_of_the_hub() -> None:
    for path, expected in {
        "Qwen/Qwen3-0.6B": True,
        "models/mine": False,
        "./Qwen/Qwen3-0.6B": False,
        "/models/mine": False,
        "mine": False,
        "a/b/c": False,
    }.items():
        assert ModelConfig(path=path).from_hub is expected, path
    assert not ModelConfig(path="acme/tiny", builder="my:build").from_hub


def test_only_the_files_that_are_read_are_downloaded() -> None:
    names = ["config.json", "pytorch_model.bin", "tokenizer.model", "onnx/model.onnx", "a.gguf"]
    assert needed_files(names) == ["config.json", "pytorch_model.bin", "tokenizer.model"]
    assert "pytorch_model.bin" not in needed_files([*names, "model.safetensors"])
    assert needed_files(["adapter_config.json", "adapter_model.safetensors", *names]) == [
        *needed_files(names)
    ]
