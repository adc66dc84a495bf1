"""Refusals of requests."""

from __future__ import annotations

from starlette.exceptions import HTTPException

ERROR_CODE = "x-error-code"
"""The header that repeats an error's code."""


def refused(status: int, code: str, message: str) -> HTTPException:
    """Make the exception of a request that is not answered. code: for programs, as OpenAI has
    them."""
    return HTTPException(status, message, {ERROR_CODE: code})


def invalid(message: str) -> HTTPException:
    """Make the exception of a request with a field that is wrong."""
    return refused(400, "invalid_request", message)
