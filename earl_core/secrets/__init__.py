"""Secrets: what looks like one, references to where one is kept, and hiding them in text.

Every layer and every process may import it.
"""

from earl_core.secrets.detection import find_secrets
from earl_core.secrets.names import is_secret_name
from earl_core.secrets.patterns import is_reference
from earl_core.secrets.redactor import (
    guard_logging,
    guard_output,
    learn,
    learn_rules,
    learn_url,
    redact,
    redact_error,
    redact_tree,
    shareable,
    shareable_names,
    shareable_tree,
    shareable_values,
)
from earl_core.secrets.references import files_of, resolve

__all__ = [
    "files_of",
    "find_secrets",
    "guard_logging",
    "guard_output",
    "is_reference",
    "is_secret_name",
    "learn",
    "learn_rules",
    "learn_url",
    "redact",
    "redact_error",
    "redact_tree",
    "resolve",
    "shareable",
    "shareable_names",
    "shareable_tree",
    "shareable_values",
]
