"""Overrides as a parameter of flows: Prefect's server refuses secrets before it stores them.

The server knows the parameter's JSON schema only, and has stored a flow run's parameters before the
flow could look at them. The pattern is coarse: `earl_core.config` looks again, and closely.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

_NAMES = (
    "password",
    "passwd",
    "passphrase",
    "secret",
    "credentials?",
    "authorization",
    "(?:api|access|secret|private|account|signing|encryption|ssh|auth)[._-]?keys?",
    r"(?:^|\.)(?:(?:access|api|auth|aws_session|bearer|github|hf|id|refresh|controller)[_-])?token",
)
_VALUES = (
    r"(?:^|\W)(?:sk|pk|rk)[-_][\w-]*\d[\w-]{8}",
    r"hf_\w{16}",
    r"gh[pousr]_\w{16}",
    r"github_pat_",
    r"(?:AKIA|ASIA)[0-9A-Z]{12}",
    r"xox[a-z]-\w",
    r"-----BEGIN [A-Z ]*PRIVATE",
    r"eyJ[\w-]+\.eyJ",
    r"://[^\s/?#:@]*:[^\s/?#]+@",
)


def _any_case(pattern: str) -> str:
    """Make the pattern match both cases, for patterns without classes of letters; neither side's
    flags can be relied on."""
    return "".join(f"[{c.upper()}{c}]" if c.isalpha() else c for c in pattern)


NO_SECRET = (
    rf"^(?![^=]*(?:{_any_case('|'.join(_NAMES))})\s*=\s*(?!env:|file:)\S)"
    rf"(?![\s\S]*(?:{'|'.join(_VALUES)}))"
)

Overrides = Annotated[
    list[Annotated[str, Field(json_schema_extra={"pattern": NO_SECRET})]],
    Field(json_schema_extra={"title": "Overrides"}),
]
