"""The JSON of requests: read within bounds, and free of what cannot be encoded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from starlette.requests import Request

from earl_core.environments.agent import KeyTwice, unique
from earl_core.rollout.gateway.refusals import invalid, refused

_MOST_BYTES = 64 << 20
_DEEPEST = 200


async def read_body(request: Request, most: int) -> bytes | None:
    """The body; None when it has more than `most` bytes, which are then not kept. Raises
    `HTTPException`."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > _MOST_BYTES:
            raise refused(413, "too_large", f"a request has at most {_MOST_BYTES:,} bytes")
        if size > most:
            # A client reads no answer before it has sent all.
            parts.clear()
        else:
            parts.append(part)
    return None if size > most else b"".join(parts)


def parse_unique(content: bytes) -> Any:
    """As `parse_body`; raises for a key that stands twice, too, which costs time."""
    return parse_body(content, unique)


def parse_body(content: bytes, pairs: Callable[..., Any] | None = None) -> Any:
    """Its JSON. Raises `HTTPException`, also for halves of characters, which no tokenizer takes.

    pairs: see `json.loads`."""
    try:
        body = json.loads(content.decode(), object_pairs_hook=pairs)
    except KeyTwice as error:
        raise invalid(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise refused(400, "invalid_json", f"the body is no JSON: {error}") from error
    if b"\\ud" in content or b"\\uD" in content:
        check_encodable(body, "")
    return body


def check_encodable(value: Any, path: str) -> None:
    """Raise `HTTPException` with the place of a text that has no UTF-8, such as `messages[0].name`.

    path: of the value.
    """
    for place, text in _texts(value, path):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise invalid(f"{place} cannot be encoded as UTF-8") from None


def characters(value: Any) -> int:
    """Count the characters of all texts in a value of JSON, keys and the digits of numbers among
    them."""
    return sum(len(text) + 1 for _, text in _texts(value, ""))


def _texts(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """All texts with the place of each. Raises `HTTPException` for what is nested too deeply."""
    if depth > _DEEPEST:
        raise invalid("its tools or calls are nested too deeply")
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield path or "the request", key
            yield from _texts(each, f"{path}.{key}".lstrip("."), depth + 1)
    elif isinstance(value, list):
        yield path, ""
        for number, each in enumerate(value):
            yield from _texts(each, f"{path}[{number}]", depth + 1)
    else:
        yield path, str(value) if value is not None else ""
