"""The page itself: a run's records and episodes in the template, with plotly and without a network.

All that a run says is data: compressed JSON, or JSON in which `<` is escaped. The page's script
inserts it as text. A content security policy names the two scripts by their digests and allows
nothing to be loaded, so that what a model wrote runs nothing and reaches nobody.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from plotly.offline import get_plotlyjs

from earl_core.rollout.chat.tool_calls import FORMATS
from earl_core.secrets import redact_tree
from earl_core.system.files import write_atomic
from tasks.reports.run_page import facts
from tasks.reports.run_page.charts import sections
from tasks.reports.run_page.records import Line, RunRecords, read_records
from tasks.reports.run_page.stored_episodes import PackedEpisodes, encoded, pack_episodes
from tasks.reports.run_page.token_texts import find_token_texts

_SCRIPTS = ("page.js", "charts.js", "dialogue.js", "episodes.js")
_EPISODE_BYTES = 13_000_000


class Written(NamedTuple):
    """A page: its file, its bytes, how many episodes it lists and shows with text and tokens."""

    path: Path
    bytes: int
    episodes: int
    with_texts: int
    with_tokens: int


def write_page(
    run: Path,
    iterations: Sequence[Line],
    evaluations: Sequence[Line],
    output: Path,
    most_episodes: int,
) -> Written:
    """Write the page of a run, whole or not at all.

    iterations, evaluations: a mapping of numbers each, ascending by `iteration`. most_episodes: of
    all iterations together. output: a device or a pipe is never replaced by a file. Raises
    `ConfigError` where no run lies, `OSError`.
    """
    records = read_records(run, iterations, evaluations)
    tokens = find_token_texts(records.tokenizer_files)
    stored = records.episode_files
    packed = pack_episodes(stored, tokens, most_episodes, _EPISODE_BYTES)
    shown = packed.index.get("shown", [])
    counts = len(shown), sum(level > 0 for level in shown), sum(level > 1 for level in shown)
    notes = [_how_many(*counts, tokens is None), *packed.damaged]
    data = {**_told(records), "notes": redact_tree(notes), "tools": _tool_patterns(records)}
    page = _filled(data, packed).encode()
    target = output.resolve()  # a link stays one
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is no file")
    write_atomic(target, page)
    return Written(output, len(page), *counts)


def _told(records: RunRecords) -> dict[str, Any]:
    """Collect the page's contents besides episodes."""
    said = {
        "name": records.config.name,
        "state": records.state,
        "standing": facts.standing(records),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "facts": facts.facts(records),
        "spans": facts.deployment_spans(records.plans),
        "infeasible": facts.infeasible(records.observations),
        "failures": [
            {"reason": reason, "count": count, "iterations": where}
            for reason, (count, where) in records.failures.items()
        ],
        "events": facts.events(records),
        "configuration": facts.configuration(records),
        "sizes": facts.sizes(records),
        "hardware": facts.hardware(records),
        "versions": facts.versions(),
        "commands": list(facts.commands(records)),
    }
    return {**redact_tree(said), "sections": sections(records)}


def _how_many(listed: int, with_texts: int, with_tokens: int, no_tokenizer: bool) -> str:
    if not listed:
        return "The run has kept no episodes (tracking.keep_episodes says which it keeps)."
    text = f"{listed:,} episodes are listed"
    if with_texts < listed:
        text += f", {with_texts:,} of them with their texts, for the page has a bounded size"
    if no_tokenizer:
        return f"{text}; their tokens are not shown, because no tokenizer lies with the model."
    if with_tokens < with_texts:
        text += f", {with_tokens:,} with their tokens, the first of each iteration"
    return f"{text}."


def _tool_patterns(records: RunRecords) -> list[str]:
    """Regular expressions of calls in answers, for the page's script; none in a run without."""
    config = records.config
    if not any(each.tools or each.mcp or each.agent for each in config.played.values()):
        return []
    asked = config.rollout.tool_format
    formats = [FORMATS[asked]] if asked in FORMATS else list(FORMATS.values())
    return [pattern for each in formats if (pattern := _pattern(each))]


def _pattern(found: dict[str, Any]) -> str:
    begin = found.get("open_pattern") or _escaped(found["open"])
    end = found.get("close_pattern") or _escaped(found.get("close", ""))
    whole = f"(?:{begin})[^]*?(?:{end}|$)" if end else f"(?:{begin})[^]*$"
    # JavaScript's way of the same; names must not occur twice in one expression.
    return whole.replace("(?P<name>", "(").replace(r"\A", "^")


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in r"\^$.*+?()[]{}|/" else letter for letter in text)


def _filled(data: dict[str, Any], packed: PackedEpisodes) -> str:
    template = files("tasks.reports.run_page") / "template"

    def read(name: str) -> str:
        return (template / name).read_text(encoding="utf-8")

    plotly, script = get_plotlyjs(), '"use strict";\n' + "".join(map(read, _SCRIPTS))
    policy = (
        "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src "
        f"{_digest(plotly)} {_digest(script)}; base-uri 'none'; form-action 'none'"
    )
    parts = [
        f'<script type="text/plain" id="{kind}-{number}">{text}</script>'
        for number, part in enumerate(packed.parts)
        for kind, text in zip(("texts", "tokens"), part, strict=True)
    ]
    values = {
        "policy": policy,
        "style": read("page.css"),
        "data": _escaped_json(data),
        "index": encoded(packed.index),
        "parts": "\n".join(parts),
        "plotly": plotly,
        "script": script,
    }
    # Piece by piece: what is put in is not searched for further places.
    page = []
    for piece in read("page.html").split("{{"):
        name, found, rest = piece.partition("}}")
        page.append(values[name] + rest if found else piece)
    return "".join(page)


def _digest(script: str) -> str:
    """Return the name that a content security policy has for a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _escaped_json(value: Any) -> str:
    """JSON that nothing inside of a page's script element can end."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("&", "\\u0026")
