"""Paths with characters that shells, loaders and URLs read as their own."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from earl_core.config import ConfigError
from earl_core.rollout.engines import vllm_environment
from earl_core.system import plain_paths
from earl_core.system.errors import NotOurs
from earl_core.system.plain_paths import LONGEST, is_plain, plain
from earl_core.tensors.library_paths import plain_libraries
from flows.cli import project
from flows.cli.errors import shell_name
from tasks.tracking.mlflow_client import default_database, open_mlflow_run

ODD = ("a b", 'it\'s "odd"', "100%41", "a%20b", "#1", "$HOME", "ünï日本", "a:b", "[b]", "a\\b")


@pytest.fixture(autouse=True)
def own_links(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as short:
        directory = Path(short) / "links"
        monkeypatch.setattr(plain_paths, "links", lambda: directory)
        yield


@pytest.mark.parametrize("name", [*ODD, "x" * 200])
def test_a_path_has_one_link_that_every_program_takes(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    place.mkdir()
    (place / "file").write_text("here")
    link = plain(place, short=True)
    assert is_plain(link)
    assert len(os.fsencode(link)) <= LONGEST
    assert (link / "file").read_text() == "here"
    assert plain(place, short=True) == link
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(link / ("s" * 36)))


def test_links_of_others_are_not_followed(tmp_path: Path) -> None:
    plain_paths.links().mkdir(mode=0o755)
    with pytest.raises(NotOurs, match="not this user's alone"):
        plain(tmp_path / "a b")


def test_a_plain_path_stays_as_it_is(tmp_path: Path) -> None:
    assert plain(tmp_path) == tmp_path
    assert not plain_paths.links().exists()


@pytest.mark.parametrize("base", [None, "a b", "x" * 200])
def test_sockets_lie_where_their_names_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str | None
) -> None:
    temporary = tmp_path / "tem porary" / ("y" * 200)
    temporary.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    made = vllm_environment.socket_directory(tmp_path / base if base else None)
    assert is_plain(made)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(made / ("s" * 36)))


def test_what_vllm_preloads_is_found_from_a_folder_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader says on stderr what it could not preload."""
    import torch

    package = tmp_path / "a b" / "torch"
    package.mkdir(parents=True)
    (package / "lib").symlink_to(Path(torch.__file__).parent / "lib")
    monkeypatch.setattr(torch, "__file__", str(package / "__init__.py"))
    monkeypatch.setenv("LD_PRELOAD", "/gone/libgomp.so.1")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    vllm_environment.preload_plainly(scratch)
    named = os.environ["LD_PRELOAD"]
    assert "libgomp" in named
    assert "/gone/" not in named
    seen = "import os; print('libgomp' in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert not done.stderr


def test_compiled_code_is_linked_from_folders_with_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch._inductor import cpp_builder
    from torch._inductor.cpu_vec_isa import invalid_vec_isa
    from torch.utils import cpp_extension

    place = tmp_path / "a b"
    place.mkdir()
    (place / "lib").symlink_to(cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(torch, "__file__", str(place / "__init__.py"))
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(place / "lib"))
    options = cpp_builder.BuildOptionsBase
    monkeypatch.setattr(options, "get_libraries_dirs", options.get_libraries_dirs)
    plain_libraries()
    plain_libraries()
    folder = plain(place, short=True)
    (folder / "one.cpp").write_text("int one() { return 1; }")
    with_torch = cpp_builder.CppTorchOptions(vec_isa=invalid_vec_isa)
    cpp_builder.CppBuilder("one", str(folder / "one.cpp"), with_torch, str(folder)).build()
    assert (place / "one.so").is_file()


def test_mlflow_tracks_beside_runs_of_any_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / 'it\'s "odd" 100%41 #1 $HOME ünï日本' / ("y" * 200)
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    uri = f"sqlite:///{default_database('runs')}"
    run = open_mlflow_run(uri, "earl", "first", "uid", None)
    (place / "page.txt").write_text("text")
    run.client.log_artifact(run.run_id, "page.txt")
    assert MlflowClient(tracking_uri=uri).get_run(run.run_id).info.run_name == "first"
    assert [each.read_text() for each in place.glob("runs/mlartifacts/**/page.txt")] == ["text"]


def test_a_place_that_no_database_url_can_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has a `\?` in its path"):
        default_database(tmp_path / "what?")


@pytest.mark.parametrize("name", ODD)
def test_commands_for_copying_are_quoted(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / name / "my run"
    assert shlex.split(shell_name(run)) == [str(run)]
    (tmp_path / name).mkdir()
    project.create_project(tmp_path / name / "my_game_here")
    last = capsys.readouterr().out.splitlines()[-1]
    command = last.removeprefix("Next: ").partition(", then")[0]
    assert shlex.split(command) == ["cd", str(tmp_path / name / "my_game_here")]
