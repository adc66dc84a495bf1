"""Demonstrations that the first iterations of a run learn from: `imitation`."""

from __future__ import annotations

from pydantic import Field, model_validator

from earl_core.system.settings import Place, Settings


class ImitationConfig(Settings):
    """Iterations that imitate: chats of a data set, or episodes that another run has kept."""

    iterations: int = Field(
        ge=1,
        description="Number of first iterations that imitate; those of `iterations` that are left "
        "play episodes.",
    )
    data: Place | None = Field(
        default=None,
        description="Chats: a .jsonl or .parquet file, a glob or directory of such files, or a "
        "directory that `datasets` saved; on any storage that fsspec reads. null: `run` has them.",
    )
    split: str | None = Field(
        default=None, description="Split of the data; null: there is one only."
    )
    messages: str = Field(
        default="messages",
        description="Column of the chats: lists of messages with role and content, and tool_calls "
        "where there are any. A column `tools` has the tools of a chat, in OpenAI's form; without "
        "it the chat has those of the environment.",
    )
    run: Place | None = Field(
        default=None,
        description="Run whose kept episodes are imitated, token by token: its directory, or its "
        "name in `runs_directory`. null: `data` has chats.",
    )
    best_of: int | None = Field(
        default=None,
        ge=1,
        description="From each so many episodes of a prompt in one iteration of `run`, the one "
        "with the highest reward is imitated; 1: all are. null: the best of the whole group.",
    )
    min_reward: float | None = Field(
        default=None, description="Least reward of an episode that is imitated; null: any."
    )
    episodes_per_iteration: int | None = Field(
        default=None,
        ge=1,
        description="Demonstrations of an iteration; null: as many as a rollout has episodes. They "
        "are taken in an order drawn from the seed, and once all are taken in another one.",
    )
    minibatches: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps of an imitating iteration, in one pass over its "
        "demonstrations; null: update.minibatches. Imitation takes many small steps well.",
    )
    learning_rate: float = Field(
        default=1e-5, gt=0, description="Learning rate of the imitating iterations, constant."
    )

    @model_validator(mode="after")
    def _one_source(self) -> ImitationConfig:
        if (self.data is None) == (self.run is None):
            raise ValueError("imitation needs either `data`, or the `run` whose episodes it takes")
        if self.run is None and (self.best_of is not None or self.min_reward is not None):
            raise ValueError(
                "imitation.best_of and imitation.min_reward choose among the episodes of a `run`: "
                "leave them out, or name one"
            )
        if self.data is None and self.split is not None:
            raise ValueError("imitation.split is one of `data`: leave it out, or name data")
        return self

    def check(self, iterations: int, steps: int, demonstrations: int) -> None:
        """Raise `ValueError` for more imitating iterations than the run has, or more optimizer
        steps than an iteration has demonstrations."""
        if self.iterations > iterations:
            raise ValueError(
                f"imitation.iterations ({self.iterations}) exceeds iterations ({iterations}), "
                "which counts them too: raise iterations"
            )
        if steps > demonstrations:
            raise ValueError(
                f"imitation.minibatches ({steps}) exceeds imitation.episodes_per_iteration "
                f"({demonstrations}): each minibatch needs a demonstration of its own"
            )
