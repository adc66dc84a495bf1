"""The rank of the `demonstrations` worker group: writes the rows of iterations that imitate."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from earl_core.config import ConfigError
from earl_core.config.imitation import DEFAULT_COLUMN, ImitationConfig
from earl_core.environments.adapters.data_set import DataSet, read_rows
from earl_core.environments.adapters.row_forms import RowForm
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.imitation.chats import Chats
from earl_core.imitation.content import CONTENT, content_digest
from earl_core.imitation.drawing import drawn
from earl_core.imitation.kept import KeptEpisodes, check_tokens
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.tool_calls import Tools
from earl_core.rollout.engine_factory import load_chat_tokenizer
from earl_core.rollout.rollout_load import RolloutLoad
from earl_core.rollout.rollout_stats import RolloutStats, shape_metrics
from earl_core.run.episodes import NAME
from earl_core.run.run_stores import run_store
from earl_core.run.worker import RunWorker
from earl_core.system import fault_points
from earl_core.trajectory.samples import Episode, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA


class Demonstrations(Protocol):
    """Episodes to imitate, by number."""

    def __len__(self) -> int: ...

    def episode(self, index: int) -> Episode:
        """One of them. Raises `ConfigError` for one that cannot be imitated."""
        ...

    def place(self, index: int) -> str:
        """Name the place where people find it."""
        ...


class DemonstrationWorker(RunWorker):
    """Reads the demonstrations once, when it is first called."""

    _found: Demonstrations | None = None

    async def check(self, first: int, taken: int) -> dict[str, Any]:
        """Make every episode that iterations from `first` on imitate, and keep none; `episodes`,
        how many different ones they are. taken: demonstrations of the iterations before. Raises
        `ConfigError`."""
        left = (self._settings.iterations - first) * self._config.demonstrations
        places = range(taken, taken + left)
        found = await self._demonstrations()
        wanted = set(drawn(len(found), self._config.seed, places))
        for done, index in enumerate(sorted(wanted), start=1):
            self._episode(found, index)
            if done % _TOLD_EVERY == 0:
                self._context.report({"episodes_done": done, "episodes": len(wanted)})
        return {"episodes": len(wanted)}

    async def demonstrate(self, taken: int) -> dict[str, Any]:
        """Write the call's iteration's demonstrations as a shard of the rollout's columns.

        taken: demonstrations of the iterations before. Episode and group ids count the
        demonstrations of the run; prompt ids are the numbers of the rows, or of the episodes, that
        they are. Returns `shards`, `outputs` and `metrics`.
        """
        started, iteration = time.perf_counter(), self._context.iteration or 0
        places = range(taken, taken + self._config.demonstrations)
        found = await self._demonstrations()
        made: dict[int, Episode] = {}
        indices = drawn(len(found), self._config.seed, places)
        # In the order of their files, each of which is then read once.
        for index, place in sorted(zip(indices, places, strict=True)):
            made[place] = self._episode(found, index)
            made[place].episode_id = made[place].group_id = place
        episodes = [made[place] for place in places]
        fault_points.point("demonstrate.read", iteration)
        entry = run_store(self._run_directory, self._config).publish(
            stage="demonstrate",
            iteration=iteration,
            rank=0,
            schema=ROLLOUT_SCHEMA,
            rows=rollout_rows(episodes),
        )
        fault_points.point("demonstrate.written", iteration)
        metrics = {
            **shape_metrics(RolloutStats.of(episodes, RolloutLoad())),
            "available": float(len(found)),
            "epochs": places.stop / len(found),
            "seconds": time.perf_counter() - started,
        }
        shards = [entry.model_dump(mode="json")]
        return {"shards": shards, "outputs": {CONTENT: self._content}, "metrics": metrics}

    @property
    def _settings(self) -> ImitationConfig:
        settings = self._config.imitation
        assert settings is not None
        return settings

    @cached_property
    def _chat(self) -> ChatTokenizer:
        return load_chat_tokenizer(self._config)

    @cached_property
    def _content(self) -> str:
        """The digest of all that there is to imitate, as it lay there when it was first asked."""
        settings = self._settings
        return content_digest(settings.data or f"{self._teacher}/iterations/*/{NAME}")

    @cached_property
    def _positions(self) -> int | None:
        return read_model_shape(Path(self._config.initial_model.path)).max_positions

    async def _demonstrations(self) -> Demonstrations:
        if self._found is None:
            self._found = await self._read()
        return self._found

    async def _read(self) -> Demonstrations:
        settings = self._settings
        if settings.run is not None:
            kept = KeptEpisodes(self._teacher, settings, self._chat.vocabulary)
            check_tokens(self._teacher, Path(self._config.initial_model.path))
            return kept
        assert settings.data is not None
        try:
            rows = read_rows(settings.data, settings.split, ANY_ROW)
        except ConfigError as error:
            raise ConfigError(f"imitation.data: {error.problem}", remedy=error.remedy) from error
        column = None if settings.messages == DEFAULT_COLUMN else settings.messages
        form = RowForm(settings.format, column, learnt=True)
        return Chats(rows, self._chat, form, await self._tools(rows))

    @property
    def _teacher(self) -> Path:
        """The directory of the run whose episodes are imitated."""
        assert self._settings.run is not None
        run = Path(self._settings.run)
        return run if run.is_dir() else Path(self._config.runs_directory) / run

    async def _tools(self, rows: DataSet) -> Mapping[str, Tools]:
        """The tools of the run's environments by label, asked of a host of each."""
        found = {}
        for label, environment in self._config.played.items():
            pool = EnvironmentPool.of(environment, hosts=1, concurrency=1, log_path=None)
            try:
                await pool.start()
                found[label] = Tools(pool.tools)
            finally:
                await pool.stop()
        return found

    def _episode(self, found: Demonstrations, index: int) -> Episode:
        """Raises `ConfigError` for one that cannot be trained on."""
        episode = found.episode(index)
        longest, positions = episode.context_tokens, self._positions
        if positions is not None and longest > positions:
            raise ConfigError(
                f"{found.place(index)} has {longest} tokens, more than the {positions} positions "
                "of the model",
                remedy="leave it out: demonstrations are not cut",
            )
        if not any(sample.trained_tokens for sample in episode.samples):
            raise ConfigError(f"{found.place(index)} has no token to learn", remedy="leave it out")
        return episode


_TOLD_EVERY = 500


@dataclass(frozen=True)
class _AnyRow:
    """Rows are looked at as chats, one by one, when they are read."""

    def fault(self, row: Mapping[str, Any]) -> str:
        return ""

    def suspects(self, table: Any) -> Sequence[int] | None:
        return ()


ANY_ROW = _AnyRow()
