"""A played episode as the spans of an MLflow trace: episode, turns, and in each turn llm and
environment.

Pure functions; nothing here imports MLflow. Ids are hashes of (run, iteration, episode), so that
sending an episode twice gives one trace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEXT_LIMIT = 20_000
_SECOND = 1_000_000_000


@dataclass(frozen=True)
class EpisodeTrace:
    """One trace: `spans` are span dictionaries in MLflow's stored format, the root first."""

    trace_id: str
    name: str
    start_ns: int
    end_ns: int
    request: str
    response: str
    tags: dict[str, str]
    spans: list[dict[str, Any]]


def episode_trace(
    run_uid: str, iteration: int, example: Mapping[str, Any], end_seconds: float
) -> EpisodeTrace:
    """The trace of one example (see `earl_core.rollout.metrics.example`); missing keys are fine.

    end_seconds: Unix time at which the episode is drawn to end. The episode's own clock knows
    only how long each answer took, so environment spans have no length and waits are left out.
    """
    episode = example.get("episode_id", 0)
    key = f"{run_uid}/{iteration}/{episode}"
    otel_id = hashlib.sha256(key.encode()).hexdigest()[:32]
    builder = _Builder(trace_id=f"tr-{otel_id}", key=key, spans=[])
    turns = [turn for turn in example.get("turns") or [] if isinstance(turn, Mapping)]
    end_ns = int(end_seconds * _SECOND)
    start_ns = end_ns - sum(_nanoseconds(turn) for turn in turns)
    outcome = str(example.get("outcome") or "")
    summary = {
        name: example[name]
        for name in ("outcome", "return", "finish_reason")
        if example.get(name) not in (None, "")
    }
    request = _text(turns[0].get("observation", "")) if turns else ""
    root = builder.add(
        name := f"episode {episode}",
        "AGENT",
        None,
        start_ns,
        end_ns,
        inputs={"observation": request},
        outputs={**summary, "closing": _text(example.get("closing", ""))},
        attributes={"iteration": iteration, "turns": len(turns)},
    )
    clock = start_ns
    for number, turn in enumerate(turns, start=1):
        following = turns[number] if number < len(turns) else None
        seen = following.get("observation", "") if following else example.get("closing", "")
        clock = builder.add_turn(root, number, turn, _text(seen), clock)
    tags = {"earl.iteration": str(iteration), "earl.episode": str(episode)}
    if outcome:
        tags["earl.outcome"] = outcome
    return EpisodeTrace(
        trace_id=builder.trace_id,
        name=name,
        start_ns=start_ns,
        end_ns=end_ns,
        request=request,
        response=json.dumps(summary),
        tags=tags,
        spans=builder.spans,
    )


@dataclass
class _Builder:
    trace_id: str
    key: str
    spans: list[dict[str, Any]]

    def add_turn(
        self, root: str, number: int, turn: Mapping[str, Any], seen: str, start_ns: int
    ) -> int:
        """Add a turn with its two spans; returns when it ends."""
        end_ns = start_ns + _nanoseconds(turn)
        observation, answer = _text(turn.get("observation", "")), _text(turn.get("answer", ""))
        reward = {"reward": turn.get("reward")}
        parent = self.add(
            f"turn {number}",
            "CHAIN",
            root,
            start_ns,
            end_ns,
            inputs={"observation": observation},
            outputs={"answer": answer, **reward},
            attributes=reward,
        )
        self.add(
            "llm",
            "CHAT_MODEL",
            parent,
            start_ns,
            end_ns,
            inputs={"messages": [{"role": "user", "content": observation}]},
            outputs={"choices": [{"message": {"role": "assistant", "content": answer}}]},
            attributes={"tokens": turn.get("tokens")},
        )
        self.add(
            "environment",
            "TOOL",
            parent,
            end_ns,
            end_ns,
            inputs={"answer": answer},
            outputs={**reward, "observation": seen},
            attributes={},
        )
        return end_ns

    def add(
        self,
        name: str,
        kind: str,
        parent: str | None,
        start_ns: int,
        end_ns: int,
        *,
        inputs: dict[str, Any],
        outputs: dict[str, Any],
        attributes: dict[str, Any],
    ) -> str:
        """Add a span and return its id."""
        number = len(self.spans)
        span_id = hashlib.sha256(f"{self.key}/{number}".encode()).hexdigest()[:16]
        stored = {
            "mlflow.traceRequestId": self.trace_id,
            "mlflow.spanType": kind,
            "mlflow.spanInputs": inputs,
            "mlflow.spanOutputs": outputs,
            **{key: value for key, value in attributes.items() if value is not None},
        }
        self.spans.append(
            {
                "trace_id": self.trace_id,
                "span_id": span_id,
                "parent_span_id": parent,
                "name": name,
                "start_time_unix_nano": start_ns,
                "end_time_unix_nano": end_ns,
                "events": [],
                "status": {"code": "STATUS_CODE_OK", "message": ""},
                "attributes": {key: json.dumps(value) for key, value in stored.items()},
            }
        )
        return span_id


def _nanoseconds(turn: Mapping[str, Any]) -> int:
    seconds = turn.get("seconds")
    return int(max(float(seconds), 0.0) * _SECOND) if isinstance(seconds, int | float) else 0


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) <= _TEXT_LIMIT:
        return text
    return f"{text[:_TEXT_LIMIT]} … ({len(text)} characters)"
