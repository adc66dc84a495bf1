"""Pages as single files that need no network and no server: the report on a run, runs side by side.

All that a run says is data: compressed JSON, or JSON in which `<` is escaped. The page's script
inserts it as text. A content security policy names the two scripts by their digests and allows
nothing to be loaded, so that what a model wrote runs nothing and reaches nobody.
"""

from __future__ import annotations

import base64
import errno
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from earl_core.system.files import write_atomic

_BESIDE = ("base.js", "charts.js", "dialogue.js")
"""Scripts of every page."""


def filled(page: str, scripts: Sequence[str], data: Any, values: Mapping[str, str]) -> str:
    """A page of the template with its data, plotly and scripts. page: the template's file. scripts:
    those of this page alone, in order. data: JSON for them. values: what else the file names."""
    template = files("tasks.reports") / "template"

    def read(name: str) -> str:
        return (template / name).read_text(encoding="utf-8")

    plotly, script = get_plotlyjs(), '"use strict";\n' + "".join(map(read, (*_BESIDE, *scripts)))
    policy = (
        "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src "
        f"{_digest(plotly)} {_digest(script)}; base-uri 'none'; form-action 'none'"
    )
    given = {
        **values,
        "policy": policy,
        "style": read("page.css"),
        "data": _escaped_json(data),
        "plotly": plotly,
        "script": script,
    }
    # Piece by piece: what is put in is not searched for further places.
    found = []
    for piece in read(page).split("{{"):
        name, end, rest = piece.partition("}}")
        found.append(given[name] + rest if end else piece)
    return "".join(found)


def write(output: Path, text: str) -> int:
    """Write a page, whole or not at all; its bytes. A device or a pipe is never replaced by a file.
    Raises `OSError`."""
    page = text.encode()
    target = output.resolve()  # a link stays one
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is no file")
    write_atomic(target, page)
    return len(page)


def encoded(value: Any) -> str:
    """Plain data as compressed JSON in base64."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def _digest(script: str) -> str:
    """Return the name that a content security policy has for a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _escaped_json(value: Any) -> str:
    """JSON that nothing inside of a page's script element can end."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("&", "\\u0026")
