"""Single-turn environment: a data set of prompts and a reward function."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from earl_core.environments.adapters.data_set import read_rows
from earl_core.environments.adapters.row_files import Row
from earl_core.environments.adapters.row_forms import Form, RowForm
from earl_core.environments.base import Message, StepResult
from earl_core.environments.options import Options
from earl_core.environments.real_numbers import real_number
from earl_core.environments.rewards import ANSWER_RULES
from earl_core.environments.rewards.row_rewards import RowReward
from earl_core.environments.rewards.usable_rows import RowRules

_OUTCOMES = ("correct", "incorrect")


class PromptOptions(Options):
    """Options of the prompt environment.

    path: path or fsspec URL of a data set, as `data_set.read_rows` takes it.
    split: name of a split, where the data set has several.
    format: how rows say prompt and answer; auto: as their columns look.
    prompt_column: column of the prompt, a text or a list of chat messages; None: the format's.
    answer_column: column, or path into structs such as reward_model.ground_truth, that the reward
        function gets as row["answer"]; rows without a column `answer` have that of the format.
        None: none.
    scoring_columns: columns that the run's reward functions get as episode["scoring"].
    system_prompt: system message before a prompt, instead of one that the row has.
    unusable_rows: rows without a usable prompt, answer or scoring value: refuse, or leave_out.
    reward_function: import path of function(completion, row) -> float or (float, dict); with a
        third argument it gets the messages of the tools that were used. TRL's signature,
        function(prompts, completions, **columns) -> list of floats, is taken, too.
    """

    path: str
    split: str | None = None
    format: Form = "auto"
    prompt_column: str | None = None
    answer_column: str | None = "answer"
    scoring_columns: tuple[str, ...] = ()
    system_prompt: str | None = None
    unusable_rows: Literal["refuse", "leave_out"] = "refuse"
    reward_function: str = "earl_core.environments.rewards:exact_match"

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty: name a file, a directory or a URL")


class PromptEnvironment:
    """One question, one answer, one reward. The prompt index modulo the number of rows is the row.

    `info["outcome"]` is what the reward function's dict says as `outcome` (of the `outcomes` there
    are), else correct (reward > 0) or incorrect. The
    numbers in the reward function's dict become `info["metrics"]`.
    """

    options_model: ClassVar[type[PromptOptions]] = PromptOptions

    def __init__(self, options: PromptOptions) -> None:
        self.options = options
        self._reward = RowReward(options.reward_function)
        self.return_range = getattr(self._reward.function, "reward_range", None)
        rule = ANSWER_RULES.get(self._reward.function)
        self._form = RowForm(options.format, options.prompt_column, options.answer_column)
        rules = RowRules(self._form, rule, options.scoring_columns)
        leave_out = options.unusable_rows == "leave_out"
        self._rows = read_rows(options.path, options.split, rules, leave_out)
        self.prompt_count = len(self._rows)
        self._row: Row | None = None
        self._asked: str | list[Message] = ""
        self._used: list[Message] = []

    def reset(self, prompt: int, seed: int) -> list[Message]:
        index = prompt % len(self._rows)
        row = self._rows[index]
        chat = self._form.read(row)
        messages, system = chat.prompt, self.options.system_prompt
        if system is not None:
            own = messages[0]["role"] == "system"
            messages = [{"role": "system", "content": system}, *messages[own:]]
        if chat.tools:
            messages = [{**messages[0], "tools": chat.tools}, *messages[1:]]
        if self.options.answer_column is not None:
            row["answer"] = chat.answer
        self._row, self._used = row, []
        text = self._form.asks_text(row)
        self._asked = chat.prompt[-1]["content"] if text else list(chat.prompt)
        return messages

    def tools_used(self, messages: Sequence[Message]) -> None:
        """Takes an answer with calls of tools, and their results."""
        self._used += messages

    def step(self, text: str) -> StepResult:
        if self._row is None:
            raise RuntimeError("the question was answered or not asked yet: call reset first")
        row, self._row = self._row, None
        returned = self._reward(text, row, self._asked, self._used)
        pair = isinstance(returned, tuple) and len(returned) == 2
        reward, details = returned if pair else (returned, {})
        value = real_number(reward)
        if not math.isfinite(value) or not isinstance(details, Mapping):
            raise TypeError(
                f"the reward function {self.options.reward_function!r} returned {returned!r}: it "
                "must return a finite number, or a finite number and a dict"
            )
        outcome = str(details.get("outcome", "correct" if value > 0 else "incorrect"))
        metrics = {
            key: number
            for key, given in details.items()
            if math.isfinite(number := real_number(given))
        }
        info: dict[str, Any] = {"outcome": outcome, "metrics": metrics}
        if known := details.get("outcomes", () if "outcome" in details else _OUTCOMES):
            info["outcomes"] = [str(each) for each in known]
        if columns := self.options.scoring_columns:
            # A data set may hold dates and the like.
            given = json.dumps({column: row[column] for column in columns}, default=str)
            info["scoring"] = json.loads(given)
        return StepResult([], value, True, info)

    def close(self) -> None:
        self._row = None
