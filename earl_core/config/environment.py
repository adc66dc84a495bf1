"""Settings of the played episodes: an environment, an agent of the user's, or a mixture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from earl_core.config.algorithm import PenaltyConfig
from earl_core.system.settings import Options, Settings

_AGENT_SECONDS = 600.0


class McpConfig(Settings):
    """A server of tools: one that each environment host starts, or one that runs somewhere."""

    command: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="Command and arguments of a server that each environment host starts and "
        "speaks to over stdin and stdout.",
    )
    url: str | None = Field(
        default=None,
        pattern="^https?://",
        description="URL of a server's streamable HTTP endpoint.",
    )
    variables: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of the command; references (env:NAME, file:PATH) are "
        "replaced.",
    )
    headers: dict[str, str] = Field(
        default_factory=dict,
        description="HTTP headers of requests to the url; references are replaced.",
    )
    per: Literal["episode", "host"] = Field(
        default="episode",
        description="Who shares a connection, and the process of a command: nobody but the "
        "episode's own calls, or all episodes of a host, for servers that keep nothing between "
        "calls.",
    )
    tools: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="Tools of the server that the model may call, by the server's names. None: "
        "all. Their descriptions stand before every conversation.",
    )
    prefix: str = Field(
        default="",
        pattern="^[A-Za-z0-9_-]*$",
        description="Put before the names of its tools, as the model sees them; two servers may "
        "have tools of one name.",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> McpConfig:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either command or url of each server of environment.mcp")
        if (self.variables and self.url) or (self.headers and self.command):
            raise ValueError(
                "variables are for a command and headers for a url: move or drop them in "
                "environment.mcp"
            )
        return self


class RowCurriculumConfig(Settings):
    """Rows are drawn whose groups are likely to differ, by Thompson sampling.

    Of each row the run keeps what its last groups say of the policy's success, a Beta posterior.
    For each iteration a success is drawn from the posterior of every row, and those rows are played
    whose draws are nearest to a half, where rewards that are 0 or 1 vary most.
    """

    passing_reward: float = Field(
        default=1.0,
        description="Least reward of an episode, scores of reward functions included, that counts "
        "as a success.",
    )
    memory: float = Field(
        default=0.98,
        ge=0,
        lt=1,
        description="Decay of what is known of a row in each iteration, because the policy "
        "changes; 0: the last iteration alone counts.",
    )


class EnvironmentConfig(Settings):
    """A game or tool environment, or an agent, and how its failures are handled."""

    name: str | None = Field(
        default=None,
        description="Name of a built-in environment (tic_tac_toe, connect_four, prompt, "
        "textarena, gymnasium, pettingzoo, reasoning_gym, openenv) or the import path "
        "`package.module:Class` of your own.",
    )
    agent: str | None = Field(
        default=None,
        description="Instead of a name: the import path `package.module:function` of an agent, "
        "which is called as run(task, base_url, api_key) and returns the reward; or program (a "
        "command or a service), task_directories (of Harbor or Terminal-Bench), verifiers, or "
        "verifiers_classic.",
    )
    train: Literal["policy", "all"] = Field(
        default="policy",
        description="Who is trained where the environment asks the policy for its opponent. "
        "policy: the policy's own side; all: the opponent's conversations, too, by the rewards "
        "that the environment tells (`opponent_reward`), under a baseline of their own.",
    )
    options: Options = Field(
        default_factory=dict,
        description="Options of the environment, checked before work starts; an agent gets them "
        "as part of its task.",
    )
    python: str | None = Field(
        default=None,
        description="Path of another Python interpreter (3.11 or later) for the environment "
        "hosts, such as path/to/venv/bin/python. It has packages of its own and does not see "
        "EARL's.",
    )
    deterministic: bool = Field(
        default=True,
        description="True: an episode can be replayed from the prompt, the seed and the "
        "answers. False: the episodes of a lost host are played anew. A class may say so itself.",
    )
    tools: tuple[str, ...] = Field(
        default=(),
        description="Tools that the model may call: calculator, python, or the import path "
        "`package.module:function` of a function with type hints and a docstring.",
    )
    mcp: tuple[McpConfig, ...] = Field(
        default=(), description="Servers of the Model Context Protocol whose tools may be called."
    )
    tool_timeout_seconds: float = Field(
        default=10.0,
        gt=0,
        description="Time limit of a tool call that is a coroutine or goes to an MCP server; "
        "then it is ended and the model told. A plain function has the time limit of a step.",
    )
    curriculum: RowCurriculumConfig | None = Field(
        default=None,
        description="Rule by which the rows of a data set are chosen; None: one after the other, "
        "again and again. For environments that say how many prompts they have.",
    )
    hosts: int = Field(
        default=1,
        ge=1,
        description="Number of processes that run environment code, for each engine.",
    )
    step_timeout_seconds: float = Field(
        default=30.0,
        gt=0,
        description="Time limit of one reset or step, beyond which the episode fails. A "
        "coroutine is cancelled; otherwise the host process is ended, and its other episodes are "
        "replayed.",
    )
    start_timeout_seconds: float = Field(
        default=120.0,
        gt=0,
        description="Time limit for a host process to import the environment and make one.",
    )
    call_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Time limit of one answer that an agent, or an environment that asks the "
        "policy, waits for at the gateway; beyond it the request is refused and cancelled in the "
        "engine. None: the limit of its episode or step.",
    )
    episode_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Time limit of a whole episode, beyond which it fails. None: 600 s for an "
        "agent, and no limit for an environment, whose steps have one.",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> EnvironmentConfig:
        if bool(self.name) == bool(self.agent):
            raise ValueError(
                "give either environment.name, an environment, or environment.agent, the import "
                "path of an agent"
            )
        call, whole = self.call_timeout_seconds, self.agent_timeout_seconds
        if self.agent and call is not None and call >= whole:
            raise ValueError(
                f"environment.call_timeout_seconds ({call:g}) must be below "
                f"environment.episode_timeout_seconds ({whole:g}): lower the former"
            )
        if self.agent and self.train == "all":
            raise ValueError(
                "environment.train is for environments: an agent names the roles of its "
                "conversations, all of which are trained, so leave it out"
            )
        tools = self.tools or self.mcp
        if self.agent and tools:
            raise ValueError(
                "environment.tools and environment.mcp are for environments: an agent has its own "
                "tools, which it names in its requests; drop them"
            )
        if tools and self.tool_timeout_seconds >= self.step_timeout_seconds:
            raise ValueError(
                f"environment.tool_timeout_seconds ({self.tool_timeout_seconds:g}) must be below "
                f"environment.step_timeout_seconds ({self.step_timeout_seconds:g}), after which "
                "the episode fails: raise the latter"
            )
        return self

    @property
    def agent_timeout_seconds(self) -> float:
        """Time limit of an agent."""
        return self.episode_timeout_seconds or _AGENT_SECONDS

    def held_out(self, options: Mapping[str, Any]) -> EnvironmentConfig:
        """The environment as held-out episodes are played, which nobody is trained on. options:
        in place of its own."""
        changed = {**self.options, **options}
        own = {"options": changed, "train": "policy", "curriculum": None}
        return self.model_copy(update=own)

    @property
    def played(self) -> str:
        """Name by which `environments.registry` knows the environment."""
        return self.name or f"agent:{self.agent}"


Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Names an environment in metrics and tables."""


class MixedEnvironment(EnvironmentConfig):
    """One of several environments of a run."""

    label: Label | None = Field(
        default=None, description="Name in metrics; None: the last part of name or agent."
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        description="Share of the prompts, relative to the weights of the other environments.",
    )

    reward_weight: float | None = Field(
        default=None,
        description="Weight of its own reward in the episode's; None: reward.environment_weight. "
        "With 0 and no reward functions it is an anchor, which its `kl` alone learns from.",
    )
    kl: PenaltyConfig | None = Field(
        default=None,
        description="KL penalty of its episodes in place of algorithm.kl's; placement and "
        "estimator are those of algorithm.kl.",
    )

    @property
    def title(self) -> str:
        """Its label, or what stands for it."""
        return self.label or re.split(r"[:.]", self.played)[-1]


class CurriculumConfig(Settings):
    """Prompts go where the policy can learn most: to the environments whose groups differ most.

    An environment's weight is multiplied by the mean spread of its groups: the standard deviation
    of a group's returns over the range of returns seen. One that is always won, or never, has none.
    """

    memory: float = Field(
        default=0.7,
        ge=0,
        lt=1,
        description="Decay of the running mean of the spread over iterations; 0: the last "
        "iteration alone counts.",
    )
    least_share: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="Share of the prompts that follows the weights alone, so that every "
        "environment is still played.",
    )


class SuiteConfig(EnvironmentConfig):
    """Held-out prompts of any environment, each tried `attempts` times."""

    label: Label = Field(description="Name in metrics and tables.")
    prompts: int = Field(
        default=128,
        ge=1,
        description="Number of held-out prompts, which training never draws; the same in each "
        "evaluation.",
    )
    attempts: int = Field(
        default=1,
        ge=1,
        description="Episodes for each prompt; pass@k is reported for every power of 2 up to "
        "this number.",
    )
    passing_return: float = Field(
        default=1.0, description="Least return of an attempt that counts as passed."
    )
    temperature: float | None = Field(
        default=None,
        ge=0,
        description="Sampling temperature. None: that of the rollout; 0: greedy.",
    )
    every: int = Field(
        default=1,
        ge=1,
        description="Played in every n-th evaluation of the run; 1: in all of them.",
    )
    gate: bool = Field(
        default=False,
        description="Whether a checkpoint is not the best one, for the run and in MLflow, where "
        "fewer prompts pass at the first attempt than the 95 % interval of policy version 0 "
        "allows.",
    )
    scored_by: tuple[str, ...] = Field(
        default=(),
        description="Labels of the reward.functions that score the suite, with their weights and "
        "reward.environment_weight; none: the environment's own reward alone counts.",
    )

    @model_validator(mode="after")
    def _draws(self) -> SuiteConfig:
        if self.attempts > 1 and self.temperature == 0:
            raise ValueError(
                f"the suite {self.label} has {self.attempts} attempts at temperature 0, which are "
                "all the same: give a temperature, or one attempt"
            )
        if self.train == "all":
            raise ValueError(
                f"the suite {self.label} has train `all`, and held-out episodes train nobody: "
                "leave it out"
            )
        if self.curriculum is not None:
            raise ValueError(
                f"the suite {self.label} has a curriculum, and held-out prompts are the same in "
                "each evaluation: leave it out"
            )
        if self.gate and self.every > 1:
            raise ValueError(
                f"the suite {self.label} is a gate and is left out of evaluations: leave `every` "
                "out, or `gate`"
            )
        return self
