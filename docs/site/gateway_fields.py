"""Write docs/reference/requests.md from the tables of the gateway's fields.

`python docs/site/gateway_fields.py` writes it; a test compares it with `page()`.
"""

from __future__ import annotations

import json
from pathlib import Path

from earl_core.rollout.gateway.fields import APIS, NOTHING, Field

PAGE = Path(__file__).resolve().parents[1] / "reference" / "requests.md"

_TOP = """# Fields of requests

What the [gateway](../how-to/own-agent.md#the-gateway) does with each field of a request. **done**:
it has the meaning that its API gives it, as far as the table says nothing else. **refused**: status
400 with a sentence, because the field would change the prompt or the answer; values that ask for
nothing are taken. **harmless**: it changes neither. Fields in no table are refused by their name.
The header `X-EARL-Role` names the
[role](../how-to/own-agent.md#rewards-of-single-answers-and-roles) of the request's conversation, in
each API. `docs/site/gateway_fields.py` writes this page.
"""


def page() -> str:
    """The whole page."""
    parts = [_TOP]
    for name, (path, fields) in APIS.items():
        rows = [
            f"| `{key}` | {field.verdict} | {_about(field)} |"
            for key, field in sorted(fields.items(), key=lambda each: (each[1].verdict, each[0]))
        ]
        heading = name[0].upper() + name[1:]
        parts.append(f"## {heading}\n")
        parts += [f"`{path}`\n"] if path else []
        parts.append("\n".join(["| field | | |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _about(field: Field) -> str:
    taken = [value for value in field.nothing if value not in NOTHING]
    told = ", ".join(f"`{json.dumps(value)}`" for value in taken)
    about = field.why + (f"; {told} is taken" if told else "")
    return about.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
