"""What is asked of the hosts of a run before it begins."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.host import LocalHost
from earl_core.cluster.host_view import HostView
from earl_core.config import ConfigError, RunConfig, load_config
from earl_core.control.host_checks import check_agreement, disagreements


class Elsewhere(HostView):
    """Sees `root` where others see `/`, by its own clock and with its own packages."""

    def __init__(self, root: Path | None = None, clock: float = 0.0, torch: str = "") -> None:
        self._root, self._clock, self._torch = root, clock, torch

    def _path(self, path: str) -> str:
        return path if self._root is None else f"{self._root}{Path(path).absolute()}"

    def versions(self) -> dict[str, str]:
        return super().versions() | ({"torch": self._torch} if self._torch else {})

    def model(self, directory: str) -> str:
        return super().model(self._path(directory))

    def time(self) -> float:
        return super().time() + self._clock

    def write(self, path: str, text: str) -> None:
        super().write(self._path(path), text)

    def reads(self, path: str, text: str) -> bool:
        return super().reads(self._path(path), text)


class Host(LocalHost):
    def __init__(self, name: str, view: Elsewhere) -> None:
        super().__init__(name)
        self._view = view

    def keep(self, target: str, *arguments: Any) -> Callable[..., Any]:  # type: ignore[override]
        assert target == "earl_core.cluster.host_view:HostView"
        return lambda method, *given: getattr(self._view, method)(*given)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(3 << 20))
    settings = [f"runs_directory={tmp_path / 'runs'}", f"model.path={model}"]
    return load_config("tictactoe_tiny", settings)


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls while it asks for another's time takes its clock for wrong."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)


def test_hosts_that_agree(config: RunConfig, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert disagreements(config, [LocalHost("here"), Host("there", Elsewhere())]) == []
    check_agreement(config, [LocalHost("here"), Host("there", Elsewhere())])
    assert sorted(tmp_path.rglob("*")) == before


def test_other_versions_and_another_file_system_are_refused(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("earl_core.cluster.host_view._SEEN_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"host b: torch is 1\.0, and .* here: install the same"):
        check_agreement(config, [Host("a", Elsewhere()), Host("b", Elsewhere(torch="1.0"))])
    # As a host whose disk has the same folders.
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "model", f"{other}{tmp_path / 'model'}")
    with pytest.raises(ConfigError, match=r"host b: does not see what is written to .*shared?"):
        check_agreement(config, [Host("b", Elsewhere(other))])
    assert list(tmp_path.glob(".*")) == []


def test_a_model_with_other_bytes_is_found(config: RunConfig, tmp_path: Path) -> None:
    class OtherModel(Elsewhere):
        def model(self, directory: str) -> str:
            copy = tmp_path / "copy"
            shutil.copytree(directory, copy)
            (copy / "model.safetensors").write_bytes(bytes((3 << 20) - 1) + b"x")
            return super().model(str(copy))

    (found,) = disagreements(config, [Host("b", OtherModel())])
    assert found.blocks
    assert "has other files in" in found.problem


def test_a_clock_that_is_wrong_is_told_but_blocks_nothing(config: RunConfig) -> None:
    hosts = [Host("b", Elsewhere(clock=-60.0))]
    (found,) = disagreements(config, hosts)
    assert found == ("b", "its clock differs by 60 s", "let a time service set the clocks", False)
    check_agreement(config, hosts)
