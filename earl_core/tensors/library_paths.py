"""The libraries that torch's C++ compiler links, by paths that it can name.

It does not quote them (`-L/home/me/my project/.venv/...`), so that nothing compiled would be linked
where Python or torch lies in a folder with a space.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from earl_core.system.plain_paths import is_plain, plain


def plain_libraries() -> None:
    """Have torch's C++ compiler in this process find the libraries of torch and Python in folders
    whose paths have spaces. Call before the first compilation; it costs nothing elsewhere."""
    if is_plain(Path(torch.__file__)) and is_plain(Path(os.__file__)):
        return
    from torch._inductor.cpp_builder import BuildOptionsBase

    found = BuildOptionsBase.get_libraries_dirs
    if found.__module__ == __name__:
        return

    def get_libraries_dirs(self: BuildOptionsBase) -> list[str]:
        return [str(plain(Path(each))) for each in found(self)]

    BuildOptionsBase.get_libraries_dirs = get_libraries_dirs  # type: ignore[method-assign]
