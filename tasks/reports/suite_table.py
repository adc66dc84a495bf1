"""The suites of an evaluation as a table for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tasks.reports.lines import return_text


def suite_rows(suites: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """A line for each suite, of what `pass_rates.suite_results` found; intervals are of 95 %."""
    return [
        {
            "suite": label,
            "episodes": f"{suite['episodes']:.0f}",
            "failed": f"{suite['failed']:.0f}",
            "return (95 %)": _return(suite),
            **{
                f"pass@{k} (95 %)": f"{rate['share']:.1%} ({rate['low']:.1%} - {rate['high']:.1%})"
                for k, rate in suite["pass"].items()
            },
        }
        for label, suite in suites.items()
    ]


def _return(suite: Mapping[str, Any]) -> str:
    count = suite["episodes"]
    if not count:
        return ""
    spread = suite["error"] * math.sqrt(count - 1)
    return return_text({"return/mean": suite["return"], "return/std": spread, "episodes": count})
