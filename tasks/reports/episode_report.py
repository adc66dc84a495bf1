"""Episodes as pages: a good and a bad one, each as a dialogue.

Texts of models and environments stand in blocks of code, whose fences are longer than any in the
text: nothing in it becomes a heading, a link, an image or HTML.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

_WIDTH = 96
"""Characters; wider blocks would have to be scrolled."""

_MOST_CHARACTERS = 4000
"""Most characters of one message; its end is what the next one answers."""

_MOST_TURNS = 40


def episodes_page(iteration: int, episodes: Sequence[dict[str, Any]]) -> str:
    """Markdown: the episodes with the highest and the lowest reward among those given. episodes: as
    `earl_core.run.kept_episodes.read_episodes` gives them, at least one."""
    ranked = sorted(episodes, key=_reward)
    shown = [("A good episode", ranked[-1])]
    if _reward(ranked[0]) < _reward(ranked[-1]):
        shown.append(("A bad episode", ranked[0]))
    parts = [
        f"The highest and the lowest reward among {len(episodes)} episodes of iteration {iteration}"
    ]
    for heading, episode in shown:
        parts += [f"## {heading}", *_dialogue(episode)]
    return "\n\n".join(parts)


def _reward(episode: dict[str, Any]) -> float:
    reward = episode["reward"]
    return float("-inf") if reward is None else float(reward)


def _dialogue(episode: dict[str, Any]) -> list[str]:
    turns, reward = episode["turns"], episode["reward"]
    facts = {
        "reward": "none" if reward is None else f"{reward:+.3g}",
        "outcome": episode["outcome"],
        "ended by": episode["finish_reason"],
        "turns": str(len(turns)),
        "tokens of the answers": f"{sum(turn['tokens'] for turn in turns):,}",
        "environment": episode["environment"],
        "episode": str(episode["episode_id"]),
    }
    parts = [" · ".join(f"{name} {_inline(value)}" for name, value in facts.items() if value)]
    for number, turn in enumerate(turns[:_MOST_TURNS]):
        parts.append(f"**Environment or tool**\n\n{fenced(turn['observation'])}")
        earned = f", reward {turn['reward']:+.3g}" if turn["reward"] else ""
        label = f"**Agent**, turn {number + 1}, {turn['tokens']} tokens{earned}"
        parts.append(f"{label}\n\n{fenced(turn['answer'])}")
    if len(turns) > _MOST_TURNS:
        parts.append(f"… and {len(turns) - _MOST_TURNS} more turns")
    elif episode["closing"].strip():
        parts.append(f"**Environment, at the end**\n\n{fenced(episode['closing'])}")
    return parts


def fenced(text: str) -> str:
    """Foreign text as a block of code that nothing in it can end; long ones lose their middle."""
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]}\n[… {left_out:,} characters …]\n{text[-half:]}"
    lines = [
        part
        for line in text.strip("\n").splitlines() or [""]
        for part in textwrap.wrap(
            line, _WIDTH, replace_whitespace=False, drop_whitespace=False, tabsize=4
        )
        or [""]
    ]
    fence = "`" * (2 + max([1, *(len(run) for run in re.findall("`+", text))]))
    return "\n".join([f"{fence}text", *lines, fence])


def _inline(text: str) -> str:
    """Foreign text as code within a line."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"
