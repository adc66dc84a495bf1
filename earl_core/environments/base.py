"""The environment protocol and its errors.

An environment is one interactive world: a game, a question with a reward function, a tool loop. It
speaks chat messages and is played by one agent. It is a *deterministic* function of the prompt
index, the seed and the agent's texts; the environment pool relies on that to replay an episode
after its host process was lost. One that is not is played anew then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

from earl_core.system.errors import EarlError

LARGEST_NUMBER = 1e30
"""Largest reward or metric, so that sums and float32 columns stay finite too."""


OPPONENT_REWARD = "opponent_reward"
"""In the info of a step: what the opponent's last answer is paid, where it is trained, too."""


class FunctionCall(TypedDict):
    """The name of a tool and its arguments by name, anything JSON can hold."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """One call of a tool. type: "function"."""

    id: str
    type: str
    function: FunctionCall


def call_id(number: int) -> str:
    """Name a conversation's call: nine letters and digits, as Mistral's templates want it."""
    return f"call{number:05d}"


class Message(TypedDict):
    """One chat message, as chat templates take it. All texts must encode to UTF-8.

    tool_calls: of an assistant's message. reasoning_content: of one that is told apart from its
    reasoning, for templates that read it. tool_call_id, name: of the message of role "tool" that
    answers a call, the call's. tools: of the first message of an episode: tools that its model is
    told of, as OpenAI's API has them, and that nobody runs: an answer that calls one of them is
    given to `step` as it was written.
    """

    role: str
    content: str
    tool_calls: NotRequired[list[ToolCall]]
    reasoning_content: NotRequired[str]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    tools: NotRequired[list[dict[str, Any]]]


@dataclass(frozen=True)
class StepResult:
    """An environment's answer to one text of the agent.

    messages: what the agent sees next. When `done` is true nobody answers them any more: they tell
        people how the episode ended, and need not be tokenized.
    reward: the reward of this turn, a real number between -1e30 and 1e30.
    done: whether the episode is over.
    info: anything JSON can hold. At the end of an episode `info["outcome"]` (str: win, draw, loss,
        illegal, ...) is counted into the metrics, beside a zero for each that did not occur of
        `info["outcomes"]` (list of str: all that there are); `info["metrics"]` (dict of real
        numbers between -1e30 and 1e30, by name) is averaged; `info["scoring"]` is given to the
        run's reward functions with the episode. `info["opponent_reward"]` (a real number, of any
        step) is what the opponent's last answer is paid under `environment.train: all`.

    A result that is otherwise costs its own episode only: "invalid_result".
    """

    messages: list[Message]
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One episode's world. An object is reset once and played by one caller at a time.

    Each of the three methods may be a coroutine function (`async def`): it then runs in the event
    loop of its host, beside those of other episodes, and must not keep that loop. The others run in
    threads, as the constructor does.

    A class, or an object of it where that depends on options, may set `concurrent = False` to say
    that two of its objects must not run at the same time in one process (it uses global state, such
    as the `random` module). The pool then runs the calls of one host one after the other. With
    `deterministic = False` it says that its episodes cannot be replayed: those of a lost host are
    played anew. With `wants_policy = True` it gets, as the attribute `policy` before `reset`, the
    policy's address, a dict of `base_url` and `api_key`: it may ask there, by OpenAI's API, for
    answers that nobody is trained on, such as an opponent's moves; its episodes cannot be replayed
    then. It is None where there is no policy: in `earl env check`, and while a small model is made.

    An object may set `return_range = (least, greatest)`, where the rewards of an episode sum up to:
    what lies outside is told (`guard`).

    An object whose prompts are rows sets `prompt_count`, the number of them: prompts come again
    after so many, and `environment.curriculum` may choose among them.

    A class may set `tools = ("look_up", ...)`: names of methods that the model may call, beside the
    tools of the run file; see `environments.tools.functions`. With a method
    `tools_used(messages)` it is told of each answer with calls and their results.

    Two more are for a small model of its own (`earl_core.models.tiny`) and for `earl env check`.
    `characters: str` has every character of its messages and of the answers. A method
    `legal_answers()` returns a list of texts that `step` would take now; it changes nothing.
    """

    def reset(self, prompt: int, seed: int) -> list[Message]:
        """Starts the episode and returns its first messages, at least one.

        prompt: index >= 0; fixes the starting state (side, opening move, data set row).
        seed: fixes all later randomness (the opponent, dice).
        """
        ...

    def step(self, text: str) -> StepResult:
        """Takes the agent's decoded answer, with a configured prefill already in front of it."""
        ...

    def close(self) -> None:
        """Frees what the environment holds. Called once, also after a failure."""
        ...


class EnvironmentFailed(EarlError):
    """One episode's environment failed; the other episodes go on.

    episode_id: the episode that failed.
    reason: "exception" (the code raised), "timeout" (it did not return in time), "invalid_result"
        (what it returned breaks the protocol), "host_died" (it took its process down). Or, after
        its process was lost through no fault of its own, "not_deterministic" (its replay answered
        differently) and "lost" (it could not be replayed).
    detail: the end of the traceback, or of the host's log.
    """

    expected = False

    def __init__(self, episode_id: int, reason: str, detail: str = "") -> None:
        super().__init__(episode_id, reason, detail)
        self.episode_id = episode_id
        self.reason = reason
        self.detail = detail

    @property
    def by_infrastructure(self) -> bool:
        """True when the episode did not cause its failure, so that it can be played anew."""
        return self.reason in ("lost", "not_deterministic")

    def __str__(self) -> str:
        tail = f"\n{self.detail}" if self.detail else ""
        return f"the environment of episode {self.episode_id} failed: {self.reason}{tail}"
