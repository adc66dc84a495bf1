"""A kept episode as the spans of an MLflow trace: episode, turns, and in each turn a generation and
what the environment, or a tool, made of it.

Pure functions; nothing here imports MLflow. Ids are hashes of (run, iteration, episode), so that
sending an episode twice gives one trace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_TEXT_LIMIT = 20_000
_SECOND = 1_000_000_000
_TOKEN_NS = 1_000_000


@dataclass
class EpisodeTrace:
    """One trace: `spans` are span dictionaries in MLflow's stored format, the root first."""

    key: str
    name: str
    start_ns: int
    end_ns: int
    request: str
    response: str
    tags: dict[str, str]
    tokens: dict[str, int]
    spans: list[dict[str, Any]] = field(default_factory=list)

    @property
    def trace_id(self) -> str:
        """The same for the same run, iteration and episode."""
        return f"tr-{hashlib.sha256(self.key.encode()).hexdigest()[:32]}"

    def add(
        self,
        name: str,
        kind: str,
        parent: str | None,
        span_ns: tuple[int, int],
        inputs: dict[str, Any],
        outputs: dict[str, Any],
        **attributes: Any,
    ) -> str:
        """Add a span and return its id. span_ns: its start and end."""
        number = len(self.spans)
        span_id = hashlib.sha256(f"{self.key}/{number}".encode()).hexdigest()[:16]
        stored = {
            "mlflow.traceRequestId": self.trace_id,
            "mlflow.spanType": kind,
            "mlflow.spanInputs": inputs,
            "mlflow.spanOutputs": outputs,
            **attributes,
        }
        self.spans.append(
            {
                "trace_id": self.trace_id,
                "span_id": span_id,
                "parent_span_id": parent,
                "name": name,
                "start_time_unix_nano": span_ns[0],
                "end_time_unix_nano": span_ns[1],
                "events": [],
                "status": {"code": "STATUS_CODE_OK", "message": ""},
                "attributes": {key: json.dumps(value) for key, value in stored.items()},
            }
        )
        return span_id


def episode_trace(
    run_uid: str,
    iteration: int,
    kept: Mapping[str, Any],
    end_seconds: float,
    *,
    tools: bool = False,
    mismatch: Mapping[str, float] | None = None,
) -> EpisodeTrace:
    """The trace of one episode of `earl_core.run.kept_episodes.read_episodes`.

    tools: whether tools answer the model. mismatch: between engine and trainer, over the whole
    iteration, because an update keeps no log-probs by episode. end_seconds: Unix time at which the
    episode is drawn to end. Turns have no times, because equal episodes have equal bytes: an answer
    is drawn a millisecond long for each of its tokens, the environment without a length.
    """
    episode, turns = kept["episode_id"], kept["turns"]
    end_ns = int(end_seconds * _SECOND)
    summary = {
        "outcome": kept["outcome"],
        "return": kept["reward"],
        "finish_reason": kept["finish_reason"],
        **({"mismatch_of_iteration": dict(mismatch)} if mismatch else {}),
    }
    answered = sum(turn["tokens"] for turn in turns)
    start_ns = end_ns - _TOKEN_NS * answered
    request = _text(turns[0]["observation"]) if turns else ""
    trace = EpisodeTrace(
        key=f"{run_uid}/{iteration}/{episode}",
        name=f"episode {episode}",
        start_ns=start_ns,
        end_ns=end_ns,
        request=request,
        response=json.dumps(summary),
        tokens=_usage(sum(turn["context"] for turn in turns), answered),
        tags={
            "earl.iteration": str(iteration),
            "earl.episode": str(episode),
            "earl.outcome": kept["outcome"],
        },
    )
    root = trace.add(
        trace.name,
        "AGENT",
        None,
        (start_ns, end_ns),
        {"observation": request},
        {**summary, "closing": _text(kept["closing"])},
        iteration=iteration,
        turns=len(turns),
        tokens=answered,
    )
    following = [*(turn["observation"] for turn in turns), kept["closing"]][1:]
    for number, (turn, seen) in enumerate(zip(turns, following, strict=True), start=1):
        span = start_ns, start_ns + _TOKEN_NS * turn["tokens"]
        start_ns = span[1]
        # After the last turn the environment has the word.
        said = "tool" if tools and number < len(turns) else "environment"
        _add_turn(trace, root, number, turn, said, _text(seen), span)
    return trace


def _add_turn(
    trace: EpisodeTrace,
    root: str,
    number: int,
    turn: Mapping[str, Any],
    sayer: str,
    seen: str,
    span: tuple[int, int],
) -> None:
    observation, answer = _text(turn["observation"]), _text(turn["answer"])
    reward = {"reward": turn["reward"]}
    heard = {"observation": observation}
    parent = trace.add(
        f"turn {number}", "CHAIN", root, span, heard, {"answer": answer, **reward}, **reward
    )
    trace.add(
        "generation",
        "CHAT_MODEL",
        parent,
        span,
        {"messages": [{"role": "user", "content": observation}]},
        {"choices": [{"message": {"role": "assistant", "content": answer}}]},
        tokens=turn["tokens"],
        logprob_mean=turn["logprob"],
        **{"mlflow.chat.tokenUsage": _usage(turn["context"], turn["tokens"])},
    )
    after, said = (span[1], span[1]), {"answer": answer}
    trace.add(sayer, "TOOL", parent, after, said, {**reward, "observation": seen})


def _usage(before: int, answered: int) -> dict[str, int]:
    return {"input_tokens": before, "output_tokens": answered, "total_tokens": before + answered}


def _text(text: str) -> str:
    if len(text) <= _TEXT_LIMIT:
        return text
    return f"{text[:_TEXT_LIMIT]} … ({len(text)} characters)"
