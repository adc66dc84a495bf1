"""Single-turn environment: a data set of prompts and a reward function."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, ClassVar

from pydantic import Field

from earl_core.environments.base import Message, StepResult
from earl_core.environments.options import Options
from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_object

_ROLES = ("system", "user", "assistant", "tool")


class PromptOptions(Options):
    """Options of the prompt environment."""

    path: str = Field(description="A .jsonl or .parquet file: a path or any fsspec URL.")
    prompt_column: str = Field(default="prompt", description="A text, or a list of chat messages.")
    answer_column: str | None = Field(
        default="answer", description='Given to the reward function as row["answer"].'
    )
    scoring_columns: tuple[str, ...] = Field(
        default=(), description='Given to the run\'s reward functions as episode["scoring"].'
    )
    system_prompt: str | None = Field(default=None, description="A system message before a text.")
    reward_function: str = Field(
        default="earl_core.environments.rewards:exact_match",
        description="Import path of function(completion, row) -> float or (float, dict); with a "
        "third argument it gets the messages of the tools that were used.",
    )


class PromptEnvironment:
    """One question, one answer, one reward. The prompt index modulo the number of rows is the row.

    `info["outcome"]` is what the reward function says, else correct (reward > 0) or incorrect. The
    numbers in the reward function's dict become `info["metrics"]`.
    """

    options_model: ClassVar[type[PromptOptions]] = PromptOptions

    def __init__(self, options: PromptOptions) -> None:
        self.options = options
        self._reward = import_object(options.reward_function, "the option reward_function")
        if not callable(self._reward):
            raise ConfigError(
                f"the option reward_function {options.reward_function!r} is not a function",
                remedy="name one",
            )
        self._told = len(inspect.signature(self._reward).parameters) > 2
        self._rows = read_rows(options.path)
        self._row: dict[str, Any] | None = None
        self._used: list[Message] = []
        self._check_columns()

    def reset(self, prompt: int, seed: int) -> list[Message]:
        index = prompt % len(self._rows)
        row = dict(self._rows[index])
        messages = self._messages(row, index)
        if self.options.answer_column is not None:
            row["answer"] = row[self.options.answer_column]
        self._row, self._used = row, []
        return messages

    def tools_used(self, messages: Sequence[Message]) -> None:
        """Takes an answer with calls of tools, and their results."""
        self._used += messages

    def step(self, text: str) -> StepResult:
        if self._row is None:
            raise RuntimeError("the question was answered or not asked yet: call reset first")
        row, self._row = self._row, None
        returned = self._reward(text, row, *([self._used] if self._told else []))
        reward, details = returned if isinstance(returned, tuple) else (returned, {})
        value = float(reward) if isinstance(reward, Real) else math.nan
        if not math.isfinite(value):
            raise TypeError(
                f"the reward function {self.options.reward_function!r} returned {returned!r}: it "
                "must return a finite number, or a finite number and a dict"
            )
        outcome = str(details.get("outcome", "correct" if value > 0 else "incorrect"))
        metrics = {
            key: float(number)
            for key, number in details.items()
            if isinstance(number, Real) and math.isfinite(number)
        }
        info: dict[str, Any] = {"outcome": outcome, "metrics": metrics}
        if columns := self.options.scoring_columns:
            # A data set may hold dates and the like.
            given = json.dumps({column: row[column] for column in columns}, default=str)
            info["scoring"] = json.loads(given)
        return StepResult([], value, True, info)

    def close(self) -> None:
        self._row = None

    def _messages(self, row: Mapping[str, Any], index: int) -> list[Message]:
        prompt = row[self.options.prompt_column]
        system = self.options.system_prompt
        messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
            raise ConfigError(
                f"row {index} of {self.options.path}: column {self.options.prompt_column!r} is "
                "neither a text nor a list of messages with role and content"
            )
        return messages + [{"role": m["role"], "content": m["content"]} for m in prompt]

    def _check_columns(self) -> None:
        path, options = self.options.path, self.options
        columns = [("prompt_column", options.prompt_column)]
        if options.answer_column is not None:
            columns += [("answer_column", options.answer_column)]
        columns += [("scoring_columns", column) for column in options.scoring_columns]
        for index, row in enumerate(self._rows):
            for option, column in columns:
                if column not in row:
                    raise ConfigError(
                        f"row {index} of {path} has no column {column!r}; it has {', '.join(row)}",
                        remedy=f"correct the option {option}",
                    )
        self._messages(self._rows[0], 0)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and value.get("role") in _ROLES
        and isinstance(value.get("content"), str)
    )


@lru_cache(maxsize=8)
def read_rows(path: str) -> tuple[dict[str, Any], ...]:
    """Reads a .jsonl or .parquet file through fsspec; once per process, every episode shares it.

    Raises ConfigError when the file is missing, empty or malformed.
    """
    import fsspec

    suffix = path.rsplit(".", 1)[-1].lower()
    if suffix not in ("jsonl", "parquet"):
        raise ConfigError(
            f"the option path is {path!r}: name a file that ends in .jsonl or .parquet"
        )
    try:
        with fsspec.open(path, "rb") as stream:
            if suffix == "jsonl":
                rows = _read_jsonl(stream, path)
            else:
                import pyarrow.parquet as pq

                rows = pq.read_table(stream).to_pylist()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the prompts at {path!r} cannot be read: {type(error).__name__}: {error}",
            remedy="check the path",
        ) from error
    if not rows:
        raise ConfigError(f"the file {path!r} holds no rows: it needs at least one")
    return tuple(rows)


def _read_jsonl(stream: Any, path: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"line {number} of {path} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"line {number} of {path} is no JSON object, like {{...}}")
        rows.append(row)
    return rows
