"""One policy of a run, ready to play: a rollout worker of its own, without the run's lock.

It reads a checkpoint's `policy/` directory and nothing else of the run, so that a run in progress
may be evaluated beside its training. Imports no prefect, and no torch in this process.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from earl_core.cluster.errors import WorkerCallFailed
from earl_core.config import ConfigError, RunConfig
from earl_core.config.environment import SuiteConfig
from earl_core.config.run import KEPT_ADAPTER, KEPT_ANCESTOR
from earl_core.config.selector import SelectorConfig
from earl_core.config.stages import RolloutStage, StagesConfig
from earl_core.control.device_figures import with_figures
from earl_core.control.hardware import read_hardware
from earl_core.control.live import live
from earl_core.control.precision import resolved
from earl_core.control.worker_groups import Progress, WorkerGroups, quiet
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import ManifestError, read_manifest
from earl_core.environments.base import Message
from earl_core.pretrained.adapter_directory import is_adapter, policy_in
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.rollout.errors import ContextOverflow
from earl_core.rollout.pass_rates import suite_results
from earl_core.rollout.rollout_stats import RolloutStats, evaluation_results
from earl_core.run.checkpoints import (
    MARKER,
    best_checkpoint,
    holding_checkpoint,
    stable_checkpoints,
    verify_checkpoint,
)
from earl_core.run.kept_models import kept_record
from earl_core.run.policy_versions import INITIAL_VERSION, PolicyVersions
from earl_core.run.recovery import newest_whole
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.selection import SelectionInput


@dataclass(frozen=True)
class PlayedPolicy:
    """A policy on disk: a model directory, or an adapter's. version: the policy version; label: how
    to call it to people. engine: how its run deploys an engine; None before its first iteration.
    marker: its STABLE file, by which the checkpoint is held while it is used; None for a model that
    no run removes. damaged: what is wrong with each later one, for which this one stands in."""

    policy: Path
    version: int
    label: str
    engine: StageDeployment | None = None
    marker: Path | None = None
    damaged: tuple[str, ...] = ()


def find_checkpoint(
    run: Path, config: RunConfig, which: str = "last", trained: bool = False
) -> PlayedPolicy:
    """`last`, `best` (of those evaluated), `initial` (before training) or the number of an
    iteration. trained: the caller takes no `initial`, so no message offers it.

    Every file of it is verified. Where the last one is damaged, the last whole one is taken. Raises
    `ConfigError` with the checkpoints there are, `CheckpointError` for a damaged one, `RunDamaged`
    for a damaged copy of what the run began with.
    """
    if which == "initial":
        for folder in (KEPT_ANCESTOR, KEPT_ADAPTER):
            if (run / folder).is_dir():
                kept_record(run / folder)
        initial = config.initial_model
        if not (Path(initial.path) / "config.json").is_file():
            raise ConfigError(f"the initial model {initial.path} is not there (any more)")
        path = Path((initial.adapter and initial.adapter.source) or initial.path)
        return PlayedPolicy(path, INITIAL_VERSION, "the initial model", newest_engine(run))
    found = stable_checkpoints(run)
    listed = ", ".join(map(str, found)) or "none yet"
    if not (which in ("last", "best") or which.isdecimal()):
        raise ConfigError(
            f"a checkpoint is `last`, `best`, {'' if trained else '`initial` '}or the number of an "
            f"iteration, not {which!r}; {run} has {listed}"
        )
    if found and which == "best":
        which = str(best_checkpoint(run, config.gates))
    if not found or (which != "last" and int(which) not in found):
        ways = ["name one of them"] if found else []
        ways += [] if trained else ["name `initial` for the model before training"]
        asked = f" {which}" if which.isdecimal() else ""
        raise ConfigError(
            f"{run} has no whole checkpoint{asked} (it has {listed}): "
            f"{', or '.join(ways) or 'train it until it has one'}"
        )
    number, damaged = newest_whole(run, found) if which == "last" else (int(which), [])
    if which != "last":
        verify_checkpoint(run, number)
    path = run / "checkpoints" / f"{number:06d}"
    label, version = (
        f"the checkpoint of iteration {number}",
        PolicyVersions(run).update(number).made,
    )
    policy, engine = policy_in(path), newest_engine(run)
    return PlayedPolicy(policy, version, label, engine, path / MARKER, tuple(damaged))


def newest_engine(run: Path) -> StageDeployment | None:
    """An engine as the run's newest plan has it: its context has grown with the episodes."""
    for path in sorted(run.glob("iterations/*/select.json"), reverse=True):
        # A damaged plan tells nothing; an older one may.
        with suppress(ManifestError, ValidationError, KeyError):
            plan = DeploymentPlan.model_validate(read_manifest(path).outputs["plan"])
            return plan["rollout"]
    return None


class PolicyPlayer:
    """A rollout worker group that holds one policy. Use it as a context manager.

    From its construction on the checkpoint cannot be pruned; raises `ConfigError` if it just was.
    listener: told of the rollout's progress: episodes_done, episodes, tokens_per_second, return.
    Raises what worker groups raise; `interrupt` may be called from any thread and ends what runs.
    """

    def __init__(
        self, config: RunConfig, checkpoint: PlayedPolicy, listener: Progress = quiet
    ) -> None:
        model = config.initial_model
        if not is_adapter(checkpoint.policy):
            model = model.whole(checkpoint.policy.resolve())
        # Nothing is trained of what is played here.
        rollout = config.rollout.model_copy(update={"record_routing": "off"})
        precision = resolved(
            config.model_copy(update={"model": model, "rollout": rollout}),
            settings=("rollout.dtype",),
        )
        precision.tell(lambda text: listener("precision", checkpoint.version, {"chosen": text}))
        self.config = precision.config
        self.checkpoint = checkpoint
        with ExitStack() as held:
            if checkpoint.marker is not None:
                held.enter_context(holding_checkpoint(checkpoint.marker))
            self._shape = read_model_shape(Path(model.path))
            directory = config.selector.profile_directory
            hardware = with_figures(read_hardware(), directory=directory)
            self._deployment = self._choose_deployment(hardware)
            self._held = held.pop_all()
        self._directory = Path(tempfile.mkdtemp(prefix="earl-policy-"))
        self._groups = WorkerGroups(
            self.config, self._directory, self._directory, hardware, listener
        )

    def __enter__(self) -> PolicyPlayer:
        self._held.enter_context(live(str(self._directory), self))
        try:
            self._call("ensure")
        except BaseException:
            self._close(keep_logs=True)
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # A failure's message names the worker's log.
        self._close(keep_logs=isinstance(error, Exception))

    def evaluate(self, episodes: int, temperature: float | None) -> dict[str, Any]:
        """`outcomes` and `metrics` as in `evaluation_results`, with the same prompts and seeds as
        `train` evaluates with; `episodes` played to an end, and `failed` ones."""
        result = self._call(
            "evaluate",
            episodes=episodes,
            temperature=temperature,
        )
        tally = RolloutStats.model_validate(result["tally"])
        return {"episodes": tally.episodes, "failed": tally.failed, **evaluation_results(tally)}

    def play_suites(self) -> dict[str, Any]:
        """Every suite; `suites` and `metrics` as in `pass_rates.suite_results`."""
        return suite_results(
            [
                (suite.label, suite.attempts, self._play_suite(suite))
                for suite in self.config.evaluation.suites
            ]
        )

    def _play_suite(self, suite: SuiteConfig) -> RolloutStats:
        result = self._call("play_suite", label=suite.label, prompts=suite.prompts)
        return RolloutStats.model_validate(result["tally"])

    def play_one(
        self, prompt: int, seed: int, temperature: float | None, environment: str = ""
    ) -> dict[str, Any]:
        """One game's transcript. environment: its label, where the run has several."""
        return self._call(
            "play_one", prompt=prompt, seed=seed, temperature=temperature, environment=environment
        )

    def answer(self, messages: list[Message], seed: int, temperature: float | None) -> str:
        """The policy's next answer in a conversation."""
        result = self._call("answer", messages=messages, seed=seed, temperature=temperature)
        return str(result["text"])

    def serve(self, port: int, key: str, temperature: float | None) -> None:
        """Answer OpenAI's clients at a port of 127.0.0.1 until the worker is ended."""
        self._call("serve", port=port, key=key, temperature=temperature)

    def interrupt(self) -> None:
        """End the worker now, from any thread; a call under way raises."""
        self._groups.interrupt()

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """The method's result; once more with a longer engine for each time that it was too short.

        The call loads the policy, too: the worker may be a fresh one. The length is doubled each
        time, up to the model's own range, where no context overflows any more.
        """
        version, path = self.checkpoint.version, str(self.checkpoint.policy.resolve())
        arguments["weights"] = {"directory": path, "policy_version": version}
        while True:
            try:
                (result,) = self._groups.call(
                    self._deployment, "rollout", method, version, stage="evaluation", **arguments
                )
                return result
            except WorkerCallFailed as error:
                length = self._deployment.max_model_len
                full = length >= self._shape.max_positions
                if full or not issubclass(error.kind, ContextOverflow):
                    raise
                needed = int(error.payload["tokens"])
                longer = min(max(2 * length, needed), self._shape.max_positions)
                self._deployment = self._deployment._replace(max_model_len=longer)

    def _close(self, keep_logs: bool) -> None:
        try:
            self._groups.close()
        finally:
            self._held.close()
        if not keep_logs:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _choose_deployment(self, hardware: Hardware) -> StageDeployment:
        """One engine as wide as the run's, because a model that needs two devices needs them here
        too, and for contexts as long."""
        asked = SelectionInput.of(self.config, hardware, self._shape)
        engine = self.checkpoint.engine or asked.configured()[0]
        width = RolloutStage(tensor_parallel=engine.tensor_parallel)
        stages = StagesConfig(rollout=width)
        config = self.config.model_copy(update={"stages": stages, "selector": SelectorConfig()})
        chosen = select(SelectionInput.of(config, hardware, self._shape))["rollout"]
        length = min(engine.max_model_len, self._shape.max_positions)
        return chosen._replace(max_model_len=max(chosen.max_model_len, length))
