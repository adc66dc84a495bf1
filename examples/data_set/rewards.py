"""What an answer is worth, beside the row of the data set."""

import re
from typing import Any


def score(completion: str, row: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """1 for the right number after `####` at the end, 0.2 for another number there.

    The numbers of the dict become metrics, and its outcome is counted.
    """
    found = re.search(r"#### ?(-?\d+)\.?\s*$", completion)
    right = row["answer"].rpartition("#### ")[2]
    correct = found is not None and found[1] == right
    outcome = "right" if correct else "wrong" if found else "no form"
    return (
        1.0 if correct else 0.2 if found else 0.0,
        {
            "outcome": outcome,
            "outcomes": ["right", "wrong", "no form"],
            "characters": len(completion),
        },
    )
