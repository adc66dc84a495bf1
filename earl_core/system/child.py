"""Programs that end with the process that started them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# The kernel's PR_SET_PDEATHSIG is kept over exec; a function between fork and exec is not safe
# where there are threads.
_BOUND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)


def bound(command: Sequence[str]) -> list[str]:
    """The command as one that is killed when its starter dies, however that dies."""
    return [sys.executable, "-S", "-c", _BOUND, *command]
