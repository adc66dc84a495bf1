"""EARL as a library, in scripts and notebooks.

    from flows.api import Run

    with Run.from_recipe("tictactoe_tiny", iterations=5) as run:
        for iteration in run:
            print(iteration.number, iteration.return_mean)
        run.evaluate()
        print(run.play())

It runs the flows of the command line, on the same Prefect server.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earl_core.config import ConfigError, RunConfig, load_config
from earl_core.config.load import recipe_names
from earl_core.control.fork_plan import ForkPlan
from earl_core.run.episodes import NAME, SCHEMA, read_samples
from earl_core.run.kept_episodes import read_episodes
from earl_core.run.record import is_finished, read_lines, stored_config
from earl_core.system.errors import EarlError
from flows.flow_thread import FlowThread

if TYPE_CHECKING:
    import pyarrow as pa

# `docs/reference/python.md` promises these names; a test compares.
__all__ = ["ConfigError", "EarlError", "Game", "Iteration", "Run"]

_FIRST_PROMPT = 2**41
"""First prompt of games played for people: far from those of training and of evaluation."""


@dataclass(frozen=True)
class Iteration:
    """A finished iteration. metrics: as a line of the run's `metrics.jsonl`, by `stage/name`."""

    run: Path
    number: int
    metrics: Mapping[str, float]

    @property
    def return_mean(self) -> float:
        """The mean return of its episodes; NaN where none was scored."""
        return float(self.metrics.get("reward/mean", float("nan")))

    @cached_property
    def episodes(self) -> list[dict[str, Any]]:
        """Its episodes, as far as `tracking.keep_episodes` kept them.

        Each a dict: episode_id, prompt_id, environment, outcome, finish_reason, reward, `turns`
        (observation, answer, reward, tokens of each) and `closing`. Raises `EpisodesDamaged`.
        """
        return read_episodes(self._path, None)

    def samples(self) -> pa.Table:
        """The kept samples as an Arrow table, with tokens, mask and log-probs; a row for each; none
        where none were kept. Raises `EpisodesDamaged`."""
        try:
            return read_samples(self._path)
        except FileNotFoundError:
            return SCHEMA.empty_table()

    @property
    def _path(self) -> Path:
        return self.run / "iterations" / f"{self.number:06d}" / NAME

    def __repr__(self) -> str:
        return f"<iteration {self.number} of {self.run.name}, return {self.return_mean:+.3f}>"


class Game:
    """One game. turns: of each its observation, answer and reward. closing: what the environment
    said at the end. Prints as a transcript."""

    def __init__(self, played: Mapping[str, Any]) -> None:
        self.turns: list[dict[str, Any]] = list(played["turns"])
        self.closing = str(played.get("closing") or "")
        self.outcome = str(played.get("outcome") or played["finish_reason"])
        self.total_reward = float(played["return"])

    def __repr__(self) -> str:
        parts = []
        for turn in self.turns:
            parts += [str(turn.get("observation", "")), f"agent: {turn.get('answer', '')}"]
        parts += [self.closing, f"{self.outcome}, return {self.total_reward:+g}"]
        return "\n".join(part for part in parts if part)


class Run:
    """A run, trained by going through it: each step of the loop is an iteration.

    The next one begins when the loop asks for it. Whatever ends the loop (a break, an error, Ctrl-C
    or the interruption of a notebook's cell) stops the workers; another loop, and `earl resume`,
    then go on after the last checkpoint. A process trains one run at a time.

    config: a recipe's name or a file. overrides: `a.b=c` for `load_config`.
    """

    def __init__(self, config: str, overrides: list[str]) -> None:
        self.config: RunConfig = load_config(config, overrides)
        self._source, self._overrides = config, overrides
        self._training: FlowThread | None = None

    @classmethod
    def from_recipe(
        cls, recipe: str, settings: Mapping[str, Any] | None = None, **common: Any
    ) -> Run:
        """A run of a recipe that comes with EARL; one of that name that exists is continued.

        settings: further ones by their dotted names, such as `{"rollout.group_size": 4}`. common:
        those of the run itself, such as name=, iterations= and seed=. Raises `ConfigError`.
        """
        if recipe not in recipe_names():
            raise ConfigError(
                f"there is no recipe {recipe!r}: choose one of {', '.join(recipe_names())}, or "
                "name a file with Run.from_file"
            )
        return cls(recipe, _overrides({**(settings or {}), **common}))

    @classmethod
    def from_file(
        cls, path: str | Path, settings: Mapping[str, Any] | None = None, **common: Any
    ) -> Run:
        """Make a run of a run file, as `from_recipe` does of a recipe."""
        if not Path(path).is_file():
            raise ConfigError(f"there is no run file {path}: give the path of a YAML file")
        return cls(str(path), _overrides({**(settings or {}), **common}))

    @classmethod
    def open(cls, directory: str | Path, settings: Mapping[str, Any] | None = None) -> Run:
        """The run in a directory, with the configuration stored there and changed `settings`.
        Raises `ConfigError` where no run is."""
        given = _overrides(settings or {})
        stored = stored_config(Path(directory), given)
        # The directory may have been moved since its configuration was written.
        place = _overrides({"name": stored.name, "runs_directory": stored.runs_directory})
        return cls(str(Path(directory) / "config.yaml"), [*given, *place])

    def fork(
        self, name: str, settings: Mapping[str, Any] | None = None, at: str | int = "last"
    ) -> Run:
        """A run beside this one that goes on after its checkpoint of iteration `at`, with changed
        `settings`; as `earl fork` makes it. Raises `ConfigError`, `CheckpointError`."""
        plan = ForkPlan.of(self.directory, str(at), name, _overrides(settings or {}))
        return Run.open(plan.make())

    @property
    def directory(self) -> Path:
        """The run directory, which need not exist yet."""
        return Path(self.config.runs_directory) / self.config.name

    def __iter__(self) -> Iterator[Iteration]:
        """Train to the end, iteration by iteration. Raises what a flow raises, as `earl train`."""
        with closing(self._train()) as iterations:
            yield from iterations

    def _train(self) -> Generator[Iteration, None, None]:
        if is_finished(self.directory) and len(self.iterations) >= self.config.iterations:
            return
        from earl_core.control.worker_groups import preload_ranks
        from flows.cli.training import preflight

        preload_ranks()
        training = FlowThread(
            "train",
            self.config.runs_directory,
            in_step=True,
            check=lambda: preflight(self.config, self.directory),
            config=self._source,
            overrides=self._overrides,
        )
        self._training = training
        try:
            for number in training.iterations():
                yield next(each for each in self.iterations if each.number == number)
        finally:
            training.stop()
            self._training = None

    @property
    def iterations(self) -> list[Iteration]:
        """Every finished iteration, ascending, those of earlier attempts too."""
        return [
            Iteration(self.directory, int(line["iteration"]), _numbers(line))
            for line in self.metrics
        ]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A dict for each finished iteration, ascending: `iteration`, `time` and the metrics, as
        pandas and polars take them for a table."""
        lines = read_lines(self.directory / "metrics.jsonl")
        latest = {line["iteration"]: line for line in lines}
        return [latest[number] for number in sorted(latest)]

    def evaluate(
        self,
        checkpoint: str | int = "last",
        episodes: int | None = None,
        temperature: float | None = None,
    ) -> dict[str, Any]:
        """Play held-out games and all suites; `outcomes` with 95 % intervals, `suites`, `metrics`.

        checkpoint: `last`, `best`, `initial` or an iteration. episodes, temperature: None as in the
        run's own evaluations. Raises `ConfigError` where there is no such checkpoint.
        """
        from earl_core.control.policy_player import find_checkpoint

        find_checkpoint(self.directory, self.config, str(checkpoint))
        evaluation = FlowThread(
            "evaluate",
            self.config.runs_directory,
            run=str(self.directory),
            checkpoint=str(checkpoint),
            episodes=episodes,
            temperature=temperature,
            overrides=[],
        )
        try:
            result: dict[str, Any] = evaluation.result()
            return result
        finally:
            evaluation.stop()

    def play(
        self,
        checkpoint: str | int = "last",
        *,
        prompt: int = 0,
        seed: int | None = None,
        temperature: float | None = None,
        environment: str = "",
    ) -> Game:
        """Have a checkpoint play one game. prompt: which starting state, from 0. seed: None for a
        random one. environment: its label, where the run has several. Raises as `evaluate` does."""
        from earl_core.control.policy_player import PolicyPlayer, find_checkpoint

        found = find_checkpoint(self.directory, self.config, str(checkpoint))
        seed = secrets.randbits(32) if seed is None else seed
        label = environment or next(iter(self.config.played))
        with PolicyPlayer(self.config, found) as player:
            return Game(player.play_one(_FIRST_PROMPT + prompt, seed, temperature, label))

    def close(self) -> None:
        """End the training that a loop has left open, if any; the run can be resumed."""
        if self._training is not None:
            self._training.stop()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        done = len(self.metrics)
        return f"<run {self.directory}, {done} of {self.config.iterations} iterations>"


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    """Write the settings as `load_config` takes them: JSON is YAML, unless it escapes characters; a
    name is a text as it is."""

    def text(value: Any) -> str:
        return json.dumps(value, default=str, ensure_ascii=False)

    return [
        f"{name}={value if name == 'name' else text(value)}" for name, value in settings.items()
    ]


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name not in ("iteration", "time")}
