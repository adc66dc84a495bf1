"""An environment and a reward function that tell secrets in all that they tell, and their rules."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any

from earl_core.environments.base import Message, StepResult
from tests.rollout.environments import worth

PERSON, NUMBER, CARD, PROJECT = "Ada Lovelace", "P-12345", "4111-1111-1111-1111", "Zugvogelwiese"
ALIKE = "АDА  lovel\u00e1ce"
"""With Cyrillic letters, an accent and other white space."""
PLAN = "the plan is to leave"
RULES = f"""
words: [{PERSON}, {PROJECT}, never said]
patterns:
  - {{name: card, match: '(?:\\d{{4}}-){{3}}\\d{{4}}'}}
  - {{name: person, match: 'P-\\d{{5}}', hash: true}}
drop_turns: ['INTERNAL ONLY']
hash_fields: [prompt_id]
key: env:EARL_TEST_REDACTION_KEY
"""
SECRETS = ("ovelace", "OVELACE", "lovel\u00e1ce", "АDА", NUMBER, CARD, PLAN, "Zugvog", "elwiese")
"""Nothing of them may be found; the last two are parts of one word, which stand in two turns."""


class Office:
    """Two turns, then one that nobody is to see; prompts in `raising` fail with a secret."""

    def __init__(self, raising: list[int]) -> None:
        self._raising, self._prompt, self._turn = raising, 0, 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._prompt, self._turn = prompt, 0
        return [
            {"role": "system", "content": f"You serve {PERSON}, {NUMBER}."},
            {"role": "user", "content": f"Her card is {CARD}, and the project Zugvog"},
        ]

    def step(self, text: str) -> StepResult:
        if self._prompt in self._raising:
            raise ValueError(f"{PERSON} is not in: {CARD}")
        self._turn += 1
        if self._turn == 1:
            said = f'elwiese: {{"who": "{ALIKE}", "id": "{NUMBER}"}}'
            return StepResult([{"role": "user", "content": said}], worth(text), False)
        if self._turn == 2:
            said = f"INTERNAL ONLY: {PLAN}"
            return StepResult([{"role": "user", "content": said}], worth(text), False)
        info = {
            "outcome": f"told {PERSON}",
            "scoring": {PERSON: {"card": CARD}, "note": f"INTERNAL ONLY, {PLAN}"},
            "metrics": {f"asked by {NUMBER}": 1.0, "asked": 2.0},
        }
        return StepResult([{"role": "user", "content": f"Bye, {ALIKE}"}], worth(text), True, info)

    def close(self) -> None:
        pass


def judged(episode: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """The length of what was said, with a metric that names somebody; of the second iteration an
    error that does."""
    if 16 <= episode["episode_id"] < 32:
        raise ConnectionError(f"nobody judges {episode['messages'][0]['content'][:40]}")
    said = sum(len(each["content"]) for each in episode["messages"])
    return float(said % 97), {f"of {PERSON}": 1.0}


def unpacked(content: bytes) -> bytes:
    """What is packed in a page."""
    packed = re.findall(rb"H4sI[A-Za-z0-9+/=]{20,}", content)
    return b"\n".join(gzip.decompress(base64.b64decode(each)) for each in packed)


def found_in(content: bytes) -> list[str]:
    """Secrets in a file, or packed in it as pages pack episodes; JSON may have escaped them."""
    whole = content + unpacked(content)
    forms = {each: (each.encode(), json.dumps(each)[1:-1].encode()) for each in SECRETS}
    return [each for each, found in forms.items() if any(form in whole for form in found)]
