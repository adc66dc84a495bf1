"""Settings of all property tests."""

from __future__ import annotations

from hypothesis import settings

# The first tensor operation of a process may take longer than Hypothesis's deadline of 200 ms.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
