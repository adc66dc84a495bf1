"""The program of an environment host as one file that any Python from 3.11 on runs.

It holds what a host needs, which imports the standard library alone, so that an environment with
pins of its own runs beside nothing of ours: its interpreter finds this file, its own packages and
the working directory.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from earl_core.system.files import write_atomic

_PACKAGE = Path(__file__).resolve().parents[2]
_PARTS = ("environments", "secrets", "system")
_MAIN = """\
import os
import sys

if sys.version_info < (3, 11):
    sys.exit(f"the hosts' Python is {sys.version.split()[0]}: give one from 3.11 on")
sys.path.append(os.getcwd())

from earl_core.environments.hosting.host import main

main(sys.argv[1:])
"""


def write_host_archive(directory: Path) -> Path:
    """Writes the file and returns its path. The same code gives the same bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py"), _MAIN)
        sources = [_PACKAGE / "__init__.py"]
        sources += sorted(path for part in _PARTS for path in (_PACKAGE / part).rglob("*.py"))
        for source in sources:
            name = source.relative_to(_PACKAGE.parent).as_posix()
            archive.writestr(zipfile.ZipInfo(name), source.read_bytes())
    path = directory / "environment_host.pyz"
    write_atomic(path, packed.getvalue())
    return path
